"""BMTrain's ``debug``: a dict of the process for values to look at later."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

_values: dict[str, Any] = {}


def clear(key: str | None = None) -> None:
    """Forget one value, or all of them."""
    if key is None:
        _values.clear()
    else:
        _values.pop(key, None)


def set(key: str, value: Any) -> None:
    """Store a value under a name in place of the one before; a tensor detached, on the CPU."""
    _values[key] = value.detach().cpu() if isinstance(value, torch.Tensor) else value


def get(key: str, default: Any = None) -> Any:
    """Return the value of a name, or ``default``."""
    return _values.get(key, default)


def append(key: str, value: Any) -> None:
    """Append a value, as it is, to the list of a name."""
    _values.setdefault(key, []).append(value)


def extend(key: str, value: Iterable[Any]) -> None:
    """Append several values, as they are, to the list of a name."""
    _values.setdefault(key, []).extend(value)
