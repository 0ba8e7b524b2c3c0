"""Find the best strategies of a subject, and explain why none fits where that is so.

:func:`search` is the whole of it: it reads the constraints, passes through the space, through follow-up spaces, and
through all of these with offloading where memory ran out. :func:`search_in_stages` orders the space of a real module,
for which every prediction takes seconds.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from meshwright.cost import Cluster, Memory, Step, moments, peak
from meshwright.errors import StrategyError, join_names, readable_bytes
from meshwright.methods import Phase, Role, SearchScope, find_method, method_of_axes
from meshwright.planner.plans import Plan, Subject, method_names, usable_host_bytes
from meshwright.planner.search.bounds import Bounds
from meshwright.planner.search.branch_and_bound import Engine
from meshwright.planner.search.constraints import constrained, names_role, read_constraints
from meshwright.planner.search.search_space import (
    MODEL_ERROR,
    Candidates,
    Choice,
    Space,
    default_space,
    offloads,
    on_axis,
    trained_share,
)
from meshwright.planner.search.search_state import (
    FollowUp,
    Found,
    Objective,
    SearchState,
    check_objective,
    divided_next,
    with_other_loss,
)
from meshwright.planner.search.within_time import OutOfTimeError, TimeLimit, out_of_time
from meshwright.runtime.lazy import paused_collection
from meshwright.strategy import Strategy

_MOMENTS = {
    "gather": "as weights or buffers arrive for forward",
    "loss": "at the start of backward (loss)",
    "recomputation": "as the last block runs backward",
    "reduction": "as the last gradients are reduced",
    "update": "at the update",
}
_REMEDIES = {
    "activations": "shorter samples",
    "logits": "shorter samples, or a loss that makes no logits (module_replace with loss=True)",
    "recomputation": "shorter samples",
    "gathered": "smaller blocks",
    "optimizer": "an optimizer with less state",
    "updating": "an optimizer that updates with fused kernels (fused=True, where it has them)",
    "host": "states on disk (offload's disk)",
}

_OF_SAMPLES = ("activations", "logits")


def nothing_fits(subject: Subject, smallest: Plan, devices: int | None) -> StrategyError:
    """Return the error for a cluster that is too small."""
    name, reason, limits = _binding(smallest)
    enough = f"take {devices} of these devices" if devices is not None else "take more devices"
    remedies = [f"{enough}, or devices with more memory", *([_REMEDIES[name]] if name in _REMEDIES else [])]
    if name in _OF_SAMPLES and (subject.batch_size or 0) > 1:
        remedies.append("a smaller batch")
    devices_here = "1 device" if subject.world == 1 else f"{subject.world} devices"
    return StrategyError(
        "No strategy fits into the memory of a rank",
        expected=f"at most {limits} on each of {devices_here}",
        got=f"{readable_bytes(smallest.needed_bytes)} for the smallest, {method_names(smallest.strategy)}; {reason}",
        fix="; or ".join(remedies) + "; or name a strategy yourself to try it all the same",
    )


@dataclass(frozen=True)
class _States:
    """Parameters and optimizer states that fill all devices and their hosts, however they are divided.

    Args:
        world: Number of devices.
        held_bytes: All parameters and optimizer states.
        limit_bytes: What a device may hold.
        host_bytes: What each device may take of its host.
    """

    world: int
    held_bytes: int
    limit_bytes: int
    host_bytes: int

    def error(self, devices: int | None) -> StrategyError:
        """Return the error that says so; ``devices`` would do, None: it is not known how many."""
        room = self.limit_bytes + self.host_bytes
        enough = f"take {devices} of these devices"
        if devices is None:
            enough = f"take more than {self.held_bytes // room} of these devices, for activations come on top"
        return StrategyError(
            "No strategy fits into the memory of a rank",
            expected=f"at most {readable_bytes(self.limit_bytes)} and {readable_bytes(self.host_bytes)} of host memory "
            f"for each of {self.world} devices",
            got=f"{readable_bytes(self.held_bytes)} of parameters and optimizer states, "
            f"{readable_bytes(self.held_bytes // self.world)} for each device",
            fix=f"{enough}; or train adapters around frozen weights, or take an optimizer with smaller states; or name "
            "a strategy yourself to try it all the same",
        )


def no_such_batch(subject: Subject, batches: Sequence[int]) -> StrategyError:
    """Return the error for a batch that no strategy cuts so that it fits, where batches about as large do."""
    numbers = " or ".join(map(str, batches))
    return StrategyError(
        "No strategy cuts the batch so that it fits into the memory of a rank",
        expected=f"a global_batch that {subject.world} devices share equally",
        got=f"{subject.batch_size} samples",
        fix=f"take a global_batch of {numbers}, which fits; or name a strategy yourself to try it all the same",
    )


def _binding(smallest: Plan) -> tuple[str, str, str]:
    """Find the class of memory that is too large; return it with a sentence and the limits."""
    limits = readable_bytes(smallest.limit_bytes or 0)
    if smallest.fits_device:
        limits += f", and {readable_bytes(smallest.host_limit_bytes or 0)} of host memory,"
        return "host", f"offloaded, it needs {readable_bytes(smallest.host_bytes)} of host memory", limits
    most = smallest.forecast.peak if smallest.forecast is not None else peak(smallest.step)
    name, size = _largest_class(most.memory)
    reason = f"{_MOMENTS[most.moment]} it holds {readable_bytes(size)} of {name.replace('_', ' ')}"
    behind = _behind_blocks(smallest.step) if (name, most.moment) == ("activations", "loss") else 0
    if 2 * behind > size:
        return "logits", f"{reason}, {readable_bytes(behind)} of it logits and what the loss makes of them", limits
    return name, reason, limits


def _behind_blocks(step: Step) -> int:
    """Return the bytes that are free once the blocks run backward: logits, and what the loss makes of them."""
    held = moments(step)
    return (held["loss"].activations or 0) - (held["recomputation"].activations or 0)


def nothing_works(world: int, refused: Mapping[str, str], included: Collection[str]) -> StrategyError:
    """Return the error for constraints and models that leave nothing that could train.

    Reasons against the included methods come first.
    """
    # That methods exclude each other is no news. What the model or the devices lack is.
    telling = [reason for reason in refused if "does not go together" not in reason] or list(refused)
    telling.sort(key=lambda reason: not reason.startswith(tuple(included)))
    reasons = "; ".join(telling[:3]) or "no mesh was left"
    return StrategyError(
        "No strategy can train this model" + (f" with {join_names(included)}" if included else ""),
        expected=f"a strategy for {world} devices",
        got=reasons,
        fix="include fewer methods, or change what the reasons name",
    )


def ended_early(max_predictions: int) -> StrategyError:
    """Return the error for a search that used up its predictions before it found anything."""
    return StrategyError(
        "The search ended before it found a strategy that fits",
        expected=f"a strategy within {max_predictions} predictions",
        got="none",
        fix="allow more with max_predictions, or include methods that are known to be needed",
    )


def _largest_class(held: Memory) -> tuple[str, int]:
    on_device = (each.name for each in fields(held) if not each.name.startswith(("disk_", "host_")))
    sizes = {name: getattr(held, name) or 0 for name in on_device}
    name = max(sizes, key=sizes.__getitem__)
    return name, sizes[name]


# --- Searching for the best strategies of a subject.

Progress = Callable[[int, int], None]
"""Called with the number of predictions made, and of candidates considered."""

MAX_PREDICTIONS = 1500
_MOST_GROWTH = 1024
_GROWTH_S = 3.0  # in which a search that has a limit looks for the number of devices that would do
_Tried = tuple[Space, SearchState]  # the state after its pass without offloading


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
    follow_ups: Sequence[FollowUp] = (),
    growing: Space | None = None,
    reach: float | None = None,
    of_family: int = 1,
    limit_s: float | None = None,
    enough_s: float | None = None,
) -> Found:
    """Find the strategies that do best among those that fit into memory.

    Candidates are tried in the order of their lower bounds, until no other can be among the best. As long as
    ``max_predictions`` last, the result is what simulating all of them would give. The same call finds the same.

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
        progress: Called after every prediction.
        follow_ups: Where it goes on after ``space``, in this order.
        growing: What is tried on more devices, where nothing fits on these; None: the last that was tried here.
        reach: Keep only the best plan of each family (see ``family_of``), of those that are at most so many times worse
            than the best of all; None: every plan counts.
        of_family: How many of each family are kept then: the best, and the next that need less and less memory.
        limit_s: Seconds of processor time after which the search ends with the best so far; None: no limit.
        enough_s: Seconds after which it ends as soon as it has found anything; None: not before ``limit_s``.

    Raises:
        StrategyError: When nothing fits, with the smallest, what binds, and how many devices would do; when nothing can
            train; when what is included and excluded contradicts itself.
        ConfigError: When the subject does not know what the objective needs.
    """
    start = time.perf_counter()
    check_objective(objective)
    required = read_constraints(excluded, included)
    cluster: Cluster | None = getattr(subject, "cluster", None)
    node = cluster.devices_per_node if cluster is not None else subject.world
    constrain = functools.partial(constrained, excluded=excluded, included=required, world=subject.world, node=node)
    given = constrain(space or default_space(subject))
    decided = given.offload != ((),) or names_role(Role.OFFLOADING, (*excluded, *required))
    offload = () if decided else offloads(subject.world, trained_share(subject))
    limit = TimeLimit(limit_s, enough_s)
    passes = _Passes(subject, cluster, node, objective, top, max_predictions, progress, limit, (reach, of_family))
    with limit.watched():
        given, state = passes.first(given, may_lower=not names_role(Role.PRECISION, required))
        wider = growing or next((each.space for each in reversed(follow_ups) if each.where == "last"), given)
        passes.check_states(given, state, offload, constrain(wider))
        tried, state = passes.follow(given, state, follow_ups, constrain, offload)
    if not state.plans and limit.is_over:
        raise out_of_time(limit, state.too_large[0] if state.too_large else None)
    if not state.plans:
        raise passes.failure(tried, state, offload, required, None if growing is None else constrain(growing))
    return Found(
        plans=tuple(plan for _, plan in state.plans),
        too_large=tuple(state.too_large),
        refused=tuple((text, reason) for reason, text in passes.refused.items()),
        num_considered=passes.num_considered,
        num_predicted=passes.num_predicted,
        seconds=time.perf_counter() - start,
        is_complete=not state.ever_stopped,
        out_of_time=state.ever_stopped and limit.is_enough,
    )


class _Passes:
    """The passes of one search: what they share, and the order in which they are made."""

    def __init__(
        self,
        subject: Subject,
        cluster: Cluster | None,
        node: int,
        objective: Objective,
        top: int,
        max_predictions: int,
        progress: Progress | None,
        limit: TimeLimit,
        families: tuple[float | None, int],
    ) -> None:
        self.limit, (self.reach, self.of_family) = limit, families
        self._growing = TimeLimit()  # of the search for more devices
        self.subject, self.cluster, self.node, self.objective = subject, cluster, node, objective
        self.top, self.max_predictions, self.progress = top, max_predictions, progress
        self.bounds = None if cluster is None else Bounds(subject, cluster)
        self.refused: dict[str, str] = {}
        self.num_considered = self.num_predicted = 0

    def first(self, space: Space, *, may_lower: bool) -> tuple[Space, SearchState]:
        """Make the first pass; return the space it settled on, and the state after it.

        Where lower precision stops a model from being traced, the pass is made once more in full precision.
        """
        before = self._through(space)
        if not (may_lower and _is_untraced(before) and space.precision != ((),)):
            return space, before
        full = space.replace(precision=((),))
        state = self._through(full)
        if _is_untraced(state):
            return space, before  # the model itself cannot be traced
        _, plan = before.plans[0]
        gap = next((gap for gap in plan.gaps if "activations" in gap), "activations are not predicted")
        self.refused |= {f"in lower precision {gap}": str(plan.strategy)}
        return full, state

    def follow(
        self, given: Space, state: SearchState, follow_ups: Sequence[FollowUp], constrain: Callable[[Space], Space],
        offload: tuple[Choice, ...],
    ) -> tuple[list[_Tried], SearchState]:  # fmt: skip
        """Make all passes after the first; return the spaces that were tried, and the state at the end.

        Args:
            given: The space of the first pass.
            state: After the first pass.
            follow_ups: The other spaces.
            constrain: Returns the part of a space that satisfies the caller's constraints.
            offload: What may leave devices.
        """
        tried: list[_Tried] = [(given, state)]
        for each in (each for each in follow_ups if each.where == "always"):
            space = constrain(each.space).replace(precision=given.precision)
            tried.append(self._in_other(space, state, only_better=each.only_better))
            state = tried[-1][1]
        state = self._offloading(tried, state, offload)
        for each in follow_ups:
            if each.is_worth(state, tried[0][1]):
                space = constrain(each.space_after(state, tried[0][1])).replace(precision=given.precision)
                tried.append(self._in_other(space, state))
                state = self._offloading(tried[-1:], tried[-1][1], offload)
        for each in (each for each in follow_ups if each.where == "families" and state.plans):
            space = constrain(each.space).replace(precision=given.precision)
            # What was found is as good as it was, if there is no time for all families.
            state.plans = self._through(space, state.for_families(each.reach)).plans
        return tried, state

    def _overflows(self, world: int) -> _States | None:
        """Return parameters and optimizer states if they alone fill devices and hosts, however they are divided."""
        host = None if self.cluster is None else usable_host_bytes(self.cluster)
        if self.bounds is None or self.bounds.limit_bytes is None or host is None:
            return None
        held, limit = self.bounds.state_bytes(), self.bounds.limit_bytes
        return _States(world, held, limit, host) if held > world * (limit + host) else None

    def check_states(self, space: Space, state: SearchState, offload: tuple[Choice, ...], growing: Space) -> None:
        """End a search of which the first pass shows that parameters and states fit nowhere but on disks.

        Args:
            space: The space of the first pass.
            state: After it.
            offload: What may leave devices.
            growing: What is tried on more devices.

        Raises:
            StrategyError: With the number of devices that would do.
        """
        states = None if state.plans else self._overflows(self.subject.world)
        if states is not None and {*space.offload} <= {(), *offloads(self.subject.world)}:  # none to disk
            raise states.error(self.fewest_devices(_roomiest(growing, (*growing.offload, *offload))))

    def _in_other(self, space: Space, state: SearchState, *, only_better: bool = True) -> _Tried:
        return space, self._through(space, state.for_other_space(only_better=only_better))

    def _offloading(self, tried: Sequence[_Tried], state: SearchState, offload: tuple[Choice, ...]) -> SearchState:
        """Pass with offloading where something too large could be among the best once it takes less."""
        for space, without in tried:
            if offload and (without.ran_out or self.objective == "memory"):
                state = self._through(space.replace(offload=((), *offload)), state.for_offloading(without))
        return state

    def _through(self, space: Space, before: SearchState | None = None) -> SearchState:
        before = before or SearchState(self.top, reach=self.reach, of_family=self.of_family)
        return self._pass(space, self.objective, self.top, limited=True, before=before)

    def _pass(
        self, space: Space, objective: Objective, top: int, *, limited: bool, before: SearchState | None = None
    ) -> SearchState:
        candidates = Candidates(space, self.subject.world, self.node, self.subject.batch_size)
        engine = Engine(
            self.subject, candidates, self.bounds, objective, top, self.max_predictions, self.progress, limited=limited,
            time_limit=self.limit,
        )  # fmt: skip
        state = engine.run(before)
        self.refused = candidates.refused | self.refused  # the reason is shown with the simplest strategy that met it
        self.num_considered += state.num_considered
        self.num_predicted = state.num_predicted + self.num_predicted
        return state

    def failure(
        self,
        tried: Sequence[_Tried],
        state: SearchState,
        offload: tuple[Choice, ...],
        included: Collection[str],
        growing: Space | None,
    ) -> StrategyError:
        """Return the error for a search that has found nothing, with the most telling reason.

        Args:
            tried: The spaces that were tried.
            state: At the end.
            offload: What may leave devices.
            included: Methods that every candidate has.
            growing: What is tried on more devices; None: the last space that was tried.
        """
        if state.ever_stopped:
            return ended_early(self.max_predictions)
        space = tried[-1][0]
        roomiest = _roomiest(space, (*space.offload, *offload))
        if batches := self.batches_nearby(roomiest):
            return no_such_batch(self.subject, batches)
        ran_out = any(without.ran_out for _, without in tried)
        smallest = self.smallest(roomiest, state.too_large) if ran_out else None
        if smallest is None:
            return nothing_works(self.subject.world, self.refused, included)
        larger = roomiest if growing is None else _roomiest(growing, (*growing.offload, *offload))
        return nothing_fits(self.subject, smallest, self.fewest_devices(larger))

    def smallest(self, space: Space, known: Sequence[Plan]) -> Plan | None:
        """Return the plan that needs the least memory, although too much, among those that divide everything."""
        state = self._pass(space, "memory", 1, limited=False)
        plans = [*known, *(plan for _, plan in state.plans)]
        return min(plans, key=lambda plan: (plan.needed_bytes, str(plan.strategy)), default=None)

    def fewest_devices(self, space: Space) -> int | None:
        """Find the number of devices that would be enough: double it until a plan fits, then search in between.

        The result is None if it cannot be found, or if a thousand times as many are too few.
        """
        grow: Callable[[int], Subject] | None = getattr(self.subject, "on", None)
        if grow is None or self.cluster is None:
            return None
        world, left_s = self.subject.world, self.limit.left_s
        self._growing = TimeLimit(None if left_s is None else min(left_s, _GROWTH_S))
        with contextlib.suppress(OutOfTimeError):
            for times in range(1, _MOST_GROWTH.bit_length()):
                if self._fits_on(number := world << times, grow, space):
                    return self._between(number // 2, number, grow, space)
        return None

    def _between(self, few: int, enough: int, grow: Callable[[int], Subject], space: Space) -> int:
        """Return the fewest devices that are enough, between too few and twice as many, in quarters and whole nodes."""
        unit = self.node if few > self.node and few % self.node == 0 else 1
        for quarter in (few // 2, few // 4):
            middle = enough - quarter
            if few % 4 == 0 and middle % unit == 0 and self._fits_on(middle, grow, space):
                enough = middle
        return enough

    def _fits_on(self, number: int, grow: Callable[[int], Subject], space: Space) -> bool:
        """Return whether any strategy fits on a number of devices."""
        assert self.cluster is not None
        if self._overflows(number) and {*space.offload} <= {(), *offloads(number)}:  # none to disk
            return False
        larger, cluster = grow(number), self.cluster.resized(number)
        wider = space.replace(sizes=_wider(space, default_space(larger)))
        return self._fits(larger, cluster, wider, self._growing)

    def batches_nearby(self, space: Space) -> list[int]:
        """Return fitting batches near one that the devices cannot share equally."""
        of_batch: Callable[[int], Subject] | None = getattr(self.subject, "of_batch", None)
        world, batch = self.subject.world, self.subject.batch_size
        if of_batch is None or batch is None or self.cluster is None or batch % world == 0:
            return []
        below = batch - batch % world
        return [n for n in (below, below + world) if n and self._fits(of_batch(n), self.cluster, space)]

    def _fits(self, subject: Subject, cluster: Cluster, space: Space, limit: TimeLimit | None = None) -> bool:
        """Return whether any strategy of a space fits.

        Raises:
            OutOfTimeError: When the limit is over before that is known.
        """
        candidates = Candidates(space, subject.world, cluster.devices_per_node, subject.batch_size)
        bounds = Bounds(subject, cluster)
        limit = limit or TimeLimit()
        engine = Engine(
            subject, candidates, bounds, "memory", 1, self.max_predictions, None, any_will_do=True, time_limit=limit
        )
        found = engine.run()
        if not found.plans and limit.is_over:
            raise OutOfTimeError
        return bool(found.plans)


def _is_untraced(state: SearchState) -> bool:
    """Return whether the activations of the best plan are unknown."""
    return bool(state.plans) and state.plans[0][1].step.activations is None


def _roomiest(space: Space, offload: tuple[Choice, ...]) -> Space:
    """Return the part of a space that needs the least memory: everything is divided over as many ranks as possible."""
    return space.replace(hybrid=False, recompute=space.recompute[-1:], offload=offload, kernels=space.kernels[:1])


def _wider(space: Space, larger: Space) -> dict[str, tuple[int, ...]]:
    """Return the sizes of axes in a larger world, as far as a caller's constraints leave them open."""
    return {
        axis: tuple(size for size in larger.sizes.get(axis, every) if size > 1 or 1 in every)
        if space.axis_methods.get(axis)
        else every
        for axis, every in space.sizes.items()
    }


