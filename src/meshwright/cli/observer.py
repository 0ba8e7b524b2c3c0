"""What rank 0 shows and writes while it trains: plan, progress, metrics, TensorBoard."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import RenderableType

from meshwright.cli.progress import TrainingProgress, duration, status_line
from meshwright.cli.run_dir import METRICS, TENSORBOARD, MetricsFile, tell_unwritten
from meshwright.cli.session import Session
from meshwright.planner import plan_table
from meshwright.utils.terminal import PlainConsole

_SMOOTHING = 0.9
_LINES_BELOW = 4  # the bar, the line, and room for a prompt
_SCALARS = ("loss", "lr", "grad_norm", "tokens_per_s", "mfu")


class Observer:
    """Tells of one run, on rank 0. A context: leaving it closes files and gives the terminal back.

    Attributes:
        records: Every line of ``metrics.jsonl``, those before a resume included.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._plan = session.accelerated.plan
        self._run = session.prepared.config.run
        self._first_step = session.state.step + 1
        self._console = PlainConsole()
        self._metrics = MetricsFile(session.run_dir / METRICS, session.state.step)
        self.records = self._metrics.records
        self._board = _tensorboard(session) if self._run.tensorboard else None
        self._progress = TrainingProgress(self._console, self._run.steps, session.state.step)
        self._started_s = 0.0  # end of the first step, which is slower than the others and would spoil the ETA
        self._smoothed: float | None = None

    def __enter__(self) -> Self:
        table = plan_table(self._plan)
        if self._progress.visible and len(self._console.render_lines(table)) < self._console.height - _LINES_BELOW:
            self._progress.above = table  # until it can be told with what was measured
        else:
            self._console.print(table)
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._print_instead(self._progress.above)
        self._progress.stop()
        self._metrics.close()
        with self._board_errors():
            if self._board is not None:
                self._board.close()

    @contextlib.contextmanager
    def _board_errors(self) -> Iterator[None]:
        """Ends the events, and not the run, where they cannot be written."""
        try:
            yield
        except OSError as error:
            self._board = None
            tell_unwritten(self._session.run_dir / TENSORBOARD, error, "its events end here")

    def show_measured(self, measured: Mapping[str, int]) -> None:
        """Prints the plan with what the first step really held beside it."""
        self._print_instead(plan_table(self._plan, measured))

    def _print_instead(self, table: RenderableType | None) -> None:
        """Prints a table for good, in the place of the one above the bar."""
        self._progress.above = None
        if table is not None:
            self._console.print(table)

    def show_step(self, record: dict[str, Any]) -> None:
        """Writes one step down, and shows it."""
        self._metrics.append(record)
        with self._board_errors():
            if self._board is not None:
                for name in (each for each in _SCALARS if record[each] is not None):
                    self._board.add_scalar(name, record[name], record["step"])
        self._smooth(record["loss"])
        line, eta_s = status_line(record, self._smoothed), self._eta_s(record["step"])
        if self._progress.visible:
            self._progress.show(record["step"], line, eta_s)
        elif record["step"] % self._run.log_every == 0 or record["step"] in (self._first_step, self._run.steps):
            line = f"step {record['step']}/{self._run.steps}  {line}  ETA {duration(eta_s)}"
            self._console.print(line, soft_wrap=True, highlight=False)

    def rewind(self, step: int) -> None:
        """Forgets what came after a step."""
        self._metrics.rewind(step)
        self._first_step, self._smoothed = step + 1, None
        with self._board_errors():
            if self._board is not None:
                self._board.close()
                self._board = _tensorboard(self._session)

    def _smooth(self, loss: float) -> None:
        before = self._smoothed
        if before is None or not math.isfinite(before):
            self._smoothed = loss
        else:
            self._smoothed = _SMOOTHING * before + (1 - _SMOOTHING) * loss

    def _eta_s(self, step: int) -> float | None:
        if step == self._first_step:
            self._started_s = time.perf_counter()
            return None
        per_step_s = (time.perf_counter() - self._started_s) / (step - self._first_step)
        return per_step_s * (self._run.steps - step)


def _tensorboard(session: Session) -> Any:
    """A SummaryWriter; None where TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    # Events of steps that a resumed run repeats are hidden behind the new ones.
    return SummaryWriter(str(session.run_dir / TENSORBOARD), purge_step=session.state.step + 1)
