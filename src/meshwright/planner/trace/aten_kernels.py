"""Map aten operators on fake tensors to what a device runs: kernels, FLOPs, moved bytes and workspaces.

This is the lowest file of the trace. It also chooses the device of a pass without data, and corrects what such a pass
would get wrong about the device that the model will train on.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from meshwright.cost import HALF, Op, ProductDtype
from meshwright.methods.planner_hooks import attention_kernel
from meshwright.nn.swapped_parameters import FakeDispatchMode
from meshwright.runtime import imitated_gpu
from meshwright.runtime.torch_internals.fake_tensors import disable_current_modes, is_traceable_wrapper_subclass
from meshwright.runtime.torch_internals.operators import (
    COMPOSITE,
    efficient_attention,
    embedding_bag,
    flash_attention_on_cpu,
    flash_attention_on_cpu_backward,
    has_kernel_for,
    name_of,
    packet_of,
    schema_of,
)
from meshwright.runtime.torch_internals.pytree import tree_leaves
from meshwright.runtime.torch_internals.tensors import storage_identity

# --- FLOPs, by torch's own formulas.


class FlopCount(FakeDispatchMode):
    """Count FLOPs as torch's ``FlopCounterMode`` does, without its records of modules.

    Attributes:
        total: Floating-point operations so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        given = kwargs or {}
        if _is_composite(func):
            with self:
                return func.decompose(*args, **given)
        result = func(*args, **given)
        formula = flop_registry.get(packet_of(func)) or _of_cpu(packet_of(func))
        if formula is not None:
            self.total += formula(*_with_all_heads(func, args), **given, out_val=result)
        else:
            self.total += _flops_of_groups(func, args)
        return result


