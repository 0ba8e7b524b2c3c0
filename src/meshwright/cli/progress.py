"""The progress bar, and the line of numbers under it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from meshwright.planner import readable_bytes

UNKNOWN = "–"


class TrainingProgress(Progress):
    """A bar over the steps, and one line of numbers; nothing where there is no terminal.

    Attributes:
        above: Stands over the bar for as long as it is set.
    """

    def __init__(self, console: Console, steps: int, done: int) -> None:
        ends = TextColumn("ETA {task.fields[eta]}")
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(None), TaskProgressColumn(), TimeElapsedColumn())
        self.above: RenderableType | None = None
        super().__init__(*columns, ends, console=console, disable=not console.is_terminal, expand=True)
        self._line = "first step …"
        self._steps_task = self.add_task("step", total=steps, completed=done, eta=UNKNOWN)

    @property
    def visible(self) -> bool:
        """Whether anybody can see it."""
        return not self.disable

    def show(self, step: int, line: str, eta_s: float | None) -> None:
        """Moves the bar and changes the line."""
        self._line = line
        self.update(self._steps_task, completed=step, eta=duration(eta_s))

    def get_renderables(self) -> Iterable[RenderableType]:
        """What is above, the bar and the line, for rich."""
        if self.above is not None:
            yield self.above
        yield self.make_tasks_table(self.tasks)
        yield Text(getattr(self, "_line", ""))  # rich asks before __init__ is done


def status_line(record: Mapping[str, Any], smoothed_loss: float | None) -> str:
    """One step in one line of 80 columns."""
    return "  ".join(
        (
            f"loss {smoothed_loss if smoothed_loss is not None else record['loss']:.3f}",
            f"lr {record['lr']:.1e}",
            f"norm {record['grad_norm']:.2f}{' skipped' if record['skipped'] else ''}",
            speed([record]),
            f"MFU {percent(record['mfu'])}",
            f"mem {readable_bytes(record['peak_memory_bytes'])}",
        )
    )


def speed(records: Sequence[Mapping[str, Any]]) -> str:
    """The median of steps, in tokens/s, or in samples/s where samples are no tokens."""
    unit = "tokens" if records[0]["tokens_per_s"] is not None else "samples"
    return f"{readable_count(statistics.median(record[f'{unit}_per_s'] for record in records))} {unit}/s"


def percent(fraction: float | None) -> str:
    """``"41 %"``; a dash when unknown."""
    return UNKNOWN if fraction is None else f"{100 * fraction:.0f} %"


def readable_count(value: float) -> str:
    """``"12.3k"``."""
    for unit in ("", "k", "M"):
        if value < 1000:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}G"


def duration(seconds: float | None) -> str:
    """``"1:02:03"`` or ``"2:03"``; a dash when unknown."""
    if seconds is None:
        return UNKNOWN
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
