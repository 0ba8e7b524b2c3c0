"""Branch and bound: try the most promising candidates first, until nothing left can beat what was found.

A heap holds items of four kinds, by their lower bounds: meshes, probed meshes, branches and leaves. An item is unfolded
only when its bound is the least of all, so most of the space is never looked at. Where predictions are quick, the
search climbs from each best plan to better ones that are like it: see [Note: climbing].
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from meshwright.errors import MeshwrightError
from meshwright.methods import Role
from meshwright.planner.plans import Subject
from meshwright.planner.search.bounds import Bounds
from meshwright.planner.search.search_space import Branch, Candidates, Choice, Mesh, axes_text, role_of
from meshwright.planner.search.search_state import Headroom, Objective, Rank, SearchState, rank_of_plan, rounded
from meshwright.planner.search.within_time import OutOfTimeError, TimeLimit


@dataclass(frozen=True, slots=True)
class Leaf:
    """A branch with a number of micro-batches; bounded closely once its probe is there."""

    branch: Branch
    micro_batches: int | None
    close: bool = False


@dataclass(frozen=True, slots=True)
class Probed:
    """A mesh whose inner axes have been probed."""

    mesh: Mesh


Item = Mesh | Probed | Branch | Leaf

# [Note: climbing] Bounds know nothing of what takes a prediction to know, such as how long layers wait for tokens of
# other ranks. On thousands of devices hundreds of meshes have lower bounds than the time that the best plan takes, and
# looking at them takes longer than a user waits. But good plans are alike: one size larger, another schedule, fewer
# samples in a micro-batch. So each best plan is compared with its neighbours, and with theirs where one is better. What
# is found rules out by its figure what bounds alone would not; the search through all that is left stays what it is.


class Neighbours:
    """Find the candidates that differ from one of them in a single decision.

    Args:
        candidates: All candidates.
        meshes: Their meshes.
    """

    def __init__(self, candidates: Candidates, meshes: Sequence[Mesh]) -> None:
        self._candidates, self._meshes = candidates, meshes
        self._branches: dict[Mesh, list[Branch]] = {}

    def of(self, leaf: Leaf, samples: Callable[[Mesh], int]) -> Iterator[Leaf]:
        """Yield the neighbours of a candidate.

        Args:
            leaf: The candidate.
            samples: Returns the samples of a replica on a mesh.
        """
        branch, numbers = leaf.branch, self._candidates.micro_batches(leaf.branch.mesh)
        place = numbers.index(leaf.micro_batches)
        yield from (Leaf(branch, number) for number in (*numbers[max(place - 1, 0) : place], *numbers[place + 1 :][:1]))
        yield from self._on_other_meshes(leaf, samples, recompute=False)
        yield from (Leaf(each, leaf.micro_batches) for each in self._on(branch.mesh) if _decisions(branch, each) == 1)
        # At last, since they are many: other sizes save other bytes.
        yield from self._on_other_meshes(leaf, samples, recompute=True)

    def _on_other_meshes(self, leaf: Leaf, samples: Callable[[Mesh], int], *, recompute: bool) -> Iterator[Leaf]:
        branch = leaf.branch
        size = samples(branch.mesh) // (leaf.micro_batches or 1)
        for mesh in self._meshes:
            if mesh is not branch.mesh and self._is_beside(mesh, branch.mesh):
                for other in self._likest(mesh, branch, recompute=recompute):
                    # The first pipeline needs micro-batches to fill it.
                    wanted = size if other.schedule is None or branch.schedule is not None else 1
                    yield Leaf(other, self._number_for(mesh, samples(mesh), wanted))

    def twins(self, branch: Branch) -> Iterator[Branch]:
        """Yield the branches that differ in the sharding method at most, in the order in which they are tried."""
        key = branch.axes, branch.but_for_sharding
        yield from (other for other in self._on(branch.mesh) if (other.axes, other.but_for_sharding) == key)

    def _on(self, mesh: Mesh) -> list[Branch]:
        if mesh not in self._branches:
            self._branches[mesh] = list(self._candidates.branches(mesh))
        return self._branches[mesh]

    def _is_beside(self, mesh: Mesh, other: Mesh) -> bool:
        """Return whether one size is the next one, or ranks go from one axis to another, or only methods differ."""
        named = {method.method_name: method for method in other.inner_methods}
        if any(named.get(each.method_name, each) is not each for each in mesh.inner_methods):
            return mesh.inner == other.inner and mesh.pipeline == other.pipeline and mesh.replica == other.replica
        own, others, axes = _sizes(mesh), _sizes(other), self._candidates.space.sizes
        moved = sorted(filter(None, (self._step(axis, own.get(axis, 1), others.get(axis, 1)) for axis in axes)))
        return moved in ([-1], [1]) or (moved == [-1, 1] and mesh.ranks == other.ranks)

    def _step(self, axis: str, size: int, other: int) -> int:
        """Return by how many of an axis's sizes two of them differ."""
        known = sorted({1, *self._candidates.space.sizes[axis]})
        return known.index(size) - known.index(other)

    def _likest(self, mesh: Mesh, branch: Branch, *, recompute: bool) -> Iterator[Branch]:
        """Yield the branch of a mesh that is like another.

        Of the first pipeline it is one for every schedule, and without the last one for every way to shard: ranks hold
        a stage's weights whole where they would not hold a model's.

        Args:
            mesh: The mesh.
            branch: The other.
            recompute: Whether those that recompute in another way are asked for, one for each.
        """
        alike: dict[tuple[int, ...], list[Branch]] = {}
        for other in self._on(mesh):
            ways = tuple(map(id, other.recompute))
            if (ways != tuple(map(id, branch.recompute))) is recompute:
                schedule = id(other.schedule) if branch.schedule is None else 0
                sharding = tuple(map(id, other.sharding)) if branch.schedule and not other.schedule else ()
                alike.setdefault((schedule, *sharding, *ways), []).append(other)
        for every in alike.values():
            yield min(every, key=lambda each: (_decisions(branch, each), abs(math.log(_share(each) / _share(branch)))))

    def _number_for(self, mesh: Mesh, samples: int, wanted: int) -> int | None:
        """Return the number of micro-batches that makes them most nearly as large as is wanted."""
        numbers = self._candidates.micro_batches(mesh)
        return min(numbers, key=lambda number: abs(math.log(samples / (number or 1) / wanted)))


