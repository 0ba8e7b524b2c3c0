"""Apply a caller's search constraints: methods to include, with keys of their configs, and methods to exclude."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from meshwright.errors import StrategyError, did_you_mean, join_names
from meshwright.methods import Method, Phase, Role
from meshwright.methods.composition import conflicts_of, sentence, without_mixed
from meshwright.planner.search.search_space import Choice, Space, choices, divisors_of, offloads, role_of
from meshwright.strategy import MethodConfig, Strategy, parse_method
from meshwright.strategy.value import METHOD_CONFIGS

Included = Mapping[str, MethodConfig]
"""The methods that every candidate must have, by name; the keys that their configs set are the caller's."""


def read_constraints(excluded: Sequence[str], included: Sequence[Any]) -> Included:
    """Read the methods to include, and refuse unknown names and constraints that contradict each other.

    Raises:
        StrategyError: Naming the methods.
    """
    for option, names in (("excluded", excluded), ("included", [name for name in included if isinstance(name, str)])):
        for name in names:
            if not isinstance(name, str) or name not in METHOD_CONFIGS:
                raise StrategyError(
                    f"{option} names an unknown method {name!r}{did_you_mean(str(name), METHOD_CONFIGS)}",
                    expected=f"names from {join_names(METHOD_CONFIGS, 40)}",
                    got=repr(name),
                    fix="correct the name; meshwright methods lists them",
                )
    required = without_mixed(Strategy(list(dict.fromkeys(map(_read_included, included)))))
    both = sorted(set(excluded) & set(required.names))
    if both:
        raise StrategyError(
            "Methods are included and excluded at once",
            expected="every method in one of the two",
            got=join_names(both),
            fix="take them out of one of the two",
        )
    _check_compatible(required)
    return dict(required)


def _read_included(item: Any) -> MethodConfig:
    """Read one method. A name alone sets no keys, not even those that it stands for in a strategy."""
    config = parse_method(item)
    return type(config).model_construct(_fields_set=set(), **dict(config)) if isinstance(item, str) else config


def _check_compatible(required: Strategy) -> None:
    methods = [method for method in required.methods if isinstance(method, Method)]
    for own, other in itertools.permutations(methods, 2):
        for conflict in own.conflicts:
            if conflict.other == other.method_name and not conflict.own_keys and not conflict.other_keys:
                raise StrategyError(
                    f"included methods cannot be together: {sentence(own.method_name, conflict)}",
                    expected="one of the two",
                    got=f"{own.method_name} and {other.method_name}",
                    fix=conflict.fix,
                )


def as_devices_have(config: MethodConfig, half_dtype: str) -> MethodConfig:
    """Return a config in the half precision of the devices, where it lowers the precision and names none.

    A method named in a strategy means fp16, as in ATorch; included in a search, it means what the devices have.
    """
    return config.on_half(half_dtype) if isinstance(config, Method) else config


def names_role(role: Role, names: Collection[str]) -> bool:
    """Return whether one of the methods named answers a decision of the search."""
    return any(getattr(METHOD_CONFIGS[name], "role", None) is role for name in names)


def left_to_search(method: MethodConfig, space: Space) -> MethodConfig:
    """Return a method without the keys that a search of this space decides."""
    every = itertools.chain(space.recompute, offloads(), *space.axis_methods.values())
    own = (each for each in itertools.chain.from_iterable(every) if each.method_name == method.method_name)
    decided = {key for each in own for key in each.model_fields_set}
    return type(method).parse({key: value for key, value in _own_keys(method).items() if key not in decided})


def constrained(space: Space, excluded: Sequence[str], included: Included, world: int, node: int) -> Space:
    """Return the part of a space that satisfies a caller's constraints.

    Raises:
        StrategyError: When nothing is left.
    """
    required = {name: as_devices_have(method, space.half_dtype) for name, method in included.items()}
    lowering = tuple(required[name] for name in sorted(required) if role_of(required[name]) is Role.PRECISION)
    # Where both methods of half precision are included, one changes nothing, or the law refuses them.
    space = space.replace(precision=(lowering,)) if lowering else space
    for method in required.values():
        space = _including(space, method, world, node)
    space = space.replace(kernels=_beside(required, space.kernels))
    for name in excluded:
        space = _excluding(space, name)
    kinds = {
        "sharding": space.sharding,
        "precision": space.precision,
        "recomputation": space.recompute,
        "offloading": space.offload,
        "loss": space.loss,
        "kernels": space.kernels,
        **space.sizes,
    }
    empty = [kind for kind, options in kinds.items() if not options]
    if empty or any(_names_mesh(METHOD_CONFIGS[name]) for name in excluded):
        raise StrategyError(
            "No strategy is left to choose from",
            expected="at least one candidate",
            got=f"excluded={list(excluded)}, included={[*map(str, included.values())]}"
            + (f": no {join_names(empty)}" if empty else ""),
            fix="exclude or include fewer methods, or name a strategy yourself",
        )
    return space


