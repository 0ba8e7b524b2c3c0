"""A console for untrusted text, which shows control characters and markup instead of obeying them; progress bars."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.segment import Segment

from meshwright.errors import printable
from meshwright.runtime.processes import rank


class PlainConsole(Console):
    r"""rich's console without its markup, which in a name such as ``[link=…]`` would come from a file.

    Control characters are shown as ``\\x1b`` and the like: a terminal acts on them, rich lets them pass. What rich
    itself has styled stays so.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **options})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as :class:`rich.console.Console` does, with control characters escaped."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def progress_bar(width: int) -> Progress:
    """Return a progress bar for rank 0's terminal, on standard error so that it never mixes with the result.

    Args:
        width: Characters of the description before the bar.
    """
    console = PlainConsole(file=sys.stderr)
    columns = (
        TextColumn(f"{{task.description:<{width}}}"), MofNCompleteColumn(), BarColumn(None), TimeElapsedColumn()
    )  # fmt: skip
    return Progress(*columns, console=console, disable=rank() != 0 or not console.is_terminal, transient=True)