# --- Searching for a real module. It must be run to be known, so what costs most to find out about is tried last.

_MAX_PREDICTIONS = 300
_DIVIDE_TOKENS = ("sequence", "context")
_SLOW = SearchScope(is_slow=True)


def search_in_stages(subject: Subject, space: Space, **options: Any) -> Found:
    """Search where a prediction is quick first, and go on from the best of that.

    A model that is traced takes seconds for every way to divide its layers or tokens, where one of a known family takes
    milliseconds. So data and tensor parallelism come first, then divided experts, and pipelines next. Tokens are
    divided between the layers where the best so far divides these, has to offload, or recomputes where a tensor axis
    lacked memory; and inside attention where nothing has fitted, or where there are more devices than samples.
    What is included by name is tried from the first. The best of families that are farther behind come last of all.

    Args:
        subject: A real module.
        space: All that may be tried.
        options: Of :func:`search`.

    Raises:
        StrategyError: As ``search`` does for the whole space.
    """
    options = {"max_predictions": _MAX_PREDICTIONS, **options}
    reach = options.get("reach")
    if reach is not None:
        options["reach"] = min(reach, 1 + MODEL_ERROR)
    small = space.replace(
        sizes={axis: sizes for axis, sizes in space.sizes.items() if axis not in ("pipeline", *_DIVIDE_TOKENS)},
        axis_methods={**space.axis_methods, "tensor": on_axis("tensor", _SLOW)[:1]},
        inner_axes=1,
        loss=space.loss[:1],
    )
    asked = options.get("excluded", ()), options.get("included", ())
    is_scarce = subject.batch_size is not None and subject.batch_size < subject.world
    follow_ups = (*divided_next(small, subject, *asked), *_follow_ups(small, space, *asked, is_scarce=is_scarce))
    families = () if reach is None else (FollowUp(small, "families", reach=reach),)
    return search(subject, space=small, follow_ups=(*follow_ups, *families), growing=small, **options)