def _including(space: Space, method: MethodConfig, world: int, node: int) -> Space:
    axis, role = getattr(method, "axis", None), role_of(method)
    if _names_mesh(type(method)):
        return _on_mesh(space, dict(method.axes))  # type: ignore[attr-defined]
    if axis is not None:
        return _on_axis(space, method, axis, world, node)
    if role is Role.SHARDING:
        return space.replace(sharding=_with_callers_keys(space.sharding, method))
    if role is Role.RECOMPUTATION:
        return space.replace(recompute=_with_callers_keys(space.recompute, method))
    if role is Role.OFFLOADING:
        options = offloads() if space.offload == ((),) else space.offload
        return space.replace(offload=_with_callers_keys(options, method))
    if role is Role.KERNELS:
        return space.replace(kernels=_with_callers_keys(space.kernels, method))
    if role is Role.PRECISION:
        return space
    if role is Role.LOSS and _own_keys(method):
        space = space.replace(loss=((),))  # it is as the caller says
    elif role is Role.LOSS:  # by its name alone: with the keys that are tried, or without any
        return space.replace(loss=tuple(dict.fromkeys([*_with_callers_keys(space.loss, method), *choices(method)])))
    space = _with_micro_batches(space, method)
    return space.replace(extra=(*space.extra, method))


def _beside(required: Included, kernels: tuple[Choice, ...]) -> tuple[Choice, ...]:
    """Return the kernels that go together with what is included, where these themselves are not."""
    methods = [method for method in required.values() if isinstance(method, Method)]
    if any(role_of(method) is Role.KERNELS for method in methods):
        return kernels
    every = ((option, [*methods, *(each for each in option if isinstance(each, Method))]) for option in kernels)
    return tuple(option for option, together in every if not option or next(conflicts_of(together, {}), None) is None)


def _names_mesh(method: type[MethodConfig]) -> bool:
    return issubclass(method, Method) and method.phase == Phase.MESH


def _with_micro_batches(space: Space, method: MethodConfig) -> Space:
    """Return the space with the number of micro-batches that a method names, where the search may choose it."""
    count = method.asked_micro_batches if isinstance(method, Method) else None
    return space if count is None or space.micro_batches is not None else space.replace(micro_batches=(count,))


def _on_mesh(space: Space, axes: dict[str, int]) -> Space:
    """Return the space with the sizes of the axes named, in which no others divide layers or samples.

    How data-parallel ranks are grouped stays open.
    """
    if not axes:
        return space
    named = {axis: size for axis, size in axes.items() if axis not in ("data", "zero")}
    return space.replace(sizes={axis: (named.get(axis, 1),) for axis in (*space.sizes, *named)})


def _on_axis(space: Space, method: MethodConfig, axis: str, world: int, node: int) -> Space:
    # Replicas that synchronise rarely are whole nodes, where there are several.
    usual = divisors_of(world // node if axis == "replica" and world > node else world)
    space = _with_micro_batches(space, method)
    return space.replace(
        sizes={**space.sizes, axis: tuple(size for size in space.sizes.get(axis, usual) if size > 1)},
        axis_methods={**space.axis_methods, axis: _with_callers_keys(space.axis_methods.get(axis, ()), method)},
    )


def _with_callers_keys(options: tuple[Choice, ...], method: MethodConfig) -> tuple[Choice, ...]:
    """Return the options that are a method, each with the caller's keys; options that become equal are tried once."""
    found: dict[MethodConfig, None] = {}
    for option in itertools.chain.from_iterable(options):
        if option.method_name == method.method_name:
            with contextlib.suppress(StrategyError):  # keys that exclude each other, such as every and memory_budget
                found[type(option).parse(_own_keys(option) | _own_keys(method))] = None
    return choices(*(found or [method]))


def _own_keys(config: MethodConfig) -> dict[str, Any]:
    return {key: getattr(config, key) for key in config.model_fields_set}


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
        loss=without(space.loss) or ((),),
        kernels=_or_nothing(without(space.kernels), space.kernels),
    )


def _or_nothing(left: tuple[Choice, ...], before: tuple[Choice, ...]) -> tuple[Choice, ...]:
    """Return the options left, or the option to do nothing, unless the only one had been asked for."""
    return left or (((),) if len(before) > 1 or before == ((),) else ())
