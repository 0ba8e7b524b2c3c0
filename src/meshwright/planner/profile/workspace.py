"""What operators save whose size tensors without data do not tell, or tell wrongly."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

_MOST_PRODUCTS = 2**28  # of a real call: some hundredths of a second

_Key = tuple[tuple[torch.Size | None, ...], torch.dtype, tuple[Any, ...]]


def with_workspace(func: Any, args: tuple[Any, ...], result: Any) -> Any:
    """The result of an operator without data, with as many bytes as one with data would save.

    On CPUs ``nn.LSTM`` runs layer by layer through oneDNN, and what backward needs is a buffer that only oneDNN can
    size: it is asked for by a real call on zeros.

    Args:
        func: The operator.
        args: Its arguments.
        result: What it returned for tensors without data.
    """
    if func is torch.ops.aten._embedding_bag.default:
        return _without_map(args, result)
    if func is not torch.ops.aten.mkldnn_rnn_layer.default or not args[-1]:  # only training saves
        return result
    shapes = tuple(each.shape if isinstance(each, torch.Tensor) else None for each in args[:7])
    others = tuple(tuple(each) if isinstance(each, list) else each for each in args[7:])
    return (*result[:3], result[3].new_empty(_workspace_bytes((shapes, args[0].dtype, others))))


def _without_map(args: tuple[Any, ...], result: Any) -> Any:
    """Sums of bags on CPUs need no map from indices to bags; torch's rule for bf16 without data says they do."""
    weight, given = args[0], dict(enumerate(args))  # defaults at the end are left out
    mode, weights, padding = given.get(4, 0), given.get(6), given.get(8, -1)
    is_plain = weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and weight.stride(1) == 1
    if not is_plain or mode != 0 or padding >= 0 or (weights is not None and weights.stride(0) != 1):
        return result
    return (result[0], result[1].new_empty(0), *result[2:])


@functools.lru_cache(maxsize=256)
def _workspace_bytes(key: _Key) -> int:
    """Long sequences are continued from short ones: each token takes as much, but for rounding to pages."""
    (given, *weights, state, cell), dtype, others = key
    assert given is not None
    length, samples, width = given
    hidden = others[3]
    products = 4 * hidden * (width + hidden)  # of one token of one sample
    few = min(samples, max(_MOST_PRODUCTS // max(products, 1), 1))
    short = max(_MOST_PRODUCTS // max(few * products, 1), 1)

    def called(tokens: int) -> int:
        states = (torch.Size((few, *each[1:])) if each is not None else None for each in (state, cell))
        shapes = (torch.Size((tokens, few, width)), *weights, *states)
        return _called((shapes, dtype, others)) * samples // max(few, 1)

    if length <= 2 * short:
        return called(length)
    one, two = called(short), called(2 * short)
    return two + (two - one) * (length - 2 * short) // short


def _called(key: _Key) -> int:
    shapes, dtype, others = key
    with _disable_current_modes(), torch.enable_grad():  # it saves nothing without
        zeros = [torch.zeros(shape, dtype=dtype) if shape is not None else None for shape in shapes]
        listed = [list(each) if isinstance(each, tuple) else each for each in others]
        workspace = torch.ops.aten.mkldnn_rnn_layer.default(*zeros, *listed)[3]
    return int(workspace.numel())
