"""Operators of ATen with an underscore, and what an operator tells of itself."""

import functools
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch._ops import OpOverloadPacket  # what ``torch.ops.aten.mm`` is; only its module has an underscore

__all__ = [
    "ANNOTATIONS",
    "COMPOSITE",
    "CPU_HAS_AMX_BF16",
    "CPU_HAS_AVX512_BF16",
    "SCHEMA",
    "OpOverloadPacket",
    "cast_grouped_products",
    "cudnn_attention",
    "cudnn_attention_backward",
    "efficient_attention",
    "efficient_attention_backward",
    "embedding_bag",
    "flash_attention",
    "flash_attention_backward",
    "flash_attention_on_cpu",
    "flash_attention_on_cpu_backward",
    "has_kernel_for",
    "name_of",
    "packet_of",
    "scaled_mm",
    "schema_of",
    "to_copy",
    "unsafe_view",
]

ATTRIBUTES_OF = ("torch._ops", "torch.cpu")

_aten: Any = torch.ops.aten

# Attention with the logarithm of its sums, which ``scaled_dot_product_attention`` keeps to itself: a ring adds up parts
# by it, and backward is called with the sums of the whole. Replaced by a public attention that returns them, such as
# ``torch.nn.attention.varlen.varlen_attn(return_aux=...)`` once it runs on all devices and with masks.
flash_attention = _aten._scaled_dot_product_flash_attention
flash_attention_backward = _aten._scaled_dot_product_flash_attention_backward
flash_attention_on_cpu = _aten._scaled_dot_product_flash_attention_for_cpu
flash_attention_on_cpu_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
cudnn_attention = _aten._scaled_dot_product_cudnn_attention
cudnn_attention_backward = _aten._scaled_dot_product_cudnn_attention_backward
efficient_attention = _aten._scaled_dot_product_efficient_attention
efficient_attention_backward = _aten._scaled_dot_product_efficient_attention_backward

# Products of tensors in 8 bits. ``torch.nn.functional.scaled_mm`` replaces it: it takes recipes of scales as enums.
scaled_mm = torch._scaled_mm

# Operators that the planner counts by rules of their own.
embedding_bag = _aten._embedding_bag
to_copy = _aten._to_copy
# A view that its schema does not call one.
unsafe_view = _aten._unsafe_view

# What ``torch.profiler.record_function`` calls. Replaced by a public way to tell an annotation from a computation.
ANNOTATIONS: frozenset[Any] = frozenset(
    {
        torch.ops.profiler._record_function_enter_new.default,
        torch.ops.profiler._record_function_exit._RecordFunction,
    }
)

# The name, schema and overloads of an operator, and whether it is nothing but others. Not public; ``torch.library``
# can only define operators.
SCHEMA = "_schema"
schema_of = attrgetter(SCHEMA)
name_of = attrgetter("_opname")
packet_of = attrgetter("_overloadpacket")
has_kernel_for = torch._C._dispatch_has_kernel_for_dispatch_key
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd

# Functions of ``torch.cpu`` that say whether products in bfloat16 are fast; not in every torch, so they are looked up.
# Replaced by ``torch.backends.cpu.get_cpu_capability()`` when that names them.
CPU_HAS_AVX512_BF16 = "_is_avx512_bf16_supported"
CPU_HAS_AMX_BF16 = "_is_amx_tile_supported"


# Products of groups of rows with a matrix each, as stacked experts have them: torch's, and the one that transformers
# falls back to. torch's autocast leaves them in the precision of the weights (pytorch#174763): experts in fp32 beside
# attention in bf16, at a tenth of the speed on a GPU. Goes once autocast covers them.
_GROUPED = ("aten::_grouped_mm", "transformers::grouped_mm_fallback")
_KEY_OF_AUTOCAST = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
_LIBRARIES: list[torch.library.Library] = []  # what they have registered ends with them


def cast_grouped_products(device: str) -> None:
    """Let autocast cast grouped products as it does others, for the whole process.

    Args:
        device: The kind of device, such as ``"cuda"``; of others than that and the CPU nothing is changed.
    """
    key = _KEY_OF_AUTOCAST.get(device, "")
    for name in _GROUPED if key else ():
        namespace, _, short = name.partition("::")
        if not hasattr(getattr(torch.ops, namespace), short) or has_kernel_for(name, key):
            continue
        library = torch.library.Library(namespace, "IMPL")
        library.impl(short, functools.partial(_cast, getattr(getattr(torch.ops, namespace), short), device), key)
        _LIBRARIES.append(library)


def _cast(product: Callable[..., Any], device: str, *args: Any, **kwargs: Any) -> Any:
    dtype = torch.get_autocast_dtype(device)
    # The kernel takes rows of a multiple of 16 bytes: what is narrower stays in its own precision.
    fits = all(size * dtype.itemsize % 16 == 0 for size in (args[0].shape[-1], *args[1].shape[-2:]))

    def cast(value: Any) -> Any:
        floats = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64
        return value.to(dtype) if floats and fits else value

    with torch.autocast(device, enabled=False):
        return product(*map(cast, args), **{name: cast(value) for name, value in kwargs.items()})
