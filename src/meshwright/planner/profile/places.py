"""Where in a model's whole list of blocks a run of a few of them has been."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from meshwright.planner.profile.repeated import RUN, Repeated

if TYPE_CHECKING:
    from meshwright.cost import Placed, Transient

T = TypeVar("T")
_THIRD = 2  # of the blocks that ran: what it does, every further one does


class Places:
    """Of a run of the first three blocks of a repeated list and its last.

    Args:
        ran: The blocks that ran, those of other lists among them.
        every: Those that would have run.
        repeated: The list that was cut.
        blocks: Its blocks that would have run.
    """

    def __init__(
        self, ran: Sequence[nn.Module], every: Sequence[nn.Module], repeated: Repeated, blocks: Sequence[nn.Module]
    ) -> None:
        index = {block: number for number, block in enumerate(every)}
        self._of = {-1: -1, len(ran): len(every), **{number: index[block] for number, block in enumerate(ran)}}
        self._shifted = {ran.index(block) for block in repeated.kept()[1 : _THIRD + 1]} if ran else set[int]()
        self.third = ran.index(repeated.kept()[_THIRD]) if ran else None
        self._copies = len(blocks) - RUN

    def of(self, place: int, shift: int = 0) -> int:
        """A place of the run, or of what the copies of the third block do so many blocks further on."""
        return self._of[place] + (shift if place in self._shifted else 0)

    def placed(self, amounts: Placed) -> Placed:
        """Amounts of single places."""
        return self._each([(place, size) for (place,), size in amounts], lambda place, size: ((place,), size))

    def transients(self, found: Sequence[Transient]) -> tuple[Transient, ...]:
        """What every place takes for a moment."""
        return self._each([(each.place, each) for each in found], lambda place, each: each._replace(place=place))

    def _each(self, found: Sequence[tuple[int, Any]], at: Callable[[int, Any], T]) -> tuple[T, ...]:
        every = {}
        for place, each in found:
            for shift in range(self._copies + 1 if place == self.third else 1):
                every[self.of(place, shift)] = each
        return tuple(at(place, every[place]) for place in sorted(every))
