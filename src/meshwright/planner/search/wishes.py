"""Methods that a caller includes or excludes by name."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from meshwright.errors import StrategyError, did_you_mean, join_names
from meshwright.methods import Method
from meshwright.methods.compatibility import sentence
from meshwright.strategy import METHOD_CONFIGS, Strategy

HALF = ("amp_native", "half")
"""Methods that lower the precision: by themselves to fp16, as the seed; included by name, to what the devices have."""


def check_names(excluded: Sequence[str], included: Sequence[str]) -> None:
    """Refuses unknown names, and wishes that contradict each other.

    Raises:
        StrategyError: Naming the methods.
    """
    for option, names in (("excluded", excluded), ("included", included)):
        for name in names:
            if name not in METHOD_CONFIGS:
                raise StrategyError(
                    f"{option} names an unknown method {name!r}{did_you_mean(name, METHOD_CONFIGS)}",
                    expected=f"names from {join_names(METHOD_CONFIGS, 40)}",
                    got=repr(name),
                    fix="correct the name; meshwright methods lists them",
                )
    both = sorted(set(excluded) & set(included))
    if both:
        raise StrategyError(
            "Methods are included and excluded at once",
            expected="every method in one of the two",
            got=join_names(both),
            fix="take them out of one of the two",
        )
    _check_together(included)


def _check_together(included: Sequence[str]) -> None:
    methods = [method for method in Strategy(list(dict.fromkeys(included))).methods if isinstance(method, Method)]
    for own, other in itertools.permutations(methods, 2):
        for conflict in own.conflicts:
            if conflict.other == other.method_name and not conflict.own_keys and not conflict.other_keys:
                raise StrategyError(
                    f"included methods cannot be together: {sentence(own.method_name, conflict)}",
                    expected="one of the two",
                    got=f"{own.method_name} and {other.method_name}",
                    fix=conflict.fix,
                )
