"""The composition law, enforced and listed: which methods a strategy may name together, on which axes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.errors import StrategyError, join_names
from meshwright.methods.base import Method
from meshwright.methods.law import SHARD_AXES, Conflict
from meshwright.strategy import METHOD_CONFIGS, Strategy

_WITHOUT_METHOD = ("data", "zero")  # axes that are no method's own


@dataclass(frozen=True)
class Rule:
    """One conflict of the law, between two methods in the order of their phases."""

    first: str
    second: str
    text: str
    """The sentence that refuses a strategy with both."""
    always: bool
    """Whether they never go together; otherwise under some of their keys."""


def known_methods() -> list[type[Method]]:
    """All methods, in the order in which they are applied."""
    found = [config for config in METHOD_CONFIGS.values() if issubclass(config, Method)]
    return sorted(found, key=lambda method: method.phase)


def method_of_axes() -> dict[str, str]:
    """The method that works on an axis, for axes that are one method's own."""
    return {method.axis: method.method_name for method in known_methods() if method.axis is not None}


def rules() -> list[Rule]:
    """Every conflict of every method."""
    order = [method.method_name for method in known_methods()]
    found: list[Rule] = []
    for method in known_methods():
        for conflict in method.conflicts:
            first, second = sorted((method.method_name, conflict.other), key=order.index)
            always = not conflict.own_keys and not conflict.other_keys
            found.append(Rule(first, second, sentence(method.method_name, conflict), always))
    return found


def sentence(name: str, conflict: Conflict) -> str:
    """What a conflict says, without a full stop."""
    own, other = _with_keys(name, conflict.own_keys), _with_keys(conflict.other, conflict.other_keys)
    return f"{own} does not go together with {other}: {conflict.reason}"


def _with_keys(name: str, keys: str) -> str:
    return f"{name} with {keys}" if keys else name


def check_law(strategy: Strategy, sizes: Mapping[str, int]) -> None:
    """Refuses methods that do not go together, and methods without what they need.

    Args:
        strategy: With every implied method in it.
        sizes: Ranks along every axis of the mesh.

    Raises:
        StrategyError: Naming the methods.
    """
    at_work = [method for method in strategy.methods if isinstance(method, Method) and method.at_work(sizes)]
    for own, other in itertools.permutations(at_work, 2):
        for conflict in own.conflicts:
            if conflict.other == other.method_name and conflict.when(own, other):
                raise StrategyError(
                    sentence(own.method_name, conflict),
                    expected="one of the two"
                    if not (conflict.own_keys or conflict.other_keys)
                    else "other keys, or one of the two",
                    got=f"{own} and {other}",
                    fix=conflict.fix,
                )
    for method in at_work:
        _check_needs(method, strategy)


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
    """Refuses axes that no method works on, and methods without the axis that they work on.

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
    """Refuses a mesh without an axis that parameters can be sharded over.

    Raises:
        StrategyError: Naming the method.
    """
    if axis not in sizes:
        raise StrategyError(
            f"{method} has no mesh axis to shard over",
            expected=f"one of the axes {join_names(SHARD_AXES)}",
            got=str(dict(sizes)),
            fix="add ('parallel_mode', {'zero': …}) to the strategy",
        )
