"""Resolve a strategy, enforce the composition rules, and apply its methods in phase order.

A strategy as a user writes it goes through :func:`resolve`, which adds what it implies and refuses what does not fit
together. Then :func:`cost_of` applies the methods to a simulated step, and :func:`check_strategy` and
:func:`apply_strategy` to the real job.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

import torch
from torch import nn

from meshwright.cost import Device, Step, axis_parts
from meshwright.errors import ModelError, StrategyError, join_names
from meshwright.methods.base import INNER_AXES, SHARD_AXES, SHARDING, Conflict, Job, Method, Phase
from meshwright.methods.birth import give_parameters
from meshwright.methods.gradient_averaging import GradientHooks, broadcast_states
from meshwright.methods.job import SAMPLED
from meshwright.methods.parallel_mode import ParallelMode, replicate, replicate_cost, share_buffers
from meshwright.methods.planner_hooks import Role
from meshwright.methods.replace.model_changes import Replacement
from meshwright.nn import class_with, move_to, part_of_whole, rank_orders, wrap_method
from meshwright.nn.batches import equal_parts
from meshwright.optim import ParameterPlacement, set_placement
from meshwright.runtime import Axes, fit_axes, joint_axis, same_on_every_rank
from meshwright.store.entries import stored_name, unwrapped
from meshwright.strategy import MethodConfig, Strategy
from meshwright.strategy.value import METHOD_CONFIGS

if TYPE_CHECKING:
    from meshwright.methods.replace.module_replace import ModuleReplace
    from meshwright.methods.zero_config import ZeroMethod

_MOST_MICRO_BATCHES = 2**16
_WITHOUT_METHOD = ("data", "zero")  # axes that belong to no single method
_ZERO_LEVELS = {1: "zero1", 2: "zero2", 3: "fsdp"}

LEAST_COMMUNICATION_FIRST: tuple[tuple[str, ...], ...] = ((), ("zero2",), ("fsdp",), ("fsdp", "checkpoint"))
"""The methods to try in turn if no step times are predicted: each entry needs less memory and a longer step."""


# --- Methods by phase, axis and role


def known_methods() -> list[type[Method]]:
    """Return all methods, in the order in which they are applied."""
    found = [config for config in METHOD_CONFIGS.values() if issubclass(config, Method)]
    return sorted(found, key=lambda method: method.phase)


def method_of_axes() -> dict[str, str]:
    """Map each axis that only one method uses to that method."""
    return {method.axis: method.method_name for method in known_methods() if method.axis is not None}


def axes_that_divide(model: nn.Module, excluded: Collection[str] = ()) -> dict[str, int]:
    """Map each axis that can divide most of a model's weights into equal parts to their number.

    Args:
        model: The model.
        excluded: Methods that do not count.
    """
    methods = {each.axis: each for each in known_methods() if each.method_name not in excluded}
    parts = {axis: methods[axis].parts_of(model) for axis in INNER_AXES if axis in methods}
    return {axis: number for axis, number in parts.items() if number > 1}


def methods_for(role: Role) -> list[type[Method]]:
    """Return the methods that are options of a search's decision; those that shard by rising communication."""
    levels = {name: level for level, name in enumerate(SHARDING)}
    return sorted(
        (method for method in known_methods() if method.role is role),
        key=lambda method: levels.get(method.method_name, len(levels)),
    )


def in_phase_order(strategy: Strategy) -> list[Method]:
    """Return the methods of a strategy in the order in which they are applied."""
    return sorted((method for method in strategy.methods if isinstance(method, Method)), key=lambda m: m.phase)


def find_method(strategy: Strategy, is_wanted: Callable[[Method], bool]) -> Any:
    """Return the first method of a strategy that satisfies a predicate; None if none does."""
    methods = (method for method in strategy.methods if isinstance(method, Method))
    return next((method for method in methods if is_wanted(method)), None)


