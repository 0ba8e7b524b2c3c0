"""Searching for the best strategies of a subject."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from meshwright.collector import paused_collection
from meshwright.cost import Cluster
from meshwright.planner.plan import Plan, Subject
from meshwright.planner.search.bounds import Bounds
from meshwright.planner.search.candidates import Candidates
from meshwright.planner.search.constraints import constrained
from meshwright.planner.search.engine import Engine
from meshwright.planner.search.failure import ended_early, nothing_fits, nothing_works
from meshwright.planner.search.found import Found
from meshwright.planner.search.looked import Looked
from meshwright.planner.search.objective import Objective, check_objective
from meshwright.planner.search.space import Choice, Space, default_space, offloads
from meshwright.planner.search.wishes import HALF, read_wishes

Progress = Callable[[int, int], None]
"""Called with the number of predictions made, and of candidates considered."""

MAX_PREDICTIONS = 1500
_MOST_GROWTH = 1024


@paused_collection()
def search(
    subject: Subject,
    *,
    objective: Objective = "tokens_per_s",
    excluded: Sequence[str] = (),
    included: Sequence[Any] = (),
    top: int = 10,
    space: Space | None = None,
    max_predictions: int = MAX_PREDICTIONS,
    progress: Progress | None = None,
    growing: Space | None = None,
    explained: bool = True,
) -> Found:
    """Finds the strategies that do best among those that fit into memory.

    Candidates are looked at in the order of bounds that they cannot beat, until no other can be among the best: what is
    found is what looking at all of them would find, as long as ``max_predictions`` last. The same call finds the same.

    Args:
        subject: A model and how it is trained, on a world; with a cluster, for objectives that need seconds.
        objective: ``tokens_per_s`` (samples, where these have no tokens), ``price`` (of a sample) or ``memory`` (of the
            rank that holds most). Numbers that are equal to four digits are ties: fewer methods win, then the text.
        excluded: Methods that must not be used.
        included: Methods that every candidate has: names, or with keys of their configs that stay as they are.
        top: How many to find.
        space: What is tried; None: see :func:`default_space`. Offloading is tried, too, where memory is too small for
            anything: it is among the plans where it does better than what fits without.
        max_predictions: Most plans that are asked of the subject.
        progress: Told of every prediction.
        growing: What is tried on more devices, where nothing fits on these; None: the same.
        explained: Whether a failure says what is smallest and how many devices would do, for which it searches on.

    Raises:
        StrategyError: When nothing fits, with the smallest, what binds, and how many devices would do; when nothing can
            train; when what is included and excluded contradicts itself.
        ConfigError: When the subject does not know what the objective needs.
    """
    start = time.perf_counter()
    check_objective(objective)
    wished = read_wishes(excluded, included)
    cluster: Cluster | None = getattr(subject, "cluster", None)
    node = cluster.devices_per_node if cluster is not None else subject.world
    given = constrained(space or default_space(subject), excluded, wished, subject.world, node)
    looking = _Search(subject, cluster, node, objective, top, max_predictions, progress)
    looked = looking.through(given)
    if _is_untraced(looked) and given.precision != ((),) and not {*HALF} & {*wished}:
        given, looked = looking.in_full_precision(given, looked)
    is_complete, squeezed = not looked.stopped, looked.squeezed
    if "offload" not in (*excluded, *wished) and given.offload == ((),) and looking.may_offload(looked):
        looked = looking.through(given.replace(offload=offloads(subject.world)), looked)
    if looked.stopped and not looked.plans:
        raise ended_early(max_predictions)
    if not looked.plans and not squeezed:
        raise nothing_works(subject.world, looking.refused, wished)
    if not looked.plans:
        offload = (*given.offload, *(() if "offload" in excluded else offloads(subject.world)))
        roomiest = _roomiest(given, offload)
        smallest = looking.smallest(roomiest, looked.too_large) if explained else next(iter(looked.too_large), None)
        if smallest is None:
            raise nothing_works(subject.world, looking.refused, wished)
        if growing is not None:
            roomiest = _roomiest(constrained(growing, excluded, wished, subject.world, node), offload)
        raise nothing_fits(subject, smallest, looking.fewest_devices(roomiest) if explained else None)
    return Found(
        plans=tuple(plan for _, plan in looked.plans),
        too_large=tuple(looked.too_large),
        refused=tuple((text, reason) for reason, text in looking.refused.items()),
        num_considered=looking.num_considered,
        num_predicted=looking.num_predicted,
        seconds=time.perf_counter() - start,
        is_complete=is_complete and not looked.stopped,
    )


class _Search:
    """What several passes through spaces share."""

    def __init__(
        self,
        subject: Subject,
        cluster: Cluster | None,
        node: int,
        objective: Objective,
        top: int,
        max_predictions: int,
        progress: Progress | None,
    ) -> None:
        self.subject, self.cluster, self.node, self.objective = subject, cluster, node, objective
        self.top, self.max_predictions, self.progress = top, max_predictions, progress
        self.bounds = None if cluster is None else Bounds(subject, cluster)
        self.refused: dict[str, str] = {}
        self.num_considered = self.num_predicted = 0

    def through(self, space: Space, before: Looked | None = None) -> Looked:
        """One pass; after one without offloading, for what is better than it has found."""
        return self._pass(space, self.objective, self.top, limited=True, before=before)

    def may_offload(self, looked: Looked) -> bool:
        """Whether something that was too large may be among the best once parts of it are in host memory."""
        return looked.squeezed or self.objective == "memory"

    def in_full_precision(self, space: Space, before: Looked) -> tuple[Space, Looked]:
        """Another pass for a model that lower precision stops: that refuses its candidates, and no others."""
        full = space.replace(precision=((),))
        looked = self.through(full)
        if _is_untraced(looked):
            return space, before  # the model itself cannot be traced
        _, plan = before.plans[0]
        gap = next((gap for gap in plan.gaps if "activations" in gap), "activations are not predicted")
        self.refused |= {f"in lower precision {gap}": str(plan.strategy)}
        return full, looked

    def _pass(
        self, space: Space, objective: Objective, top: int, *, limited: bool, before: Looked | None = None
    ) -> Looked:
        candidates = Candidates(space, self.subject.world, self.node, self.subject.batch_size)
        engine = Engine(
            self.subject, candidates, self.bounds, objective, top, self.max_predictions, self.progress, limited=limited
        )
        looked = engine.run(before)
        self.refused = candidates.refused | self.refused  # told by the simplest that met it
        self.num_considered += looked.num_considered
        self.num_predicted = looked.num_predicted + self.num_predicted
        return looked

    def smallest(self, space: Space, known: Sequence[Plan]) -> Plan | None:
        """The strategy that takes least, though it is too much: of those that divide all that can be divided."""
        looked = self._pass(space, "memory", 1, limited=False)
        plans = [*known, *(plan for _, plan in looked.plans)]
        return min(plans, key=lambda plan: (plan.needed_bytes, str(plan.strategy)), default=None)

    def fewest_devices(self, space: Space) -> int | None:
        """As many devices as it takes until something fits: doubled again and again, then what lies between.

        None: it cannot be told, or a thousand times as many are too few.
        """
        grow: Callable[[int], Subject] | None = getattr(self.subject, "on", None)
        if grow is None or self.cluster is None:
            return None
        world = self.subject.world
        for times in range(1, _MOST_GROWTH.bit_length()):
            if self._fits_on(number := world << times, grow, space):
                return self._between(number // 2, number, grow, space)
        return None

    def _between(self, few: int, enough: int, grow: Callable[[int], Subject], space: Space) -> int:
        """Of too few devices and twice as many, quarters of the way that are enough, in nodes as whole as these."""
        unit = self.node if few > self.node and few % self.node == 0 else 1
        for quarter in (few // 2, few // 4):
            middle = enough - quarter
            if few % 4 == 0 and middle % unit == 0 and self._fits_on(middle, grow, space):
                enough = middle
        return enough

    def _fits_on(self, number: int, grow: Callable[[int], Subject], space: Space) -> bool:
        """Whether anything fits on so many devices."""
        assert self.cluster is not None
        larger, cluster = grow(number), self.cluster.resized(number)
        wider = space.replace(sizes=_wider(space, default_space(larger)))
        candidates = Candidates(wider, number, cluster.devices_per_node, larger.batch_size)
        engine = Engine(
            larger, candidates, Bounds(larger, cluster), "memory", 1, self.max_predictions, None, any_will_do=True
        )
        return bool(engine.run().plans)


def _is_untraced(looked: Looked) -> bool:
    """Whether the best that was found says nothing of activations."""
    return bool(looked.plans) and looked.plans[0][1].step.activations is None


def _roomiest(space: Space, offload: tuple[Choice, ...]) -> Space:
    """What takes least memory, of all that divides it."""
    return space.replace(hybrid=False, recompute=space.recompute[-1:], offload=offload)


def _wider(space: Space, larger: Space) -> dict[str, tuple[int, ...]]:
    """The sizes of a larger world, as far as a caller's wishes leave its axes."""
    return {
        axis: tuple(size for size in larger.sizes.get(axis, every) if size > 1 or 1 in every)
        if space.axis_methods.get(axis)
        else every
        for axis, every in space.sizes.items()
    }
