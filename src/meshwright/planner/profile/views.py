"""Views and casts of tensors without data, by torch's kernels for ``meta`` alone: most operators of a pass are such.

``FakeTensorMode`` looks each up in a cache whose keys describe all arguments, which takes four times as long as a
view, and works out in Python what it has not met.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

_aten = torch.ops.aten
_VIEWS = frozenset(
    {
        _aten.alias.default, _aten.detach.default, _aten.expand.default, _aten.permute.default, _aten.select.int,
        _aten.slice.Tensor, _aten.squeeze.dim, _aten.t.default, _aten.transpose.int, _aten.unsqueeze.default,
        _aten.view.default,
    }
)  # fmt: skip
_SIZES = (int, float, bool, type(None))


def view_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FakeTensor | None:
    """What a view of a tensor without data is, as ``FakeTensorMode`` returns it; None where that has to be asked.

    Args:
        func: The operator's overload, as a dispatch mode is given it.
        args: Of the call.
        kwargs: Of the call.
    """
    if func not in _VIEWS or kwargs or type(args[0]) is not FakeTensor or args[0].constant is not None:
        return None
    for each in args[1:]:
        sizes = each if isinstance(each, list | tuple) else (each,)
        if not all(isinstance(size, _SIZES) for size in sizes):
            return None  # of numbers that nobody knows yet
    return _by_kernel(func, args, kwargs)


def cast_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FakeTensor | None:
    """The same of a tensor that is copied into another dtype, on the device where it is."""
    if func is not _aten._to_copy.default or kwargs.keys() != {"dtype"} or type(args[0]) is not FakeTensor:
        return None
    return _by_kernel(func, args, kwargs) if args[0].constant is None else None


def _by_kernel(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FakeTensor:
    seen: FakeTensor = args[0]
    with in_kernel_invocation_manager(seen.fake_mode):
        made = func(*args, **kwargs)
    return FakeTensor(seen.fake_mode, made, seen.fake_device)
