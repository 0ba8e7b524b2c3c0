"""Class references in configs: users write classes or names, strategies keep qualified names."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

from meshwright.nn import class_name


def _to_names(value: Any) -> Any:
    """A class, a name, or a tuple, list or set of them -> a tuple of names."""
    if value is None:
        return None
    listed = [value] if isinstance(value, str | type) else value
    if not isinstance(listed, tuple | list | set | frozenset):
        return value
    names = [class_name(item) if isinstance(item, type) else item for item in listed]
    return sorted(names) if isinstance(listed, set | frozenset) else names


ClassReferences = Annotated[tuple[str, ...], BeforeValidator(_to_names)]
"""Classes or class names, bare or qualified, stored as names."""