def mesh_method(axes: Axes) -> MethodConfig:
    """Return the method that names the axes of a mesh."""
    return ParallelMode.parse({"axes": axes})


def besides_mesh(strategy: Strategy) -> tuple[MethodConfig, ...]:
    """Return all methods of a strategy except the one that names the mesh."""
    return tuple(method for method in strategy.methods if not isinstance(method, ParallelMode))


def with_micro_batches(strategy: Strategy, count: int) -> Strategy:
    """Return the strategy with a number of micro-batches, if it names none itself."""
    pipeline = find_method(strategy, lambda method: method.axis == "pipeline")
    if pipeline is not None and pipeline.num_micro_batches is None:
        return strategy.with_method(pipeline.model_copy(update={"num_micro_batches": count}))
    if count == 1 or find_method(strategy, lambda method: method.asked_micro_batches is not None):
        return strategy
    return strategy.with_method(("gradient_accumulation", count))


# --- Composition rules


@dataclass(frozen=True)
class Rule:
    """A conflict between two methods, named in the order of their phases."""

    first: str
    second: str
    text: str
    """The sentence that refuses a strategy with both."""
    always: bool
    """Whether the methods always conflict, not only with some of their keys."""


def rules() -> list[Rule]:
    """Return every conflict of every method."""
    order = [method.method_name for method in known_methods()]
    found: list[Rule] = []
    for method in known_methods():
        for conflict in method.conflicts:
            first, second = sorted((method.method_name, conflict.other), key=order.index)
            always = not conflict.own_keys and not conflict.other_keys
            found.append(Rule(first, second, sentence(method.method_name, conflict), always))
    return found


def sentence(name: str, conflict: Conflict) -> str:
    """Write a conflict as a sentence, without a full stop."""
    own, other = _with_keys(name, conflict.own_keys), _with_keys(conflict.other, conflict.other_keys)
    return f"{own} does not go together with {other}: {conflict.reason}"


def _with_keys(name: str, keys: str) -> str:
    return f"{name} with {keys}" if keys else name


def check_rules(strategy: Strategy, sizes: Mapping[str, int]) -> None:
    """Refuse methods that conflict with each other, and methods that need another one.

    Args:
        strategy: The strategy with every implied method.
        sizes: Ranks along every axis of the mesh.

    Raises:
        StrategyError: Naming the methods.
    """
    methods = [method for method in strategy.methods if isinstance(method, Method)]
    found = next(conflicts_of(methods, sizes), None)
    if found is not None:
        own, other, conflict = found
        raise StrategyError(
            sentence(own.method_name, conflict),
            expected="one of the two"
            if not (conflict.own_keys or conflict.other_keys)
            else "other keys, or one of the two",
            got=f"{own} and {other}",
            fix=conflict.fix,
        )
    for method in methods:
        if method.is_active(sizes):
            _check_needs(method, strategy)


def conflicts_of(methods: Sequence[Method], sizes: Mapping[str, int]) -> Iterator[tuple[Method, Method, Conflict]]:
    """Yield the conflicts of methods that work on a mesh, each with the method that declares it and the other."""
    active = [method for method in methods if method.is_active(sizes)]
    for own, other in itertools.permutations(active, 2):
        for conflict in own.conflicts:
            if conflict.other == other.method_name and conflict.when(own, other):
                yield own, other, conflict


def _check_needs(method: Method, strategy: Strategy) -> None:
    for need in method.needs:
        if need.when(method) and not any(name in strategy for name in need.any_of):
            raise StrategyError(
                f"{_with_keys(method.method_name, need.own_keys)} needs {' or '.join(need.any_of)}: {need.reason}",
                expected=join_names(need.any_of) if len(need.any_of) == 1 else f"one of {join_names(need.any_of)}",
                got=str(strategy),
                fix=need.fix,
            )


