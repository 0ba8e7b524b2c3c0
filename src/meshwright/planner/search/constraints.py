"""What a caller of a search asks for: methods that every candidate must have, and methods that none may have."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.errors import StrategyError, join_names
from meshwright.planner.search.space import Choice, Space, choices, divisors_of, offloads
from meshwright.planner.search.wishes import HALF
from meshwright.strategy import METHOD_CONFIGS

_MESH = "parallel_mode"


def constrained(space: Space, excluded: Sequence[str], included: Sequence[str], world: int, node: int) -> Space:
    """The part of a space that a caller's wishes leave.

    Raises:
        StrategyError: When nothing is left.
    """
    for name in dict.fromkeys(included):
        space = _including(space, name, world, node)
    for name in excluded:
        space = _excluding(space, name)
    kinds = {"sharding": space.sharding, "precision": space.precision, "recompute": space.recompute}
    empty = [kind for kind, options in (kinds | {"offload": space.offload}).items() if not options]
    empty += [axis for axis, sizes in space.sizes.items() if not sizes]
    if empty or _MESH in excluded:
        raise StrategyError(
            "No strategy is left to choose from",
            expected="at least one candidate",
            got=f"excluded={list(excluded)}, included={list(included)}"
            + (f": no {join_names(empty)}" if empty else ""),
            fix="exclude or include fewer methods, or name a strategy yourself",
        )
    return space


def _including(space: Space, name: str, world: int, node: int) -> Space:
    config = METHOD_CONFIGS[name]
    axis = getattr(config, "axis", None)
    if axis is not None:
        return _on_axis(space, name, axis, world, node)
    if getattr(config, "shards", False):
        return space.replace(sharding=_having(space.sharding, name) or choices(name))
    if name == "checkpoint":
        return space.replace(recompute=_having(space.recompute, name) or choices(name))
    if name == "offload":
        return space.replace(offload=_having(space.offload, name) or offloads())
    if name in HALF:
        return space.replace(precision=_having(space.precision, name) or choices((name, space.half_dtype)))
    return space if name == _MESH else space.replace(extra=(*space.extra, *choices(name)[0]))


def _on_axis(space: Space, name: str, axis: str, world: int, node: int) -> Space:
    # Replicas that synchronise rarely are whole nodes, where there are several.
    usual = {"replica": divisors_of(world // node if world > node else world)}.get(axis, divisors_of(world))
    sizes = tuple(size for size in space.sizes.get(axis, usual) if size > 1)
    options = space.axis_methods.get(axis, ()) or choices(name)
    return space.replace(
        sizes={**space.sizes, axis: sizes},
        axis_methods={**space.axis_methods, axis: _having(options, name) or choices(name)},
    )


def _excluding(space: Space, name: str) -> Space:
    def without(options: tuple[Choice, ...]) -> tuple[Choice, ...]:
        return tuple(each for each in options if not any(method.method_name == name for method in each))

    axis_methods = {axis: without(options) for axis, options in space.axis_methods.items()}
    sizes = {
        axis: tuple(size for size in every if size == 1 or axis_methods.get(axis))
        for axis, every in space.sizes.items()
    }
    return space.replace(
        sizes=sizes,
        axis_methods=axis_methods,
        sharding=without(space.sharding),
        precision=without(space.precision) or ((),),
        recompute=_or_nothing(without(space.recompute), space.recompute),
        offload=_or_nothing(without(space.offload), space.offload),
    )


def _or_nothing(left: tuple[Choice, ...], before: tuple[Choice, ...]) -> tuple[Choice, ...]:
    """Without recomputation or offloading one can train, unless one of them had been asked for."""
    return left or (((),) if len(before) > 1 or before == ((),) else ())


def _having(options: tuple[Choice, ...], name: str) -> tuple[Choice, ...]:
    return tuple(each for each in options if any(method.method_name == name for method in each))
