"""One call of an aten operator as the kernel that it launches: its dims, or the bytes that it moves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_leaves

from meshwright.cost import Op
from meshwright.planner.profile.recurrent import RECURRENT, recurrent_products

_Dtype = Literal["fp32", "half"]
_HALF = (torch.float16, torch.bfloat16)

# Calls that launch nothing, beside those that return views.
_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh"}
# These read as many elements of their first argument as they return, however large it is.
_PICKING = {"embedding", "gather", "index", "index_select", "_unsafe_index", "nll_loss_forward"}
# What takes a CPU longer than the bytes: times as long as a normalisation (see ``Constants.function_s``).
_FUNCTIONS = {
    "gelu": 1, "gelu_backward": 1, "native_layer_norm": 1, "native_layer_norm_backward": 1, "_fused_rms_norm": 1,
    "_fused_rms_norm_backward": 1, "native_batch_norm": 1, "_softmax": 1, "_softmax_backward_data": 1,
    "_log_softmax": 1, "_log_softmax_backward_data": 1, "silu": 1, "silu_backward": 1, "sigmoid": 1, "tanh": 1,
    "exp": 1, "log": 1, "erf": 1, "sin": 1, "cos": 1, "native_dropout": 1, "bernoulli": 1, "normal": 1,
}  # fmt: skip
_TANH_GELU = 3  # 2 to 5 by the CPU
# Written, not read.
_FILLING = {"zero_", "fill_", "normal_", "uniform_", "bernoulli_", "copy_"}


def kernels_of(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> tuple[Op, ...]:
    """The kernels of one operator call, as ops of forward; none for views and for what only allocates.

    A product is told by its dims (of a convolution: those of the product that it is), fused attention by its queries,
    keys and width, and everything else by the bytes of its arguments and results: each is read or written once, and
    what is broadcast is read once.

    Args:
        function: The operator's overload, as a dispatch mode is given it.
        args: Of the call.
        kwargs: Of the call.
        result: What it returned.
    """
    name = function._schema.name.split("::")[1]
    if name in _PRODUCTS:
        return _PRODUCTS[name](args)
    if name in RECURRENT:
        return tuple(op for dims in recurrent_products(name, args) for op in _product(*dims, args[0]))
    if name.startswith("_scaled_dot_product") or name in ("_flash_attention_forward", "_efficient_attention_forward"):
        return _attention(function, args, kwargs)
    if name in _FREE or function.is_view or function.namespace == "prim":
        return ()
    moved = _moved_bytes(name, args, kwargs, result)
    if not moved:
        return ()
    times = _TANH_GELU if kwargs.get("approximate") == "tanh" else _FUNCTIONS.get(name.removesuffix("_"), 0)
    functions = times * max((t.numel() for t in _tensors((args, result))), default=0)
    return (Op("move", num_bytes=moved, functions=int(functions), moment="forward"),)


def dtype_of(tensor: torch.Tensor) -> _Dtype:
    """In what a product of such tensors runs."""
    return "half" if tensor.dtype in _HALF or tensor.element_size() == 1 else "fp32"


def _product(m: int, n: int, k: int, batch: int, of: torch.Tensor) -> tuple[Op, ...]:
    return (Op("matmul", int(m), int(n), int(k), int(batch), dtype=dtype_of(of), moment="forward"),)


def _mm(args: tuple[Any, ...]) -> tuple[Op, ...]:
    left, right = args[0], args[1]
    return _product(left.shape[0], right.shape[1], left.shape[1], 1, left)


def _bmm(args: tuple[Any, ...]) -> tuple[Op, ...]:
    left, right = args[0], args[1]
    return _product(left.shape[1], right.shape[2], left.shape[2], left.shape[0], left)


def _grouped_mm(args: tuple[Any, ...]) -> tuple[Op, ...]:
    """Rows that are dealt out to groups (of the gradient of the weights: the inner dim is): as if all had as many."""
    left, right = args[0], args[1]
    if left.dim() == right.dim() == 3:
        return _bmm(args)
    if left.dim() == right.dim() == 2:
        groups = args[2].shape[0]
        dealt, apart = _dealt(left.shape[1], groups)
        return _product(left.shape[0], right.shape[1], dealt, apart, left)
    rows, apart = _dealt(left.shape[0], right.shape[0])
    return _product(rows, right.shape[2], left.shape[1], apart, left)


def _dealt(rows: int, groups: int) -> tuple[int, int]:
    """Rows of a group and groups; all rows as one where they are no multiple."""
    return (rows, 1) if rows % groups else (rows // groups, groups)


def _grouped_mm_backward(args: tuple[Any, ...]) -> tuple[Op, ...]:
    """Of transformers' own grouped product: gradients of the rows ``[S, in]`` and of the weights ``[E, in, out]``."""
    left, right = args[0], args[1]
    rows, apart = _dealt(left.shape[0], right.shape[0])
    return (
        *_product(rows, right.shape[1], right.shape[2], apart, left),
        *_product(right.shape[1], right.shape[2], rows, apart, left),
    )


