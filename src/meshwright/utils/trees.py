"""Nested containers as batches come in: torch's own, and mappings that torch takes for one piece."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from torch.utils._pytree import SUPPORTED_NODES, tree_leaves, tree_map


def map_tree(function: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """torch's ``tree_map``, which also goes into mappings of other classes, such as transformers' ``BatchEncoding``.

    Args:
        function: Called with every leaf.
        tree: Nested containers; they stay as they are, and their classes are kept.
        is_leaf: What is not gone into, containers included.
    """

    def enter(leaf: Any) -> Any:
        if not _is_closed(leaf) or (is_leaf is not None and is_leaf(leaf)):
            return function(leaf)
        values = {key: map_tree(function, value, is_leaf) for key, value in leaf.items()}
        return _with_values(leaf, values)

    return tree_map(enter, tree, is_leaf=is_leaf)


def leaves_of(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """torch's ``tree_leaves``, which also goes into mappings of other classes."""
    found = []
    for leaf in tree_leaves(tree, is_leaf=is_leaf):
        is_open = _is_closed(leaf) and not (is_leaf is not None and is_leaf(leaf))
        found += leaves_of(dict(leaf), is_leaf) if is_open else [leaf]
    return found


def _is_closed(leaf: Any) -> bool:
    """Whether torch takes this mapping for one piece."""
    return isinstance(leaf, Mapping) and type(leaf) not in SUPPORTED_NODES


def _with_values(mapping: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    if not isinstance(mapping, MutableMapping):
        return values
    changed = copy.copy(mapping)
    for key, value in values.items():
        changed[key] = value
    return changed
