"""Branch and bound: try the most promising candidates first, until nothing left can beat what was found.

A heap holds items of four kinds, by their lower bounds: meshes, probed meshes, branches and leaves. An item is unfolded
only when its bound is the least of all, so most of the space is never looked at.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshwright.errors import MeshwrightError
from meshwright.planner.plans import Subject
from meshwright.planner.search.bounds import Bounds
from meshwright.planner.search.search_space import Branch, Candidates, Mesh, axes_text, replicas_of
from meshwright.planner.search.search_state import Headroom, Objective, SearchState, rank_of_plan, rounded
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
            elif self.state.num_predicted + self._num_probes >= self.max_predictions or self._is_late:
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
            else:
                self._predict(item)

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
        return (self.subject.batch_size or replicas_of(mesh)) // replicas_of(mesh)

    def _per_sample(self, seconds: float, mesh: Mesh, samples: int) -> float:
        each = seconds / (samples * replicas_of(mesh))
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
            self.state.add(rank_of_plan(plan, self.objective), plan)
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


def _group(branch: Branch) -> int:
    return dict(branch.axes).get("zero", 1)
