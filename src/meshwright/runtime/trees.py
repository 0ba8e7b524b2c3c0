"""Nested containers as batches come in: torch's own, and mappings and dataclasses that torch treats as leaves."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from meshwright.runtime.torch_internals.pytree import SUPPORTED_NODES, tree_leaves, tree_map


def map_tree(function: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Map a function over all leaves of nested containers.

    Unlike torch's ``tree_map`` it also goes into other mappings, such as transformers' ``BatchEncoding``, and into
    dataclasses. A container in which nothing changes stays the same object.

    Args:
        function: Called with every leaf.
        tree: Nested containers; they are not changed, and their classes are kept.
        is_leaf: Whether a container counts as a leaf.
    """

    def enter(leaf: Any) -> Any:
        if not _is_closed(leaf) or (is_leaf is not None and is_leaf(leaf)):
            return function(leaf)
        before = _values_of(leaf)
        values = {key: map_tree(function, value, is_leaf) for key, value in before.items()}
        return _with_values(leaf, values, is_same=all(values[key] is before[key] for key in before))

    return tree_map(enter, tree, is_leaf=is_leaf)


def leaves_of(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """Return all leaves, as torch's ``tree_leaves`` does, including those of other mappings and dataclasses."""
    found = []
    for leaf in tree_leaves(tree, is_leaf=is_leaf):
        is_open = _is_closed(leaf) and not (is_leaf is not None and is_leaf(leaf))
        found += leaves_of(_values_of(leaf), is_leaf) if is_open else [leaf]
    return found


def _is_closed(leaf: Any) -> bool:
    """Return whether torch treats this mapping or instance of a dataclass as a leaf."""
    return (isinstance(leaf, Mapping) or _is_dataclass(leaf)) and type(leaf) not in SUPPORTED_NODES


def _is_dataclass(leaf: Any) -> bool:
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type | Mapping)


def _values_of(leaf: Any) -> dict[Any, Any]:
    if not _is_dataclass(leaf):
        return dict(leaf)
    return {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf) if hasattr(leaf, field.name)}


def _with_values(mapping: Any, values: dict[Any, Any], is_same: bool) -> Any:
    if _is_dataclass(mapping):
        # It may be a state that is changed in place, or settings.
        if is_same:
            return mapping
        changed = copy.copy(mapping)
        for key, value in values.items():
            # Frozen dataclasses, too.
            object.__setattr__(changed, key, value)
        return changed
    if not isinstance(mapping, MutableMapping):
        return values
    changed = copy.copy(mapping)
    for key, value in values.items():
        changed[key] = value
    return changed