def check_axes(strategy: Strategy, sizes: Mapping[str, int], world: int) -> None:
    """Refuse axes without a method that works on them, and methods without their axis.

    Raises:
        StrategyError: Naming the axis.
    """
    working = {each.axis: each for each in strategy.methods if isinstance(each, Method) and each.axis is not None}
    for name, size in sizes.items():
        if size > 1 and name not in working and name not in _WITHOUT_METHOD:
            method = method_of_axes()[name]
            raise StrategyError(
                f"The mesh has an axis {name!r} and no method works on it",
                expected=f"the method {method}",
                got=f"{name}={size}",
                fix=f"add {method} to the strategy",
            )
    for name, each in working.items():
        if name not in sizes:
            raise StrategyError(
                f"{each.method_name} has no mesh axis to work on",
                expected=f"an axis {name!r} in parallel_mode",
                got=str(dict(sizes)),
                fix=f"add it: ('parallel_mode', {{'{name}': 2, 'data': {max(world // 2, 1)}}})",
            )


def check_shard_axis(method: str, axis: str, sizes: Mapping[str, int]) -> None:
    """Refuse a mesh without an axis that parameters can be sharded over.

    Raises:
        StrategyError: Naming the method.
    """
    if sizes.keys().isdisjoint(axis_parts(axis)):
        raise StrategyError(
            f"{method} has no mesh axis to shard over",
            expected=f"one of the axes {join_names(SHARD_AXES)}",
            got=str(dict(sizes)),
            fix="add ('parallel_mode', {'zero': …}) to the strategy",
        )


# --- Resolving: add the methods and the mesh that a strategy implies


@dataclass(frozen=True)
class Resolved:
    """A strategy with every implied method, which fits the number of ranks."""

    strategy: Strategy
    axes: Axes
    shard_axis: str | None
    notices: tuple[str, ...]


def resolve(
    strategy: Strategy, world: int, zero_level: int = 3, device: torch.device | Device | None = None
) -> Resolved:
    """Complete a strategy for a number of ranks, or refuse it if its methods do not fit together.

    Args:
        strategy: As the user wrote it.
        world: Number of ranks.
        zero_level: ZeRO stage that a ``zero`` axis implies if the strategy names no method that shards.
        device: Device that the strategy will run on, which need not be present. Methods that it cannot run are left
            out, with a notice. None leaves none out.

    Raises:
        StrategyError: Naming the methods.
    """
    written, strategy = strategy, without_mixed(strategy)
    notices = list(
        dict.fromkeys(notice for each in (written, strategy) for method in each.methods for notice in method.notices())
    )
    strategy = _without_unusable(strategy, device, notices)
    strategy, axes = _with_mesh(strategy, world)
    strategy = _with_zero_method(strategy, axes, zero_level, notices)
    check_rules(strategy, dict(axes))
    strategy = _without_redundant_amp(strategy, notices)
    shards, shard_axis = _sharding_method(strategy), shard_axis_of(strategy, dict(axes))
    check_axes(strategy, dict(axes), world)
    if shards is not None and shard_axis is not None:
        check_shard_axis(shards, shard_axis, dict(axes))
    return Resolved(strategy, axes, shard_axis, tuple(notices))


def without_mixed(strategy: Strategy) -> Strategy:
    """Expand ``mixed_parallel`` and its aliases in a strategy into a mesh and the methods of its axes.

    Raises:
        StrategyError: When such a name has no mesh, or two.
    """
    if all(isinstance(method, Method) for method in strategy.methods):
        return strategy
    from meshwright.methods import mixed_parallel

    return mixed_parallel.without_mixed(strategy)


def _without_unusable(strategy: Strategy, device: torch.device | Device | None, notices: list[str]) -> Strategy:
    for method in strategy.methods if device is not None else ():
        reason = method.left_out_on(device) if isinstance(method, Method) and device is not None else None
        if reason is not None:
            notices.append(reason)
            strategy = strategy.without(method.method_name)
    return strategy