def _convolution(args: tuple[Any, ...]) -> tuple[Op, ...]:
    features, weight, transposed, groups = args[0], args[1], args[6], args[8]
    return _as_product(features.shape, weight, transposed, groups, *_convolved(args))


def _convolved(args: tuple[Any, ...]) -> tuple[int]:
    features, weight, stride, padding, dilation = args[0], args[1], args[3], args[4], args[5]
    if args[6]:  # transposed: every element of the input meets the whole filter
        return (math.prod(features.shape[2:]),)
    sizes = zip(features.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    return (math.prod((size + 2 * pad - wide * (width - 1) - 1) // step + 1 for size, width, step, pad, wide in sizes),)


def _as_product(shape: Any, weight: torch.Tensor, transposed: bool, groups: int, places: int) -> tuple[Op, ...]:
    filter_size = math.prod(weight.shape[2:])
    inside, outside = (weight.shape[0] // groups, weight.shape[1]) if transposed else (weight.shape[1], 0)
    outside = outside or weight.shape[0] // groups
    return _product(shape[0] * places, outside, inside * filter_size, groups, weight)


def _convolution_backward(args: tuple[Any, ...]) -> tuple[Op, ...]:
    """One product for the gradient of the input, one for that of the weight, each as large as forward's."""
    gradient, features, weight, transposed, groups, wanted = args[0], args[1], args[2], args[7], args[9], args[10]
    places = math.prod((features if transposed else gradient).shape[2:])
    return _as_product(features.shape, weight, transposed, groups, places) * (bool(wanted[0]) + bool(wanted[1]))


_PRODUCTS: dict[str, Callable[[tuple[Any, ...]], tuple[Op, ...]]] = {
    "mm": _mm,
    "addmm": lambda args: _mm(args[1:]),
    "bmm": _bmm,
    "baddbmm": lambda args: _bmm(args[1:]),
    "_scaled_mm": _mm,
    "_grouped_mm": _grouped_mm,
    "grouped_mm_fallback": _grouped_mm,
    "grouped_mm_fallback_backward": _grouped_mm_backward,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
}


def _attention(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Op, ...]:
    """Queries ``[samples, heads, m, width]`` over ``n`` keys; its backward is an op of backward."""
    given = dict(zip((argument.name for argument in function._schema.arguments), args, strict=False)) | dict(kwargs)
    query, key, value = given["query"], given["key"], given["value"]
    samples, heads, m, width = query.shape
    name = function._schema.name
    if "_attention_forward" in name:  # [samples, m, heads, width] here
        heads, m = m, heads
    n = key.shape[-3] if "_attention_forward" in name else key.shape[-2]
    return (
        Op(
            "attention",
            int(m),
            int(n),
            (int(width) + int(value.shape[-1])) // 2,
            int(samples * heads),
            dtype=dtype_of(query),
            causal=bool(given.get("is_causal", False)),
            moment="backward" if "backward" in name else "forward",
        ),
    )


def _moved_bytes(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    made = _tensors(result)
    written = sum(map(tensor_bytes, made))
    if name in _FILLING:
        read = sum(map(tensor_bytes, _tensors((args[1:], kwargs))))
    elif name in _PICKING:
        read = sum(map(tensor_bytes, _tensors((args[1:], kwargs)))) + written
    else:
        read = sum(map(tensor_bytes, _tensors((args, kwargs))))
    return read + written


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of its elements in memory: those that are broadcast count once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return int(math.prod(sizes)) * tensor.element_size()