def _with_all_heads(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of attention with keys and values repeated for all query heads.

    The FLOP formulas of torch 2.11 know no grouped keys and values.
    """
    if "scaled_dot_product" not in name_of(func):
        return args
    sized = [each for each in args if isinstance(each, torch.Tensor) and each.dim() == 4]
    heads = max((each.shape[1] for each in sized), default=0)
    grouped = {id(each) for each in sized if each.shape[1] != heads}
    return tuple(each[:, :1].expand(-1, heads, -1, -1) if id(each) in grouped else each for each in args)


def _of_cpu(operator: Any) -> Callable[..., int] | None:
    """Return the formula of attention on CPUs, which torch's table lacks; it counts all scores as on GPUs."""
    if operator is flash_attention_on_cpu:
        return lambda query, key, value, *_, **__: sdpa_flop_count(query.shape, key.shape, value.shape)
    if operator is flash_attention_on_cpu_backward:
        return lambda gradient, *qkv, **__: sdpa_backward_flop_count(gradient.shape, *(each.shape for each in qkv[:3]))
    return None


def _flops_of_groups(func: Any, args: tuple[Any, ...]) -> int:
    """Return the FLOPs of grouped products, such as those of stacked experts, which torch's table lacks."""
    name = schema_of(func).name.split("::")[1]
    return sum(op.flops for op in _PRODUCTS[name](args)) if "grouped_mm" in name and name in _PRODUCTS else 0


@functools.cache
def _is_composite(func: Any) -> bool:
    """Return whether an operator consists of others, which are counted instead.

    By what runs: torch has decompositions for exports of some that run as one kernel (upsampling to the nearest, batch
    normalisation), and operators of Python alone, such as ``prim::device``, have no kernels at all.
    """
    return func.namespace != "prim" and has_kernel_for(func.name(), COMPOSITE)


# --- Fused recurrent layers as products.

RECURRENT = frozenset({"mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "_cudnn_rnn", "_cudnn_rnn_backward"})


def recurrent_products(name: str, args: tuple[Any, ...]) -> list[tuple[int, int, int, int]]:
    """Return ``(m, n, k, batch)`` of every product of one call of a fused recurrent layer; backward has two for each.

    A layer multiplies its input by ``[gates * hidden, in]`` for all tokens at once, and its state by ``[gates * hidden,
    hidden]`` (a projection: by more) token by token.

    Args:
        name: Operator, one of ``RECURRENT``.
        args: Arguments of the call: tokens ``[length, samples, in]``, then weights.
    """
    found, (length, samples) = [], _length_and_samples(name, args)
    for of_state, weight in _weights(name, args):
        n, k = weight.shape
        rows, times = (samples, length) if of_state else (length * samples, 1)
        found.append((int(rows), int(n), int(k), int(times)))
    return found * (2 if name.endswith("backward") else 1)


def _length_and_samples(name: str, args: tuple[Any, ...]) -> tuple[int, int]:
    given = args[0].shape
    if not name.startswith("_cudnn"):
        return given[0], given[1]
    sizes = args[18 if name.endswith("backward") else 14]
    if sizes:  # packed: how many samples are as long
        return len(sizes), given[0] // len(sizes)
    return (given[1], given[0]) if args[14 if name.endswith("backward") else 10] else (given[0], given[1])


def _weights(name: str, args: tuple[Any, ...]) -> list[tuple[bool, torch.Tensor]]:
    """Return the weight matrices, and whether each multiplies the state."""
    if not name.startswith("_cudnn"):  # one layer in one direction
        return [(False, args[1]), (True, args[2])]
    every, stride = args[1], args[2]
    return [(index % stride > 0, weight) for index, weight in enumerate(every) if weight.dim() == 2]


# --- Kernels of one operator call: the dims of products, the bytes that all others move.

_HALF_DTYPES = (torch.float16, torch.bfloat16)

# Calls that launch nothing, beside those that return views.
_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh"}
# These read as many elements of their first argument as they return, however large it is.
PICKING = {"embedding", "gather", "index", "index_select", "_unsafe_index", "nll_loss_forward"}
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
    """Return the kernels of one operator call as ops of forward; none for views and allocations.

    A product is given by its dims (a convolution by those of its product), fused attention by its queries, keys and
    width, and everything else by the bytes of its arguments and results: each is read or written once, and what is
    broadcast is read once.

    Args:
        function: Overload of the operator, as a dispatch mode gets it.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        result: Result of the call.
    """
    name = schema_of(function).name.split("::")[1]
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
    functions = times * max((t.numel() for t in tensors_in((args, result))), default=0)
    return (Op("move", num_bytes=moved, functions=int(functions), moment="forward"),)


def dtype_of(tensor: torch.Tensor) -> ProductDtype:
    """Return the precision in which products of such tensors run."""
    return HALF if tensor.dtype in _HALF_DTYPES or tensor.element_size() == 1 else "fp32"


def _product(m: int, n: int, k: int, batch: int, of: torch.Tensor) -> tuple[Op, ...]:
    return (Op("matmul", int(m), int(n), int(k), int(batch), dtype=dtype_of(of), moment="forward"),)


def _mm(args: tuple[Any, ...]) -> tuple[Op, ...]:
    left, right = args[0], args[1]
    return _product(left.shape[0], right.shape[1], left.shape[1], 1, left)


def _bmm(args: tuple[Any, ...]) -> tuple[Op, ...]:
    left, right = args[0], args[1]
    return _product(left.shape[1], right.shape[2], left.shape[2], left.shape[0], left)


def _grouped_mm(args: tuple[Any, ...]) -> tuple[Op, ...]:
    """Return a grouped product as one batched product, as if all groups had as many rows.

    In the gradient of the weights, the inner dim is divided between groups.
    """
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
    """Return the number of rows of a group and of groups; one group if the rows do not divide."""
    return (rows, 1) if rows % groups else (rows // groups, groups)


def _grouped_mm_backward(args: tuple[Any, ...]) -> tuple[Op, ...]:
    """Return the two products of backward of transformers' own grouped product.

    They are the gradients of the rows ``[S, in]`` and of the weights ``[E, in, out]``.
    """
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
    features, weight = args[0], args[1]
    if args[6]:  # transposed: every element of the input meets the whole filter
        return (math.prod(features.shape[2:]),)
    # One number may stand for all dims, as where padding is called "valid".
    steps, pads, wides = (tuple(each) * (weight.dim() - 2 if len(each) == 1 else 1) for each in args[3:6])
    sizes = zip(features.shape[2:], weight.shape[2:], steps, pads, wides, strict=True)
    return (math.prod((size + 2 * pad - wide * (width - 1) - 1) // step + 1 for size, width, step, pad, wide in sizes),)


def _as_product(shape: Any, weight: torch.Tensor, transposed: bool, groups: int, places: int) -> tuple[Op, ...]:
    filter_size = math.prod(weight.shape[2:])
    inside, outside = (weight.shape[0] // groups, weight.shape[1]) if transposed else (weight.shape[1], 0)
    outside = outside or weight.shape[0] // groups
    return _product(shape[0] * places, outside, inside * filter_size, groups, weight)


def _convolution_backward(args: tuple[Any, ...]) -> tuple[Op, ...]:
    """Return one product for the gradient of the input and one for the weight's, each as large as forward's."""
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
    """Return fused attention with queries ``[samples, heads, m, width]`` over ``n`` keys."""
    given = dict(zip((argument.name for argument in schema_of(function).arguments), args, strict=False)) | dict(kwargs)
    query, key, value = given["query"], given["key"], given["value"]
    samples, heads, m, width = query.shape
    name = schema_of(function).name
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
            variant=attention_kernel.get(),
            moment="backward" if "backward" in name else "forward",
        ),
    )


def _moved_bytes(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    made = tensors_in(result)
    written = sum(map(tensor_bytes, made))
    if name in _FILLING:
        read = sum(map(tensor_bytes, tensors_in((args[1:], kwargs))))
    elif name in PICKING:
        read = sum(map(tensor_bytes, tensors_in((args[1:], kwargs)))) + written
    else:
        read = sum(map(tensor_bytes, tensors_in((args, kwargs))))
    return read + written


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers."""
    found: list[torch.Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[torch.Tensor]) -> None:
    # What operators take and return; torch's own walk looks up the class of every leaf.
    kind = type(tree)
    if isinstance(tree, torch.Tensor):
        found.append(tree)
    elif kind is tuple or kind is list:
        for each in tree:
            _collect(each, found)
    elif kind is dict:
        for each in tree.values():
            _collect(each, found)
    elif kind not in _PLAIN:
        found += [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


_PLAIN = {int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements in memory; broadcast elements count once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return int(math.prod(sizes)) * tensor.element_size()


def storage_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return a key for a tensor's storage, unique among those alive, and its bytes."""
    storage = _plain(tensor).untyped_storage()
    return storage_identity(storage), storage.nbytes()


def reference(tensor: torch.Tensor) -> StorageWeakRef:
    """Return a weak reference to a tensor's storage, while which exists no other storage has its key."""
    return StorageWeakRef(_plain(tensor).untyped_storage())


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    while is_traceable_wrapper_subclass(tensor):  # a DTensor, a weight gathered in 8 bits: what they wrap is held
        tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])
    return tensor


# --- Workspaces that fake tensors lack or size wrongly.

_MOST_PRODUCTS = 2**28  # multiplications of a real call: some hundredths of a second

_Key = tuple[tuple[torch.Size | None, ...], torch.dtype, tuple[Any, ...]]


def with_workspace(func: Any, args: tuple[Any, ...], result: Any) -> Any:
    """Return the result of an operator without data with a workspace of the size that a real call would save.

    On CPUs ``nn.LSTM`` runs layer by layer through oneDNN, and what backward needs is a buffer that only oneDNN can
    size: it is asked for by a real call on zeros.
    """
    if func is embedding_bag.default:
        return _without_map(args, result)
    if func is not torch.ops.aten.mkldnn_rnn_layer.default or not args[-1]:  # only training saves
        return result
    shapes = tuple(each.shape if isinstance(each, torch.Tensor) else None for each in args[:7])
    others = tuple(tuple(each) if isinstance(each, list) else each for each in args[7:])
    return (*result[:3], result[3].new_empty(_workspace_bytes((shapes, args[0].dtype, others))))


def _without_map(args: tuple[Any, ...], result: Any) -> Any:
    """Return the result of ``embedding_bag`` without the map from indices to bags, which sums on CPUs do not make.

    torch's rule for bf16 without data says that they do.
    """
    weight, given = args[0], dict(enumerate(args))  # defaults at the end are left out
    mode, weights, padding = given.get(4, 0), given.get(6), given.get(8, -1)
    is_plain = weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and weight.stride(1) == 1
    if not is_plain or mode != 0 or padding >= 0 or (weights is not None and weights.stride(0) != 1):
        return result
    return (result[0], result[1].new_empty(0), *result[2:])


@functools.lru_cache(maxsize=256)
def _workspace_bytes(key: _Key) -> int:
    """Return the bytes of oneDNN's workspace; long sequences are extrapolated from short ones.

    Each token takes as much, up to rounding to pages.
    """
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
    with disable_current_modes(), torch.enable_grad():  # it saves nothing without
        zeros = [torch.zeros(shape, dtype=dtype) if shape is not None else None for shape in shapes]
        listed = [list(each) if isinstance(each, tuple) else each for each in others]
        workspace = torch.ops.aten.mkldnn_rnn_layer.default(*zeros, *listed)[3]
    return int(workspace.numel())


# --- The device of a pass without data.


def device_of_pass(model: nn.Module, wanted: torch.device | None) -> torch.device:
    """Return the device of the tensors without data: where the model will train, wherever it is now.

    None takes the device of the parameters. A machine that lacks the device runs the pass on CPU tensors.
    """
    return device_here(wanted or next((tensor.device for tensor in model.parameters()), torch.device("cpu")))


def device_here(device: torch.device) -> torch.device:
    """Return the device, or the CPU on a machine without it."""
    return device if device.type == "cuda" and torch.cuda.is_available() else torch.device("cpu")


def kernels_of_device(wanted: torch.device | None, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Imitate the kernels of another device in a pass on the CPU."""
    if wanted is None or wanted.type == "cpu" or device.type != "cpu":
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    stack.enter_context(_KernelsOfCuda())
    stack.enter_context(imitated_gpu())
    return stack


class _KernelsOfCuda(TorchFunctionMode):
    """Dropout, attention and cross entropies as CUDA runs them.

    Under autocast the CPU computes cross entropies in fp32; on CUDA they keep what half precision they are given. In
    attention dropout is left out: the CPU has no fused kernel with it, and the one on CUDA keeps no more for it than
    the state of a random generator. Elsewhere it is one kernel that keeps a byte of each element, not three with a mask
    in the type of the elements.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func is torch.nn.functional.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            return _attention_of_cuda(**{**given, **dict(zip(names, args, strict=False)), "dropout_p": 0.0})
        if func is torch.nn.functional.multi_head_attention_forward:
            return func(**_without_dropout(*args, **given))  # what it calls does not come here
        if func is torch.nn.functional.dropout and _is_fused(*args, **given):
            of = {**given, **dict(zip(("input", "p"), args, strict=False))}
            return torch.native_dropout(of["input"], of.get("p", 0.5), True)[0]
        if func is torch.nn.functional.cross_entropy and torch.is_autocast_enabled("cpu"):
            return _cross_entropy_of_cuda(*args, **given)
        return func(*args, **given)


def _without_dropout(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of ``nn.MultiheadAttention``'s function, without dropout where attention can be fused."""
    signature = inspect.signature(torch.nn.functional.multi_head_attention_forward)
    given = signature.bind(*args, **kwargs).arguments
    return {**given, "dropout_p": 0.0} if not given.get("need_weights", True) else given


def _attention_of_cuda(**given: Any) -> torch.Tensor:
    """Attend as ``scaled_dot_product_attention``, fused also where values are narrower than keys, as DeepSeek's are.

    The CPU has no kernel for these, and would materialise all scores.
    """
    query, value, mask = given["query"], given["value"], given.get("attn_mask")
    is_even = query.dim() == 4 and query.shape[-1] % 8 == value.shape[-1] % 8 == 0
    if query.shape[-1] == value.shape[-1] or not is_even or given.get("enable_gqa"):
        return torch.nn.functional.scaled_dot_product_attention(**given)
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
    bias = None if mask is None else mask.to(dtype).expand(*query.shape[:3], given["key"].shape[-2])
    taken = (each.to(dtype) for each in (query, given["key"], value))
    causal, scale = given.get("is_causal", False), given.get("scale")
    return efficient_attention(*taken, bias, True, 0.0, causal, scale=scale)[0]  # type: ignore[no-any-return]


def _cross_entropy_of_cuda(input: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Compute ``F.cross_entropy`` as CUDA's autocast does, which the CPU's would widen.

    The operators within are in fp32, but for the softmax, which is told a type.
    """
    known = {"weight", "ignore_index", "reduction"}
    others = {name for name, value in kwargs.items() if name not in known and value}
    if args or others or target.is_floating_point():
        return torch.nn.functional.cross_entropy(input, target, *args, **kwargs)
    with torch.autocast("cpu", enabled=False):
        scores = torch.nn.functional.log_softmax(input, min(input.dim() - 1, 1)).float()
    return torch.nn.functional.nll_loss(scores, target, **{name: kwargs[name] for name in known & kwargs.keys()})


def _is_fused(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    """Return whether torch runs ``torch.nn.functional.dropout`` of these arguments as one kernel on CUDA."""
    return training and not inplace and 0 < p < 1 and input.numel() > 0
