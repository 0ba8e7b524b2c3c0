"""A console for untrusted text: it shows control characters and markup instead of obeying them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from meshwright.errors import printable


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
