"""Methods that a caller includes, by name or with keys of their configs, or excludes by name."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.errors import StrategyError, did_you_mean, join_names
from meshwright.methods import Method
from meshwright.methods.compatibility import sentence
from meshwright.methods.composition import without_mixed
from meshwright.strategy import METHOD_CONFIGS, MethodConfig, Strategy, parse_method

HALF = ("amp_native", "half")
"""Methods that lower the precision: by themselves to fp16, as the seed; included by name, to what the devices have."""


Wishes = Mapping[str, MethodConfig]
"""The methods that every candidate has, by name; the keys that their configs set are the caller's."""


def read_wishes(excluded: Sequence[str], included: Sequence[Any]) -> Wishes:
    """Reads what is included as a strategy is read; refuses unknown names, and wishes that contradict each other.

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
    """What one item asks for. A name alone sets no keys, not those either that stand for it in a strategy."""
    config = parse_method(item)
    return type(config).model_construct(_fields_set=set(), **dict(config)) if isinstance(item, str) else config


def as_devices_have(config: MethodConfig, half_dtype: str) -> MethodConfig:
    """The config, in the half precision of the devices where it lowers the precision and names none."""
    if config.method_name not in HALF or "dtype" in config.model_fields_set:
        return config
    return with_keys(config, {"dtype": half_dtype})


def own_keys(config: MethodConfig) -> dict[str, Any]:
    """The keys that whoever wrote the config has set."""
    return {key: getattr(config, key) for key in config.model_fields_set}


def with_keys(config: MethodConfig, keys: Mapping[str, Any]) -> MethodConfig:
    """The config with some keys set.

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
