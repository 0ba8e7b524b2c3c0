"""Python values as JSON and back, exactly: what a scheduler or an optimizer keeps beside tensors.

JSON has no tuples and no integer keys, but ``MultiStepLR`` keeps a ``Counter`` of steps: such values are tagged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from meshwright.errors import CheckpointError

_TUPLE, _ITEMS, _COUNTER, _TENSOR = "__tuple__", "__items__", "__counter__", "__tensor__"


def to_plain(value: Any, where: str) -> Any:
    """Turns a value into JSON types.

    Args:
        value: None, bool, number, string, one-element tensor, or a list, tuple, mapping or Counter of these.
        where: What the value is, for the error.

    Raises:
        CheckpointError: When something in it cannot be kept without pickle.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [to_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return {_TUPLE: [to_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]}
    if isinstance(value, Mapping):
        return _mapping_to_plain(value, where)
    if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.numel() == 1:
        return {_TENSOR: value.tolist(), "dtype": dtype_name(value.dtype)}
    raise CheckpointError(
        f"{where} cannot be stored in a checkpoint",
        expected="numbers, strings, one-element tensors, and lists, tuples or dictionaries of them (never pickle)",
        got=f"{type(value).__module__}.{type(value).__qualname__}",
        fix="keep it as a tensor of the model or the optimizer, or turn it into plain values",
    )


def _mapping_to_plain(value: Mapping[Any, Any], where: str) -> dict[str, Any]:
    pairs = [(key, to_plain(item, f"{where}[{key!r}]")) for key, item in value.items()]
    if isinstance(value, Counter):
        return {_COUNTER: [[to_plain(key, where), item] for key, item in pairs]}
    if all(isinstance(key, str) and not key.startswith("__") for key, _ in pairs):
        return dict(pairs)
    return {_ITEMS: [[to_plain(key, where), item] for key, item in pairs]}


def from_plain(value: Any) -> Any:
    """The value that :func:`to_plain` turned into JSON types.

    Raises:
        Exception: KeyError, TypeError, ValueError or AttributeError, for what no value was turned into.
    """
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TUPLE in value:
        return tuple(from_plain(item) for item in value[_TUPLE])
    if _COUNTER in value:
        return Counter({from_plain(key): from_plain(item) for key, item in value[_COUNTER]})
    if _ITEMS in value:
        return {from_plain(key): from_plain(item) for key, item in value[_ITEMS]}
    if _TENSOR in value:
        try:
            return torch.tensor(value[_TENSOR], dtype=dtype_named(value["dtype"]))
        except (OverflowError, RuntimeError) as error:  # a number that the type cannot hold
            raise ValueError(str(error)) from None
    return {key: from_plain(item) for key, item in value.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The dtype of a name that :func:`dtype_name` gave.

    Raises:
        CheckpointError: When this torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"The checkpoint holds tensors of the unknown type {name!r}", fix="load it with the torch that wrote it"
        )
    return dtype
