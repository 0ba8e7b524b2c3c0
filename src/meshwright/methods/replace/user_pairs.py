"""Exchanging the modules of registered pairs."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from meshwright.errors import ModelError
from meshwright.methods.replace.build import build_target
from meshwright.methods.replace.changes import Replacement, Swap
from meshwright.methods.replace.pairs import Pair
from meshwright.nn import outermost


def replace_pairs(model: nn.Module, pairs: Iterable[Pair], dtype: str, into: Replacement) -> None:
    """Adds the exchange of every module whose class is exactly the source of a pair.

    A module that an earlier pair replaces is not replaced again, and neither is one inside it.

    Raises:
        ModelError: When a target cannot be made, would break a tie, or the model itself is a source.
    """
    taken: list[tuple[str, nn.Module]] = []
    for pair in pairs:
        if dtype not in pair.dtypes:
            into.left.append(f"{pair.name}: computes in {', '.join(sorted(pair.dtypes))}, and the job in {dtype}")
            continue
        found = [(p, m) for p, m in model.named_modules(remove_duplicate=False) if _is_of(m, pair.old)]
        if any(not path for path, _ in found):
            raise ModelError(
                f"module_replace: the model itself is the {pair.old.__name__} of the pair {pair.name!r}",
                expected="modules inside the model",
                got=type(model).__name__,
                fix="build the model with the other class",
            )
        own = {path for path, _ in outermost([*found, *taken])} - {path for path, _ in taken}
        found = [(path, module) for path, module in found if path in own]
        if not found:
            into.left.append(f"{pair.name}: the model has no {pair.old.__name__}")
            continue
        new_of: dict[nn.Module, nn.Module] = {}
        for path, module in found:
            if module not in new_of:
                new_of[module] = build_target(pair, module, path)
        _check_ties(model, pair, new_of)
        taken += found
        into.add(
            f"{pair.name}: {len(new_of)} modules {pair.old.__name__} -> {pair.new.__name__}", [Swap(new_of)]
        )  # fmt: skip


def _is_of(module: nn.Module, cls: type[nn.Module]) -> bool:
    return type(module) is cls


def _check_ties(model: nn.Module, pair: Pair, new_of: dict[nn.Module, nn.Module]) -> None:
    """Refuses targets that have made a weight anew of one that is also elsewhere in the model."""
    inside = {id(m) for old in new_of for m in old.modules()}
    outside = {id(p) for m in model.modules() if id(m) not in inside for p in m._parameters.values() if p is not None}
    for old, new in new_of.items():
        kept = {id(parameter) for parameter in new.parameters()}
        for name, parameter in old.named_parameters():
            if id(parameter) in outside and id(parameter) not in kept:
                raise ModelError(
                    f"module_replace: a {pair.new.__name__} in the place of a {pair.old.__name__} would train a copy "
                    "of a weight that is tied to another module",
                    expected=f"the parameter itself in the {pair.new.__name__}",
                    got=f"other values, or another name or shape, for {name}",
                    fix="let the target hold the source's parameter, or exclude the pair",
                )
