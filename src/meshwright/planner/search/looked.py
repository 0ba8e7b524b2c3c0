"""What one pass of a search has looked at."""

from __future__ import annotations

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
        rooms_before: The same of the pass before, which did not offload.
    """

    top: int
    plans: list[tuple[Rank, Plan]] = field(default_factory=list)
    too_large: list[Plan] = field(default_factory=list)
    num_considered: int = 0
    num_predicted: int = 0
    stopped: bool = False
    rooms: dict[object, Room] = field(default_factory=dict)
    rooms_before: dict[object, Room] = field(default_factory=dict)

    def further(self) -> Looked:
        """Where another pass begins: it has to do better."""
        # What was left out for want of predictions may have been short of memory, too.
        rooms = {} if self.stopped else self.rooms
        return Looked(self.top, [*self.plans], [*self.too_large], rooms_before=rooms)

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