def _follow_ups(
    small: Space, whole: Space, excluded: Sequence[str], included: Sequence[Any], *, is_scarce: bool
) -> Iterator[FollowUp]:
    """Yield the spaces beyond the small one, without what has been tried there or is excluded.

    Where samples are fewer than devices (``is_scarce``), ranks have to share them: that is always tried.
    """
    required = Strategy([*read_constraints(excluded, included).values()])
    mesh = dict(getattr(find_method(required, lambda each: each.phase == Phase.MESH), "axes", ()))
    pipeline = find_method(required, lambda each: each.axis == "pipeline")
    sizes = tuple(size for size in whole.sizes.get("pipeline", ()) if size > 1)  # none on one device
    pipelines = on_axis("pipeline", _SLOW)
    if sizes and not mesh and pipeline is None and _is_allowed("pipeline", excluded, included):
        yield FollowUp(_on(small, "pipeline", sizes, pipelines))
    tensor = find_method(required, lambda each: each.axis == "tensor")
    between = on_axis("tensor", _SLOW)[1:]
    decided = {key for choice in between for method in choice for key in method.model_fields_set}
    is_decided = tensor is not None and not decided.isdisjoint(tensor.model_fields_set)
    sizes = tuple(size for size in whole.sizes.get("tensor", ()) if size > 1)
    may_divide = tensor is not None or _is_allowed("tensor", excluded, included)
    if sizes and may_divide and not is_decided and (not mesh or mesh.get("tensor", 1) > 1):
        yield FollowUp(_on(small, "tensor", sizes, between), "divided")
    yield from with_other_loss(small, whole, (*excluded, *required.names))
    all_of_it = whole.replace(axis_methods={**whole.axis_methods, "pipeline": pipelines})
    yield FollowUp(all_of_it, "always" if is_scarce else "nothing")


def _is_allowed(axis: str, excluded: Sequence[str], included: Sequence[Any]) -> bool:
    """Return whether constraints allow the method of an axis."""
    try:
        read_constraints(excluded, [*included, method_of_axes()[axis]])
    except StrategyError:
        return False
    return True


def _on(space: Space, axis: str, sizes: tuple[int, ...], methods: tuple[Choice, ...]) -> Space:
    return space.replace(sizes={**space.sizes, axis: sizes}, axis_methods={**space.axis_methods, axis: methods})