def _with_mesh(strategy: Strategy, world: int) -> tuple[Strategy, Axes]:
    mode = strategy.get("parallel_mode") or ParallelMode()
    assert isinstance(mode, ParallelMode)
    # Without a mesh every rank is a replica of an outer method, as it is of data parallelism otherwise.
    asked = mode.axes or ((("replica", world),) if "outer" in strategy else ())
    axes = fit_axes(asked, world, adjustable=mode.rank_order is None)
    fitted = ParallelMode(axes=axes, rank_order=mode.rank_order)
    return Strategy([fitted, *(method for method in strategy.methods if method.method_name != "parallel_mode")]), axes


def _with_zero_method(strategy: Strategy, axes: Axes, zero_level: int, notices: list[str]) -> Strategy:
    if "zero" not in dict(axes) or _sharding_method(strategy) is not None:
        return strategy
    name = _ZERO_LEVELS[zero_level]
    notices.append(f"the mesh has a zero axis and no method is named for it: {name}, for zero_level={zero_level}")
    return strategy.with_method(name)


def _without_redundant_amp(strategy: Strategy, notices: list[str]) -> Strategy:
    amp, half = strategy.get("amp_native"), strategy.get("half")
    if amp is None or half is None:
        return strategy
    notices.append("amp_native changes nothing beside half of the same dtype, and was dropped")
    return strategy.without("amp_native")


def _sharding_method(strategy: Strategy) -> str | None:
    shards = (method.method_name for method in strategy.methods if isinstance(method, Method) and method.shards)
    return next(shards, None)


def shard_axis_of(strategy: Strategy, sizes: Mapping[str, int]) -> str | None:
    """Return the axis over which a strategy shards; None if it does not shard.

    It is ``zero``, or else ``data``, joined with the axes whose ranks share samples ([Note: joint axes] in
    ``runtime/mesh.py``). These are taken alone if the mesh has neither ``zero`` nor ``data``, and ``expert``, whose
    ranks have equal parameters except for experts, if it has none of them. Nodes that reduce in a hierarchy are those
    of one axis, and other orders of ranks nest no axes: there, nothing is joined.

    Args:
        strategy: Any.
        sizes: Of the mesh axes, innermost first.
    """
    if _sharding_method(strategy) is None:
        return None
    first = next((axis for axis in SHARD_AXES if sizes.get(axis, 1) > 1), "data")
    if "zero" in sizes and first in ("zero", "data"):
        first = "zero"
    comm, mode = strategy.get("comm"), strategy.get("parallel_mode")
    if first == "expert" or getattr(comm, "hierarchical", None) or getattr(mode, "rank_order", None) is not None:
        return first
    return joint_axis(tuple(sizes.items()), first)


class StepCut(NamedTuple):
    """Sizes of the micro-batches that a replica's part of the batch is cut into.

    Attributes:
        asked: Micro-batches that the strategy or the caller asks for.
        samples: Samples of the largest micro-batch.
        micro_batches: Micro-batches that a step runs; a pipeline's may be others than ``asked``.
        local: Samples of a step on one replica.
        notices: What a user did not ask for.
    """

    asked: int
    samples: int
    micro_batches: int
    local: int
    notices: tuple[str, ...] = ()