def _sizes(mesh: Mesh) -> dict[str, int]:
    return {**dict(mesh.inner), "pipeline": mesh.pipeline, "replica": mesh.replica}


def _decisions(branch: Branch, other: Branch) -> int:
    """Return in how many decisions two branches differ: schedules bring kernels with them, and groups have sizes."""
    decided = zip(_by_decision(branch), _by_decision(other), strict=True)
    differ = sum([*map(id, own)] != [*map(id, theirs)] for own, theirs in decided)
    return differ + (branch.schedule is not other.schedule) + (branch.mesh is other.mesh and branch.axes != other.axes)


def _by_decision(branch: Branch) -> tuple[Choice, ...]:
    rest = tuple(method for method in branch.rest if role_of(method) is not Role.KERNELS)
    return branch.sharding, branch.precision, branch.recompute, rest


def _share(branch: Branch) -> float:
    """Return the share of the data-parallel ranks that a group shards over."""
    return _group(branch) / branch.mesh.ranks


class Engine:
    """One pass through one space."""

    def __init__(
        self,
        subject: Subject,
        candidates: Candidates,
        bounds: Bounds | None,
        objective: Objective,
        top: int,
        max_predictions: int,
        progress: Callable[[int, int], None] | None,
        *,
        limited: bool = True,
        any_will_do: bool = False,
        time_limit: TimeLimit | None = None,
    ) -> None:
        self.subject, self.candidates, self.bounds, self.objective = subject, candidates, bounds, objective
        self.top, self.max_predictions, self.progress, self.limited = top, max_predictions, progress, limited
        self.any_will_do = any_will_do
        self.time_limit = time_limit or TimeLimit()
        self.state = SearchState(top)
        self._probes_before = bounds.num_probes if bounds is not None else 0
        self._heap: list[tuple[float, int, int, Item]] = []
        self._order = itertools.count()
        self._too_large: dict[object, list[tuple[int, int]]] = {}
        self._first: dict[object, Branch] = {}
        self._neighbours: Neighbours | None = None
        self._best: tuple[Rank, Leaf] | None = None  # of this pass
        self._predicted: set[object] = set()  # kept where it climbs, which comes upon candidates in another order
        # A subject may have something quicker that says the same where plans are compared.
        self._outline = getattr(subject, "outline", subject.plan)
        self._exceeds = getattr(subject, "is_too_large", None)

    def run(self, before: SearchState | None = None) -> SearchState:
        """Try candidates, the most promising first, and return the state after the pass.

        Meshes that keep layers and samples whole come first: what they reach rules out most ways to divide them, which
        take a probe each.

        Args:
            before: The state to go on from.
        """
        self.state = before or self.state
        meshes = sorted(self.candidates.meshes(), key=lambda mesh: len(mesh.inner))
        if (
            self._exceeds is not None
            and self.bounds is not None
            and self.limited
            and not self.any_will_do
            and self.objective != "memory"
        ):
            self._neighbours = Neighbours(self.candidates, meshes)
        try:
            for _, alike in itertools.groupby(meshes, key=lambda mesh: len(mesh.inner)):
                for mesh in alike:
                    self._bound_mesh(mesh, probed=False)
                self._look()
        except OutOfTimeError:
            self.state.stopped = True
        if self.state.stopped and self.time_limit.is_over and not self.state.plans:
            self._try_the_smallest(meshes)
        return self.state

    def _try_the_smallest(self, meshes: Sequence[Mesh]) -> None:
        """Predict what needs least memory until one fits, then what saves more; what has no trace yet is passed over.

        The bounds of a model whose traces take long may have used up the time; this takes half as long again at most.
        """
        for mesh in (mesh for mesh in meshes if not mesh.inner and mesh.pipeline == 1):
            branches = [b for b in self.candidates.branches(mesh) if self.subject.world in dict(b.axes).values()]
            for micro_batches in reversed(self.candidates.micro_batches(mesh)):
                for branch in reversed(branches):
                    self.state.num_considered += 1
                    with contextlib.suppress(OutOfTimeError):
                        self._predict(Leaf(branch, micro_batches))
                    if not self.state.plans:
                        break
                if self.state.plans or self.time_limit.is_long_over:
                    return

    def _look(self) -> None:
        while self._heap and not self.state.stopped:
            bound, _, _, item = heapq.heappop(self._heap)
            if self._is_settled(bound):
                self._heap.clear()
            elif self._is_spent:
                self.state.stopped = True
            elif isinstance(item, Mesh):
                self._bound_mesh(item, probed=True)
            elif isinstance(item, Probed):
                self._unfold_mesh(item.mesh)
            elif self.state.has_better_of((item if isinstance(item, Branch) else item.branch).family, rounded(bound)):
                continue
            elif isinstance(item, Branch):
                self._unfold_branch(item)
            elif not item.close:
                self._bound_closely(item)
            elif self._neighbours is None:
                self._predict(item)
            elif (key := _key(item)) not in self._predicted:
                before = self._best
                self._predicted.add(key)
                self._predict(item)
                if self._best is not before:
                    self._climb()

    def _climb(self) -> None:
        """Go from the best plan to a neighbour that is better, until none is."""
        while self._neighbours is not None:
            start = self._best
            assert start is not None
            for leaf in map(self._simplest, self._neighbours.of(start[1], self._samples)):
                key = _key(leaf)
                if key in self._predicted or not self._is_worth(leaf):
                    continue
                if self._is_spent:
                    return
                self._predicted.add(key)
                self._predict(leaf)
                if self._best is not start:
                    break
            else:
                return

    def _simplest(self, leaf: Leaf) -> Leaf:
        """Return the candidate with the first method that does exactly the same here, see ``_is_twin``."""
        assert self._neighbours is not None
        assert self.bounds is not None
        with contextlib.suppress(MeshwrightError):  # who unfolds it says why
            does = self.bounds.twin(leaf.branch)
            first = next(each for each in self._neighbours.twins(leaf.branch) if self.bounds.twin(each) == does)
            return Leaf(first, leaf.micro_batches)
        return leaf

    def _is_worth(self, leaf: Leaf) -> bool:
        """Return whether a neighbour of the best plan may be better, and fits as far as that is known."""
        number = self._number(leaf.branch, leaf.micro_batches)
        if not self._may_gain(leaf.branch, self._samples(leaf.branch.mesh) // number):
            return False
        try:
            bound = self._bound_of_leaf(leaf.branch, number) if self._has_blocks(leaf.branch) else None
        except MeshwrightError:
            return False  # who unfolds it says why
        return bound is not None and rounded(bound) < self.state.plans[0][0][0]

    @property
    def _is_spent(self) -> bool:
        return self.state.num_predicted + self._num_probes >= self.max_predictions or self._is_late

    @property
    def _is_late(self) -> bool:
        return self.time_limit.is_enough if self.state.plans else self.time_limit.is_over

    @property
    def _num_probes(self) -> int:
        return self.bounds.num_probes - self._probes_before if self.bounds is not None else 0

    def _is_settled(self, bound: float) -> bool:
        last = self.state.to_beat
        return last < math.inf and (self.any_will_do or rounded(bound) > last)

    def _push(self, bound: float, depth: int, item: Item) -> None:
        # Of equal bounds the deepest first: it ends in a plan soonest.
        heapq.heappush(self._heap, (bound, -depth, next(self._order), item))

    def _of_mesh(self, mesh: Mesh, *, probed: bool) -> tuple[float, int, Item]:
        """Return a bound for everything on a mesh, with its depth and the item to unfold."""
        item: Item = Probed(mesh) if probed else mesh
        if self.bounds is None or self.objective == "memory":
            return 0.0, int(probed), item
        samples = self._samples(mesh)
        space = self.candidates.space.replace(loss=self.candidates.losses(mesh))
        seconds = self.bounds.mesh_s(mesh, samples, space, probed=probed)
        return self._per_sample(seconds, mesh, samples), int(probed), item

    def _bound_mesh(self, mesh: Mesh, *, probed: bool) -> None:
        try:
            self._push(*self._of_mesh(mesh, probed=probed))
        except MeshwrightError as error:
            self.candidates.refuse(error.what, axes_text(dict(mesh.inner)))

    def _unfold_mesh(self, mesh: Mesh) -> None:
        for branch in self.candidates.branches(mesh, self._may_gain):
            self.state.num_considered += 1
            if self.bounds is None:
                self._push(0.0, 2, branch)
                continue
            try:
                if not self.bounds.is_undivided_known(branch) and self._cannot_fit(branch, 0, 1):
                    continue  # without a probe
                headroom = self._headroom(branch)
                if not self._has_blocks(branch) or self._is_settled(bound := self._roughly(branch)):
                    continue
                if self.state.has_better_of(branch.family, rounded(bound)):
                    continue
                headroom.bound = bound
                if self._is_twin(branch) or self._cannot_fit(branch, 0, 1):
                    continue
            except MeshwrightError as error:
                self.candidates.refuse(error.what, branch.strategy())
                continue
            self._push(bound, 2, branch)

    def _has_blocks(self, branch: Branch) -> bool:
        assert self.bounds is not None
        enough = branch.schedule is None or self.bounds.undivided(branch).num_blocks >= math.prod(branch.shape)
        if not enough:
            self.candidates.refuse("a pipeline has more stages than the model has blocks", branch.strategy())
        return enough

    def _is_twin(self, branch: Branch) -> bool:
        """Return whether another method does exactly the same here, as all stages of ZeRO do in a pipeline."""
        assert self.bounds is not None
        others = (branch.mesh, branch.axes, branch.but_for_sharding)
        return self._first.setdefault((others, self.bounds.twin(branch)), branch) is not branch

    def _headroom(self, branch: Branch) -> Headroom:
        return self.state.headrooms.setdefault(branch.but_for_offload, Headroom(axes=branch.axes))

    def _may_gain(self, branch: Branch, micro_batch: int | None = None) -> bool:
        """Return whether offloading can help a branch: without it, memory ran out."""
        if self.objective == "memory" or not self.state.headrooms_before:
            return True
        headroom = self.state.headrooms_before.get(branch.but_for_offload)
        if headroom is None:
            return True
        return micro_batch not in headroom.fitting and headroom.ran_out and not self._is_settled(headroom.bound)

    def _roughly(self, branch: Branch, micro_batches: int | None = None) -> float:
        """Return a bound for a branch, by default with its largest number of micro-batches, which waits least."""
        assert self.bounds is not None
        samples = self._samples(branch.mesh)
        if self.objective == "memory":
            return self.bounds.held_bytes(branch, 0, 1)
        if micro_batches is None:
            micro_batches = self.candidates.micro_batches(branch.mesh)[-1] or self._number(branch, None)
        seconds = self.bounds.roughly_s(branch, samples, micro_batches) * (1 + branch.surcharge)
        return self._per_sample(seconds, branch.mesh, samples)

    def _samples(self, mesh: Mesh) -> int:
        return (self.subject.batch_size or mesh.replicas) // mesh.replicas

    def _per_sample(self, seconds: float, mesh: Mesh, samples: int) -> float:
        each = seconds / (samples * mesh.replicas)
        if self.objective != "price" or self.bounds is None:
            return each
        return each * (self.bounds.cluster.price_per_hour or 0.0) / 3600

    def _unfold_branch(self, branch: Branch) -> None:
        for micro_batches in self.candidates.micro_batches(branch.mesh):
            leaf = Leaf(branch, micro_batches, close=self.bounds is None)
            self.state.num_considered += 1
            try:
                bound = 0.0 if leaf.close else self._bound_of_leaf(branch, self._number(branch, micro_batches))
            except MeshwrightError as error:
                self.candidates.refuse(error.what, branch.strategy())
                continue
            if bound is not None:
                self._push(bound, 3, leaf)

    def _number(self, branch: Branch, micro_batches: int | None) -> int:
        """Return the number of micro-batches of a leaf; None takes the subject's number."""
        if micro_batches is not None:
            return micro_batches
        given = getattr(self.subject, "num_micro_batches", None)
        return given or (1 if branch.schedule is None else branch.schedule.fewest_micro_batches(branch.mesh.pipeline))

    def _bound_of_leaf(self, branch: Branch, micro_batches: int) -> float | None:
        """Return a rough bound; None if the leaf cannot fit."""
        micro_batch = self._samples(branch.mesh) // micro_batches
        if self._is_known_too_large(branch, micro_batch) or self._cannot_fit(branch, micro_batch, micro_batches):
            return None
        return self._roughly(branch, micro_batches)

    def _bound_closely(self, leaf: Leaf) -> None:
        branch, micro_batches = leaf.branch, self._number(leaf.branch, leaf.micro_batches)
        assert self.bounds is not None
        samples = self._samples(branch.mesh)
        micro_batch = samples // micro_batches
        if self._is_known_too_large(branch, micro_batch) or not self._may_gain(branch, micro_batch):
            return
        try:
            if branch.schedule is not None:
                branch.schedule.in_flight(branch.mesh.pipeline, micro_batches)
            self.bounds.divided(branch)
            if self._cannot_fit(branch, micro_batch, micro_batches):
                return
            bound = self._closely(branch, samples, micro_batches)
        except MeshwrightError as error:
            self.candidates.refuse(error.what, branch.strategy())
            return
        self._push(bound, 4, Leaf(branch, leaf.micro_batches, close=True))

    def _closely(self, branch: Branch, samples: int, micro_batches: int) -> float:
        assert self.bounds is not None
        if self.objective == "memory":
            return self.bounds.held_bytes(branch, samples // micro_batches, micro_batches)
        seconds = self.bounds.step_s(branch, samples, micro_batches) * (1 + branch.surcharge)
        return self._per_sample(seconds, branch.mesh, samples)

    def _cannot_fit(self, branch: Branch, micro_batch: int, micro_batches: int) -> bool:
        if not self.limited or self.bounds is None:
            return False
        held, limit = self.bounds.held_bytes(branch, micro_batch, micro_batches, roughly=True), self.bounds.limit_bytes
        if limit is None or held <= limit or self.bounds.held_bytes(branch, micro_batch, micro_batches) <= limit:
            return False
        self._headroom(branch).ran_out = True
        return True

    def _predict(self, leaf: Leaf) -> None:
        branch, samples = leaf.branch, self._samples(leaf.branch.mesh)
        micro_batch = samples // self._number(branch, leaf.micro_batches)
        if self._is_known_too_large(branch, micro_batch):
            return
        try:
            if self._is_too_large(branch, leaf.micro_batches, micro_batch):
                return
            self.state.num_predicted += 1
            plan = self._outline(branch.strategy(), leaf.micro_batches)
        except MeshwrightError as error:
            self.candidates.refuse(error.what, branch.strategy())
            return
        if plan.in_vain and self.candidates.space.loss != ((),):  # otherwise it is as a caller asked
            self.candidates.refuse(plan.in_vain, branch.strategy())
        elif self.limited and not plan.fits:
            self._note_too_large(branch, micro_batch)
            self.state.add_too_large(plan)
        else:
            rank = rank_of_plan(plan, self.objective)
            self.state.add(rank, plan)
            if self._best is None or rank < self._best[0]:
                self._best = rank, leaf
            self._headroom(branch).fitting.add(micro_batch)
        if self.progress is not None:
            self.progress(self.state.num_predicted, self.state.num_considered)

    def _is_too_large(self, branch: Branch, micro_batches: int | None, micro_batch: int) -> bool:
        """Return whether one rank alone of a pipeline shows that a leaf cannot fit."""
        if self._exceeds is None or not self.limited or branch.schedule is None:
            return False
        if not self._exceeds(branch.strategy(), micro_batches):
            return False
        self._note_too_large(branch, micro_batch)
        return True

    def _is_known_too_large(self, branch: Branch, micro_batch: int) -> bool:
        """Return whether the branch was too large before, with micro-batches as small and groups as large."""
        known = self._too_large.get(branch.but_for_groups, ())
        if not any(group >= _group(branch) and size <= micro_batch for group, size in known):
            return False
        self._headroom(branch).ran_out = True
        return True

    def _note_too_large(self, branch: Branch, micro_batch: int) -> None:
        self._headroom(branch).ran_out = True
        self._too_large.setdefault(branch.but_for_groups, []).append((_group(branch), micro_batch))


def _key(leaf: Leaf) -> object:
    """Return a key that is equal for equal candidates; each time that a mesh is unfolded, it has new branches."""
    return leaf.branch.mesh, leaf.branch.axes, tuple(map(id, leaf.branch.methods)), leaf.micro_batches


def _group(branch: Branch) -> int:
    return dict(branch.axes).get("zero", 1)
