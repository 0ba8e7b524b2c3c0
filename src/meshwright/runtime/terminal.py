"""A console for untrusted text, whose control characters and markup it shows; progress bars; output without readers."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
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


class _UntilClosed:
    """A text stream whose output goes nowhere once nobody reads its pipe any more, in place of a BrokenPipeError.

    Args:
        stream: Everything else is asked of it.
        closed: Called then, once.
    """

    def __init__(self, stream: Any, closed: Callable[[], None]) -> None:
        self._stream, self._closed = stream, closed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, or drop, a text."""
        with self._dropped():
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write, or drop, several texts."""
        self.write("".join(lines))

    def flush(self) -> None:
        """Write, or drop, what is buffered."""
        with self._dropped():
            self._stream.flush()

    @contextlib.contextmanager
    def _dropped(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            # What is buffered in the stream, and what other code writes to its descriptor, goes there, too.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            self._closed()


def _nothing() -> None:
    """Tell nobody: there is nowhere left."""


@contextlib.contextmanager
def outliving_readers() -> Iterator[None]:
    """Go on without output, inside, where the program that reads it ends; rank 0 says so on standard error.

    A command such as ``plan`` ends there, for its output is all that it makes; a training run makes checkpoints.
    """
    before: tuple[Any, Any] = sys.stdout, sys.stderr

    def tell() -> None:
        if rank() == 0:
            print("meshwright: nobody reads standard output any more; the run goes on", file=sys.stderr, flush=True)

    # Either is None in a process without a console.
    own: tuple[Any, Any] = before[0] and _UntilClosed(before[0], tell), before[1] and _UntilClosed(before[1], _nothing)
    sys.stdout, sys.stderr = own
    try:
        yield
    finally:
        # What is inside may have put something else there, for longer.
        sys.stdout = before[0] if sys.stdout is own[0] else sys.stdout
        sys.stderr = before[1] if sys.stderr is own[1] else sys.stderr