def cut_step(resolved: Resolved, given: int | None, batch_size: int | None) -> StepCut:
    """Cut a batch as a step does.

    A pipeline's micro-batches are of one size: a batch that does not divide gives others than are asked for.

    Args:
        resolved: The strategy.
        given: Micro-batches that the caller asks for, if it does.
        batch_size: Samples of a step over all replicas; None takes micro-batches of one sample.

    Raises:
        StrategyError: As for :func:`num_micro_batches`.
    """
    asked, ranks = num_micro_batches(resolved.strategy, resolved.axes, given), dict(resolved.axes).get("pipeline", 1)
    if not batch_size:
        return StepCut(asked, 1, asked, asked)
    local = -(-batch_size // math.prod(size for axis, size in resolved.axes if axis in SAMPLED))
    if ranks == 1:
        return StepCut(asked, -(-local // asked), asked, local)
    cut = equal_parts(local, asked, ranks)
    if local % asked == 0:
        return StepCut(asked, cut.rows, cut.total, local)
    repeats = cut.total - cut.distinct
    notice = (
        f"pipeline_parallel: {local} samples do not divide into {asked} micro-batches of one size: a step runs "
        f"{_simulated(cut.total)} of {cut.rows}" + (f", {repeats} of them repeats that do not count" if repeats else "")
    )
    return StepCut(asked, cut.rows, cut.total, local, (notice,))


def num_micro_batches(strategy: Strategy, axes: Axes, given: int | None) -> int:
    """Return the number that the strategy sets, or else the given one, or else the fewest that keep every rank busy.

    Raises:
        StrategyError: When the strategy has another number than was given.
    """
    for method in in_phase_order(strategy):
        own = method.asked_micro_batches
        if own is not None and given not in (None, own):
            raise StrategyError(
                f"{method.method_name} and num_micro_batches name different numbers",
                expected="one of the two, or the same number",
                got=f"{method} and num_micro_batches={given}",
                fix="leave num_micro_batches out: the strategy says it",
            )
        given = own or given
    pipeline = find_method(strategy, lambda method: method.axis == "pipeline")
    ranks = dict(axes).get("pipeline", 1)
    if pipeline is None:
        return _simulated(given or 1)
    return _simulated(given or pipeline.fewest_micro_batches(ranks))


def _simulated(count: int) -> int:
    if count > _MOST_MICRO_BATCHES:
        raise StrategyError(
            "A step has too many micro-batches",
            expected=f"at most {_MOST_MICRO_BATCHES:,}; each is simulated",
            got=f"{count:,}",
            fix="correct num_micro_batches",
        )
    return count


def check_units(resolved: Resolved, model: nn.Module) -> None:
    """Refuse a model that the strategy's sharding method cannot shard, if it has one, before there is a job.

    Raises:
        ModelError: As the method's ``check`` does.
    """
    for method in resolved.strategy.methods if resolved.shard_axis is not None else ():
        if isinstance(method, Method) and method.shards:
            from meshwright.methods.zero_config import units_of

            units_of(cast("ZeroMethod", method), model, resolved.strategy, dict(resolved.axes))


# --- Applying: ``apply_strategy`` changes the real job as ``cost_of`` changes the simulated step


def check_strategy(job: Job) -> None:
    """Let every method of ``job.strategy`` check whether it can be applied; nothing is changed.

    Raises:
        MeshwrightError: From a method's ``check``, on every rank.
    """
    with same_on_every_rank():
        job.replacement = replacement_of(job.strategy, job.model, job.axes, job.device)
        with job.replacement.tried(job.model):  # the model as ``apply`` will find it
            for method in in_phase_order(job.strategy):
                method.check(job)


def apply_strategy(job: Job) -> None:
    """Apply every method of ``job.strategy``, which :func:`check_strategy` has accepted, phase by phase."""
    methods, hooks = in_phase_order(job.strategy), GradientHooks(job.model)
    if job.shard_axis is None and job.size("tensor") == job.size("pipeline") == job.size("expert") == 1:
        move_to(job.model, job.device)  # methods that split a model move it part by part: the whole may not fit
    if not job.weights_are_equal:
        # While the model is whole: what is cut later comes from one rank then.
        broadcast_states(job.model, job.device)
    for method in methods:
        if method.phase < Phase.REPLICATE:
            method.apply(job)
    if job.birth is not None:
        give_parameters(job.model, job.birth, job.device)
    if job.pipeline is None:
        replicate(job)
    else:
        from meshwright.methods.pipeline.pipeline_parallel import finish_pipeline

        finish_pipeline(job, job.pipeline)
    share_buffers(job)
    if job.experts is not None:
        job.stages = job.experts.beside(job.stages, job.device)
    for method in methods:
        if method.phase > Phase.REPLICATE:
            method.apply(job)
    hooks.carry_over(job.model)
    set_parameter_placements(job)
    refuse_own_saving(job)
    refuse_deep_copies(job)


def cost_of(strategy: Strategy, step: Step, *, first: Phase = Phase.MESH, before: Phase | None = None) -> Step:
    """Apply a strategy to a simulated step: the twin of :func:`apply_strategy`.

    Args:
        strategy: A resolved strategy.
        step: The step before the methods of phase ``first``.
        first: The first phase to apply.
        before: The phase to stop before; None applies all.
    """
    methods = in_phase_order(strategy)
    if step.smaller is not None:
        one = step.replace(activations=step.smaller, smaller=None)
        step = step.replace(smaller=cost_of(strategy, one, first=first, before=before).activations)
    for phase in Phase:
        if phase < first or (before is not None and phase >= before):
            continue
        for method in methods:
            if method.phase == phase:
                step = method.cost(step)
        if phase == Phase.REPLICATE:
            step = replicate_cost(step)
    return step


def replacement_of(
    strategy: Strategy, model: nn.Module, axes: Iterable[tuple[str, int]], device: torch.device
) -> Replacement:
    """Find the reversible changes that ``module_replace`` makes to a plain model; none if it is not in the strategy."""
    method: ModuleReplace | None = find_method(strategy, lambda each: each.replaces_modules)
    return Replacement() if method is None else method.replacement(model, strategy, dict(axes), device)


# --- Last changes, once all methods have changed the model


def set_parameter_placements(job: Job) -> None:
    """Set the placement on every parameter: which ranks have it and in what order, for optimizers to read."""
    model = unwrapped(job.model)
    part, orders = part_of_whole(model), rank_orders(model)
    named = {stored_name(name): parameter for name, parameter in model.named_parameters()}
    places = {stored_name(name): place for place, name in enumerate(part.names if part is not None else named)}
    ranks_of = {stored_name(name): ranks for name, ranks in part.homes.items()} if part is not None else {}
    for name, parameter in named.items():
        on, of = (len(ranks_of[name]), part.size) if part is not None else (1, 1)
        set_placement(parameter, ParameterPlacement(places[name], on, of, orders.get(id(parameter))))


def refuse_own_saving(job: Job) -> None:
    """Make ``save_pretrained`` refuse to run without a state dict, if a rank has a part of the model.

    The methods of transformers and peft would write this rank's part as if it were the whole model.
    """
    is_part = job.shard_axis is not None or job.is_split or job.pipeline is not None
    if is_part and hasattr(type(job.model), "save_pretrained"):
        wrap_method(unwrapped(job.model), "save_pretrained", _saving)


def _saving(save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("state_dict") is None:
        raise ModelError(
            "save_pretrained would write this rank's part of the model",
            expected="meshwright.store.save_folder, or of peft's adapters meshwright.booster.lora.save_lora",
            got="save_pretrained without a state_dict",
            fix="call save_folder(job.model, FOLDER) on every rank: it writes what from_pretrained reads",
        )
    return save(*args, **kwargs)


def refuse_deep_copies(job: Job) -> None:
    """Make ``copy.deepcopy`` refuse a model of whose layers a rank has a part, as FSDP2 does for what it shards.

    Its blocks would go on exchanging values, and sums of shared gradients, for the model that was copied.
    """
    if job.is_split or job.pipeline is not None:
        model = unwrapped(job.model)
        model.__class__ = class_with(type(model), "__deepcopy__", _refuse_copy)


def _refuse_copy(model: nn.Module, memo: object) -> NoReturn:
    raise ModelError(
        "A model that is divided over ranks cannot be deep-copied",
        expected="a model that every rank has whole",
        got=f"a {type(model).__name__} whose layers, experts or stages lie on several ranks",
        fix="copy its state_dict(), or accelerate a second model and load that into it",
    )
