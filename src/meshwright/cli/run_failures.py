"""Record what has interrupted a run, what that cost, and what it could go on from: ``failures.jsonl``.

Each line is written by whoever knows: the launcher says how a rank has ended, a rank that names a hang or a step that
is not finite does so before all end, and rank 0 says after the first new step what was lost. See [Note: forked ranks].
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.cli.run_files import FAILURES, append_line
from meshwright.errors import CheckpointError, NonFiniteError
from meshwright.runtime import print_rank, rank
from meshwright.runtime.launch import HUNG, NOT_FINITE, Failure, restart_count, restarts_left

_STACKS_S = 0.5  # for the rank at fault to show where it is
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
            time.sleep(_STACKS_S)
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
