"""Record what has interrupted a run, what that cost, and with which ranks it goes on: ``failures.jsonl``.

Each line is written by whoever knows: the launcher says how a rank has ended, a rank that names a hang or a step that
is not finite does so before all end, and rank 0 says after the first new step what was lost. See [Note: forked ranks].
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from meshwright.cli.run_files import FAILURES, METRICS, append_line, read_records
from meshwright.cli.train_options import Options, Prepared, parts_of_a_batch
from meshwright.errors import CheckpointError, ConfigError, NonFiniteError, StrategyError
from meshwright.runtime import print_rank, rank
from meshwright.runtime.launch import HUNG, NOT_FINITE, Attempt, Failure, restart_count, restarts_left

_FEW = 3  # steps whose median is the usual time


def note(run_dir: Path, what: str, **figures: Any) -> None:
    """Append one event to a run's failures."""
    append_line(run_dir / FAILURES, {"time_s": time.time(), "what": what, "attempt": restart_count(), **figures})


def read_failures(run_dir: Path) -> list[dict[str, Any]]:
    """Return the events of a run; a line that is none is passed over."""
    found = []
    try:
        lines = (run_dir / FAILURES).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict) and isinstance(event.get("what"), str):
            found.append(event)
    return found


def teller(run_dir: Path) -> Callable[[Failure], None]:
    """Return what the launcher calls with a failure: it classifies it, tells it in a line, and records it."""

    def tell(failure: Failure) -> None:
        if failure.status in (HUNG, NOT_FINITE):
            return  # the rank has told it
        if failure.status < 0:
            name = failure.signal_name
            what = "out of memory" if name == "SIGKILL" and failure.out_of_memory else "killed"
            text = f"rank {failure.rank} was ended by {name}{', for memory' if what == 'out of memory' else ''}"
            print(f"meshwright: {text}", file=sys.stderr, flush=True)
            figures: dict[str, Any] = {"signal": name}
        else:
            what, text, figures = "error", f"rank {failure.rank} ended with status {failure.status}", {}
        event = {"time_s": failure.time_s, "what": what, "attempt": failure.attempt, "rank": failure.rank}
        if (run_dir).is_dir():
            append_line(run_dir / FAILURES, {**event, **figures, "text": text})

    return tell


