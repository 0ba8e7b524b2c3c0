"""What one pass of a search has looked at."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from meshwright.planner.plan import Plan
from meshwright.planner.search.objective import Rank

_SMALLEST_KEPT = 5


@dataclass(slots=True)
class Room:
    """Whether memory is enough for a branch.

    Args:
        bound: What it cannot beat.
        squeezed: Whether memory has ruled out any of its micro-batches; of twins, those of the first.
        fitting: Sizes of micro-batches that are known to fit.
    """

    bound: float = 0.0
    squeezed: bool = False
    fitting: set[int] = field(default_factory=set)


@dataclass
class Looked:
    """What has been looked at.

    Args:
        top: How many plans are kept.
        plans: Those that fit, with their ranks, best first.
        too_large: Those that do not, the smallest first.
        num_considered: Candidates unfolded.
        num_predicted: Those that were simulated.
        stopped: Whether the search ended at its most predictions, before nothing better could be left.
        rooms: Of every branch, but for what it offloads, whether memory was enough.
        rooms_before: The same of the pass through the same space that did not offload.
        betters: Whether only what beats the best so far is looked for, not all that may be among ``top``.
        stopped_before: Whether a pass before ended at its most predictions.
    """

    top: int
    plans: list[tuple[Rank, Plan]] = field(default_factory=list)
    too_large: list[Plan] = field(default_factory=list)
    num_considered: int = 0
    num_predicted: int = 0
    stopped: bool = False
    rooms: dict[object, Room] = field(default_factory=dict)
    rooms_before: dict[object, Room] = field(default_factory=dict)
    betters: bool = False
    stopped_before: bool = False

    def beside(self) -> Looked:
        """Where a pass through another space begins, for what is better than the best so far."""
        return Looked(
            self.top, [*self.plans], [*self.too_large], betters=True, stopped_before=self.stopped or self.stopped_before
        )

    def offloading(self, without: Looked) -> Looked:
        """Where a pass that offloads begins: it has to do better.

        Args:
            without: The pass through the same space that did not.
        """
        begun = self.beside()
        begun.betters = without.betters
        # What was left out for want of predictions may have been short of memory, too.
        begun.rooms_before = {} if without.stopped else without.rooms
        return begun

    @property
    def to_beat(self) -> float:
        """The number that a candidate must not exceed: of the last that is kept, or of the best."""
        last = 1 if self.betters else self.top
        return self.plans[last - 1][0][0] if len(self.plans) >= last else math.inf

    @property
    def ever_stopped(self) -> bool:
        """Whether any pass ended at its most predictions."""
        return self.stopped or self.stopped_before

    @property
    def squeezed(self) -> bool:
        """Whether memory has ruled anything out that could have been among the best."""
        return any(room.squeezed for room in self.rooms.values())

    def add(self, rank: Rank, plan: Plan) -> None:
        """Notes a plan that fits."""
        self.plans.append((rank, plan))
        self.plans.sort(key=lambda each: each[0])
        del self.plans[self.top :]

    def add_too_large(self, plan: Plan) -> None:
        """Notes a plan that does not."""
        self.too_large.append(plan)
        self.too_large.sort(key=lambda each: (each.needed_bytes, str(each.strategy)))
        del self.too_large[_SMALLEST_KEPT:]
