"""Apply a caller's search constraints: methods to include, with keys of their configs, and methods to exclude."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.errors import StrategyError, did_you_mean, join_names
from meshwright.methods import Method
from meshwright.methods.composition import sentence, without_mixed
from meshwright.planner.search.search_space import Choice, Space, choices, divisors_of, offloads
from meshwright.strategy import MethodConfig, Strategy, parse_method
from meshwright.strategy.method_config import METHOD_CONFIGS

HALF = ("amp_native", "half")
"""Methods that lower the precision: by themselves to fp16, as the seed; included by name, to what the devices have."""


Wishes = Mapping[str, MethodConfig]
"""The methods that every candidate has, by name; the keys that their configs set are the caller's."""


def read_constraints(excluded: Sequence[str], included: Sequence[Any]) -> Wishes:
    """Read what is included as a strategy is read; refuse unknown names, and wishes that contradict each other.

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
    wished = without_mixed(Strategy(list(dict.fromkeys(map(_wish, included)))))
    both = sorted(set(excluded) & set(wished.names))
    if both:
        raise StrategyError(
            "Methods are included and excluded at once",
            expected="every method in one of the two",
            got=join_names(both),
            fix="take them out of one of the two",
        )
    _check_together(wished)
    return dict(wished)


def _wish(item: Any) -> MethodConfig:
    """Return what one item asks for. A name alone sets no keys, not those either that stand for it in a strategy."""
    config = parse_method(item)
    return type(config).model_construct(_fields_set=set(), **dict(config)) if isinstance(item, str) else config


def as_devices_have(config: MethodConfig, half_dtype: str) -> MethodConfig:
    """Return the config, in the half precision of the devices where it lowers the precision and names none."""
    if config.method_name not in HALF or "dtype" in config.model_fields_set:
        return config
    return with_keys(config, {"dtype": half_dtype})


def own_keys(config: MethodConfig) -> dict[str, Any]:
    """Return the keys that whoever wrote the config has set."""
    return {key: getattr(config, key) for key in config.model_fields_set}


def with_keys(config: MethodConfig, keys: Mapping[str, Any]) -> MethodConfig:
    """Return the config with some keys set.

    Raises:
        StrategyError: Where keys do not go together.
    """
    return type(config).parse(own_keys(config) | dict(keys))


def _check_together(wished: Strategy) -> None:
    methods = [method for method in wished.methods if isinstance(method, Method)]
    for own, other in itertools.permutations(methods, 2):
        for conflict in own.conflicts:
            if conflict.other == other.method_name and not conflict.own_keys and not conflict.other_keys:
                raise StrategyError(
                    f"included methods cannot be together: {sentence(own.method_name, conflict)}",
                    expected="one of the two",
                    got=f"{own.method_name} and {other.method_name}",
                    fix=conflict.fix,
                )


# --- What a caller of a search asks for: methods that every candidate must have, and methods that none may have.

_MESH, _DATA = "parallel_mode", ("data", "zero")


def constrained(space: Space, excluded: Sequence[str], included: Wishes, world: int, node: int) -> Space:
    """Return the part of a space that a caller's wishes leave.

    Raises:
        StrategyError: When nothing is left.
    """
    wishes = {name: as_devices_have(wished, space.half_dtype) for name, wished in included.items()}
    halves = tuple(wishes[name] for name in HALF if name in wishes)
    space = space.replace(precision=(halves,)) if halves else space  # of both one changes nothing, or the law refuses
    for wished in wishes.values():
        space = _including(space, wished, world, node)
    for name in excluded:
        space = _excluding(space, name)
    kinds = {"sharding": space.sharding, "precision": space.precision, "recompute": space.recompute}
    empty = [kind for kind, options in (kinds | {"offload": space.offload}).items() if not options]
    empty += [axis for axis, sizes in space.sizes.items() if not sizes]
    if empty or _MESH in excluded:
        raise StrategyError(
            "No strategy is left to choose from",
            expected="at least one candidate",
            got=f"excluded={list(excluded)}, included={[*map(str, included.values())]}"
            + (f": no {join_names(empty)}" if empty else ""),
            fix="exclude or include fewer methods, or name a strategy yourself",
        )
    return space


def left_to_search(method: MethodConfig, space: Space) -> MethodConfig:
    """Return a method without the keys that a search of this space decides."""
    every = itertools.chain(space.recompute, offloads(), *space.axis_methods.values())
    own = (each for each in itertools.chain.from_iterable(every) if each.method_name == method.method_name)
    decided = {key for each in own for key in each.model_fields_set}
    return type(method).parse({key: value for key, value in own_keys(method).items() if key not in decided})


def _including(space: Space, wished: MethodConfig, world: int, node: int) -> Space:
    name, axis = wished.method_name, getattr(wished, "axis", None)
    if name == _MESH:
        return _on_mesh(space, dict(wished.axes))  # type: ignore[attr-defined]
    if axis is not None:
        return _on_axis(space, wished, axis, world, node)
    if getattr(wished, "shards", False):
        return space.replace(sharding=_wished(space.sharding, wished))
    if name == "checkpoint":
        return space.replace(recompute=_wished(space.recompute, wished))
    if name == "offload":
        return space.replace(offload=_wished(offloads() if space.offload == ((),) else space.offload, wished))
    if name in HALF:
        return space
    count = getattr(wished, "num_micro_batches", None)
    space = _cut_into(space, count) if count is not None else space
    return space.replace(extra=(*space.extra, wished))


def _cut_into(space: Space, count: int) -> Space:
    """Return the number of micro-batches that a method says, where the search may choose it."""
    return space if space.micro_batches is not None else space.replace(micro_batches=(count,))


def _on_mesh(space: Space, axes: dict[str, int]) -> Space:
    """Return the axes that are named keep their sizes, and no others divide layers or samples.

    Data ranks are grouped anew.
    """
    if not axes:
        return space
    named = {axis: size for axis, size in axes.items() if axis not in _DATA}
    return space.replace(sizes={axis: (named.get(axis, 1),) for axis in (*space.sizes, *named)})


def _on_axis(space: Space, wished: MethodConfig, axis: str, world: int, node: int) -> Space:
    # Replicas that synchronise rarely are whole nodes, where there are several.
    usual = {"replica": divisors_of(world // node if world > node else world)}.get(axis, divisors_of(world))
    count = getattr(wished, "num_micro_batches", None)
    space = _cut_into(space, count) if count is not None else space
    sizes = tuple(size for size in space.sizes.get(axis, usual) if size > 1)
    return space.replace(
        sizes={**space.sizes, axis: sizes},
        axis_methods={**space.axis_methods, axis: _wished(space.axis_methods.get(axis, ()), wished)},
    )


def _wished(options: tuple[Choice, ...], wished: MethodConfig) -> tuple[Choice, ...]:
    """Return the options with the method, each with the caller's keys; what this makes equal is tried once."""
    found: dict[MethodConfig, None] = {}
    for method in itertools.chain.from_iterable(options):
        if method.method_name == wished.method_name:
            with contextlib.suppress(StrategyError):  # keys that exclude each other, such as every and memory_budget
                found[with_keys(method, own_keys(wished))] = None
    return choices(*(found or [wished]))


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