class RunFailures:
    """Failures of a run, as one rank sees and writes them.

    Args:
        run_dir: The run's directory.
        step: Steps that the run begins with.
        lost: Records of steps of an earlier attempt that are taken again.
        last: The last record that stays; None: none.
    """

    def __init__(
        self, run_dir: Path, step: int, lost: Sequence[Mapping[str, Any]] = (), last: Mapping[str, Any] | None = None
    ) -> None:
        self._run_dir, self._start = run_dir, step
        self._lost, self._last = list(lost), last

    def went_on(self, record: Mapping[str, Any], source: str) -> None:
        """Record, after the first step of a later attempt, what the failure before it has cost."""
        last = self._lost[-1] if self._lost else self._last
        if last is None or restart_count() == 0 or not isinstance(last.get("time_s"), int | float):
            return
        times = [each["step_time_s"] for each in (*self._lost, record) if isinstance(each.get("step_time_s"), float)]
        repeated_s = math.fsum(times[:-1])
        usual_s = statistics.median(times) if len(times) >= _FEW else min(times, default=0.0)
        lost_s = max(record["time_s"] - last["time_s"] - usual_s, 0.0) + repeated_s
        note(self._run_dir, "went on", step=self._start, source=source, lost_steps=len(self._lost), lost_s=lost_s)
        text = f"went on after step {self._start} from {source}: {lost_s:.1f} s and {len(self._lost)} steps were lost"
        print_rank(f"meshwright: {text}", file=sys.stderr, flush=True)

    def told(self, text: str) -> None:
        """Take what a watch tells; a rank that slows the others down is recorded, too."""
        print(f"meshwright: {text}", file=sys.stderr, flush=True)
        if " is slow, " in text:
            note(self._run_dir, "slow", text=text)

    def hung(self, text: str, guilty: Sequence[int]) -> None:
        """Record a hang, and end this rank where the launcher starts all of them again."""
        note(self._run_dir, "hang", ranks=list(guilty), text=text)
        if restarts_left():
            self._leave(HUNG)

    def not_finite(self, step: int, loss: float, grad_norm: float) -> None:
        """Go back to the state before a step that is not finite; where it comes again, it is no accident.

        Raises:
            NonFiniteError: When it has come before, or nothing would start the ranks again.
        """
        seen = [each for each in read_failures(self._run_dir) if each["what"] == "nan" and each.get("step") == step]
        if restarts_left() and not seen:
            if rank() == 0:
                text = f"step {step} is not finite (loss {loss:g}, gradient norm {grad_norm:g}): it is taken again"
                print(f"meshwright: {text}", file=sys.stderr, flush=True)
                note(self._run_dir, "nan", step=step, text=text)
                self._leave(NOT_FINITE)
            time.sleep(60.0)  # for rank 0 to have written that; then the launcher ends this rank
        raise NonFiniteError(
            f"Step {step} is not finite{', twice' if seen else ''}",
            expected="a finite loss and gradient norm",
            got=f"loss {loss:g}, gradient norm {grad_norm:g}",
            fix="lower the learning rate, or add the method skip_nonfinite; the state before it is saved",
        )

    def not_saved(self, step: int, error: CheckpointError) -> None:
        """Tell and record that a checkpoint could not be written; the run goes on with its snapshots."""
        if rank() == 0:
            text = f"no checkpoint of step {step}; the run goes on: {error}"
            print(f"meshwright: {text}", file=sys.stderr, flush=True)
            note(self._run_dir, "disk", step=step, text=str(error))

    @staticmethod
    def _leave(status: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


# --- Fewer ranks: ``meshwright train --min-nproc``
#
# A rank that fails is started again with all others. If the same one fails again before the run has come further, it is
# lost: its device, perhaps. The launcher then starts as many of the others as the strategy and the batch can be divided
# among. They plan anew, take the state from the snapshots or the newest checkpoint, and cut the same batch into more
# micro-batches, so that none holds more samples at once than before.


def check_fewest(options: Options, nproc: int) -> None:
    """Refuse a ``--min-nproc`` that could never count.

    Raises:
        ConfigError: When it is above the number of processes, or nothing is started again.
    """
    fewest = options.min_nproc
    if fewest is None or (fewest <= nproc and options.max_restarts >= 2):
        return
    raise ConfigError(
        "--min-nproc needs processes to do without, and restarts: one to try all of them again, one for fewer",
        expected=f"at most {nproc}, with --max-restarts 2 or more",
        got=f"--min-nproc {fewest} --max-restarts {options.max_restarts}",
        fix="correct the numbers, or leave --min-nproc out",
    )


class FewerRanks:
    """Called by the launcher after each failure that a restart follows; decides how many ranks are started then.

    Args:
        options: The command line.
        prepared: What it names.
        nproc: The ranks of the first attempt.
        run_dir: The run's directory; the steps that are done stand there.
    """

    def __init__(self, options: Options, prepared: Prepared, nproc: int, run_dir: Path) -> None:
        assert options.min_nproc is not None, "otherwise all ranks are started again"
        self._options, self._prepared, self._run_dir = options, prepared, run_dir
        self._first, self._nproc, self._fewest = nproc, nproc, options.min_nproc
        self._devices = _visible_devices() if prepared.config.run.device != "cpu" else []
        self._failed: int | None = None
        self._furthest = -1

    def __call__(self, failure: Failure) -> Attempt | None:
        """Return what is started next; None: the same again."""
        step = max((record["step"] for record in read_records(self._run_dir / METRICS)), default=0)
        failed, self._failed = self._failed, failure.rank
        has_come_further, self._furthest = step > self._furthest, max(step, self._furthest)
        if failure.status in (HUNG, NOT_FINITE):  # whoever ended first has only told it
            self._failed = None
        if self._failed is None or failed != self._failed or has_come_further:
            return None
        self._failed = None
        found = self._fewer()
        if found is None:
            fewer = f"{self._fewest} to {self._nproc - 1}" if self._fewest < self._nproc else "fewer"
            self._tell(failure.rank, step, f"all start again, for {fewer} ranks cannot share strategy and batch")
            return None
        (nproc, micro_batches), before = found, self._nproc
        parts = f", and cuts its batch into {micro_batches} micro-batches on each" if micro_batches > 1 else ""
        self._tell(failure.rank, step, f"the run goes on with {nproc} of {before} ranks{parts}", ranks=nproc)
        self._nproc = nproc
        if failure.rank < len(self._devices):
            del self._devices[failure.rank]
        devices = {"CUDA_VISIBLE_DEVICES": ",".join(self._devices)} if self._devices else {}
        options = self._started_with(nproc, micro_batches)
        return Attempt(["-m", "meshwright", *options.arguments(self._run_dir)], nproc, devices)

    def _fewer(self) -> tuple[int, int] | None:
        """Return the most ranks that can go on, and their micro-batches; None: there are none."""
        config, strategy = self._prepared.config, self._prepared.strategy
        size = config.run.batch_size
        replicas, micro_batches = parts_of_a_batch(config, strategy, self._first)
        most = size // (replicas * micro_batches)  # samples of a rank at once
        for nproc in range(self._nproc - 1, self._fewest - 1, -1):
            try:
                replicas, _ = parts_of_a_batch(config, strategy, nproc)
            except StrategyError:
                continue
            for count in range(micro_batches, size // replicas + 1):
                if size % (replicas * count) == 0 and size // (replicas * count) <= most:
                    return nproc, count
        return None

    def _started_with(self, nproc: int, micro_batches: int) -> Options:
        strategy = self._prepared.strategy
        if strategy is not None and "gradient_accumulation" in strategy:
            text = str(strategy.with_method(("gradient_accumulation", micro_batches)))
            return dataclasses.replace(self._options, nproc=nproc, strategy=text)
        changes = (*self._options.changes, f"run.num_micro_batches={micro_batches}")
        return dataclasses.replace(self._options, nproc=nproc, changes=changes)

    def _tell(self, rank: int, step: int, what: str, **figures: int) -> None:
        text = f"rank {rank} has failed again after step {step}: {what}"
        print(f"meshwright: {text}", file=sys.stderr, flush=True)
        if self._run_dir.is_dir():
            event = {"time_s": time.time(), "what": "lost", "rank": rank, "step": step, **figures, "text": text}
            append_line(self._run_dir / FAILURES, event)


def _visible_devices() -> list[str]:
    """Return the names of the CUDA devices that ranks may use, by local rank."""
    count = torch.cuda.device_count()  # of the driver: no device is opened here
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (named.split(",") if named else [str(number) for number in range(count)])[:count]
