"""Go on with fewer ranks when one is lost for good: ``meshwright train --min-nproc``.

A rank that fails is started again with all others. If the same one fails again before the run has come further, it is
lost: its device, perhaps. The launcher then starts as many of the others as the strategy and the batch can be divided
among. They plan anew, take the state from the snapshots or the newest checkpoint, and cut the same batch into more
micro-batches, so that none holds more samples at once than before.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from pathlib import Path

import torch

from meshwright.cli.run_files import FAILURES, METRICS, append_line, read_records
from meshwright.cli.train_options import Options, Prepared, parts_of_a_batch
from meshwright.errors import ConfigError, StrategyError
from meshwright.runtime.launch import HUNG, NOT_FINITE, Attempt, Failure


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
