"""Operators of ATen with an underscore, and what an operator tells of itself."""

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
