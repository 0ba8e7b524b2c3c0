"""How methods go together: what a strategy implies, and the order in which its methods are applied.

What they need and what excludes what is the law, on the classes of methods; see :mod:`~meshwright.methods.law`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from meshwright.cost import Device, Step
from meshwright.methods.base import Method, Phase
from meshwright.methods.compatibility import check_axes, check_law, check_shard_axis
from meshwright.methods.gradient_hooks import GradientHooks
from meshwright.methods.held import tell_parameters
from meshwright.methods.job import Job
from meshwright.methods.law import SHARD_AXES
from meshwright.methods.own_saving import refuse_own_saving
from meshwright.methods.parallel_mode import ParallelMode, replicate, replicate_cost
from meshwright.methods.replace.changes import replacement_of
from meshwright.runtime import Axes, fit_axes, same_on_every_rank
from meshwright.strategy import Strategy

if TYPE_CHECKING:
    from meshwright.methods.zero.config import ZeroMethod

_ZERO_LEVELS = {1: "zero1", 2: "zero2", 3: "fsdp"}


@dataclass(frozen=True)
class Resolved:
    """A strategy that fits a world: every implied method is in it."""

    strategy: Strategy
    axes: Axes
    shard_axis: str | None
    notices: tuple[str, ...]


def resolve(
    strategy: Strategy, world: int, zero_level: int = 3, device: torch.device | Device | None = None
) -> Resolved:
    """Completes a strategy for a number of ranks, and refuses one whose methods do not fit together.

    Args:
        strategy: As the user wrote it.
        world: Number of ranks.
        zero_level: Which method a ``zero`` axis means when none is named.
        device: Where it will run, which need not be here; methods that it cannot run are left out, with a notice.
            None leaves none out.

    Raises:
        StrategyError: Naming the methods.
    """
    written, strategy = strategy, without_mixed(strategy)
    said = dict.fromkeys(
        notice for each in (written, strategy) for method in each.methods for notice in method.notices()
    )
    notices = list(said)
    strategy = _without_unusable(strategy, device, notices)
    strategy, axes = _with_mesh(strategy, world)
    strategy = _with_zero_method(strategy, axes, zero_level, notices)
    check_law(strategy, dict(axes))
    strategy = _without_redundant_amp(strategy, notices)
    shards, shard_axis = _sharding_method(strategy), shard_axis_of(strategy, dict(axes))
    check_axes(strategy, dict(axes), world)
    if shards is not None and shard_axis is not None:
        check_shard_axis(shards, shard_axis, dict(axes))
    return Resolved(strategy, axes, shard_axis, tuple(notices))


def _without_unusable(strategy: Strategy, device: torch.device | Device | None, notices: list[str]) -> Strategy:
    for method in strategy.methods if device is not None else ():
        reason = method.left_out_on(device) if isinstance(method, Method) and device is not None else None
        if reason is not None:
            notices.append(reason)
            strategy = strategy.without(method.method_name)
    return strategy


def shard_axis_of(strategy: Strategy, sizes: Mapping[str, int]) -> str | None:
    """The axis over which a strategy shards; None where it does not.

    ``zero``, else ``data``; ranks of a sequence hold equal parameters too, and are taken where they are alone. So are
    ranks along experts, which hold all other parameters.
    """
    if _sharding_method(strategy) is None:
        return None
    if "zero" in sizes or sizes.get("data", 1) > 1:
        return "zero" if "zero" in sizes else "data"
    return next((axis for axis in SHARD_AXES[2:] if sizes.get(axis, 1) > 1), "data")


def _with_mesh(strategy: Strategy, world: int) -> tuple[Strategy, Axes]:
    mode = strategy.get("parallel_mode") or ParallelMode()
    assert isinstance(mode, ParallelMode)
    # Without a mesh every rank is a replica of an outer method, as it is of data parallelism otherwise.
    asked = mode.axes or ((("replica", world),) if "outer" in strategy else ())
    axes = fit_axes(asked, world, adjustable=mode.rank_order is None)
    fitted = ParallelMode(axes=axes, rank_order=mode.rank_order)
    return Strategy([fitted, *(method for method in strategy.methods if method.method_name != "parallel_mode")]), axes


def _sharding_method(strategy: Strategy) -> str | None:
    """The first; the law allows no second."""
    shards = (method.method_name for method in strategy.methods if isinstance(method, Method) and method.shards)
    return next(shards, None)


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


def without_mixed(strategy: Strategy) -> Strategy:
    """The strategy with the methods that ``mixed_parallel`` and its other names stand for, where it has them.

    Raises:
        StrategyError: When such a name has no mesh, or two.
    """
    if all(isinstance(method, Method) for method in strategy.methods):
        return strategy
    from meshwright.methods import mixed_parallel

    return mixed_parallel.without_mixed(strategy)


def check_units(resolved: Resolved, model: nn.Module) -> None:
    """Refuses what a sharding method would refuse of a model, before there is a job; nothing without such a method.

    Raises:
        ModelError: As the method's ``check`` does.
    """
    for method in resolved.strategy.methods if resolved.shard_axis is not None else ():
        if isinstance(method, Method) and method.shards:
            from meshwright.methods.zero.units import units_of

            units_of(cast("ZeroMethod", method), model, resolved.strategy, dict(resolved.axes))


def in_phase_order(strategy: Strategy) -> list[Method]:
    """The methods in the order in which they are applied."""
    return sorted((method for method in strategy.methods if isinstance(method, Method)), key=lambda m: m.phase)


def check_strategy(job: Job) -> None:
    """Asks every method of ``job.strategy`` whether it can be applied; changes nothing.

    Raises:
        MeshwrightError: From a method's ``check``, on every rank.
    """
    with same_on_every_rank():
        job.replacement = replacement_of(job.strategy, job.model, job.axes, job.device)
        with job.replacement.tried(job.model):  # the model that the methods will find
            for method in in_phase_order(job.strategy):
                method.check(job)


def apply_strategy(job: Job) -> None:
    """Applies every method of ``job.strategy``, which :func:`check_strategy` has found right, phase by phase."""
    methods, hooks = in_phase_order(job.strategy), GradientHooks(job.model)
    if job.shard_axis is None and job.size("tensor") == job.size("pipeline") == job.size("expert") == 1:
        job.model.to(job.device)  # a method that splits moves it part by part: whole, it may not fit
    for method in methods:
        if method.phase < Phase.REPLICATE:
            method.apply(job)
    if job.pipeline is None:
        replicate(job)
    else:
        from meshwright.methods.pipeline.finish import finish_pipeline

        finish_pipeline(job, job.pipeline)
    if job.experts is not None:
        job.stages = job.experts.stages(job.model, job.device)
    for method in methods:
        if method.phase > Phase.REPLICATE:
            method.apply(job)
    hooks.carry_over(job.model)
    tell_parameters(job)
    refuse_own_saving(job)


def cost_of(strategy: Strategy, step: Step, *, first: Phase = Phase.MESH, before: Phase | None = None) -> Step:
    """Twin of :func:`apply_strategy` on a simulated step.

    Args:
        strategy: Resolved.
        step: Before the methods of the phase ``first``.
        first: Where to begin.
        before: Where to end; None: all phases.
    """
    methods = in_phase_order(strategy)
    for phase in Phase:
        if phase < first or (before is not None and phase >= before):
            continue
        for method in methods:
            if method.phase == phase:
                step = method.cost(step)
        if phase == Phase.REPLICATE:
            step = replicate_cost(step)
    return step
