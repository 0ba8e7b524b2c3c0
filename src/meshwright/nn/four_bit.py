"""Frozen linear layers in 4 bits: NF4 codes of bitsandbytes with a scale for 64 values (Dettmers et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

BLOCK = 64
"""Values that share a scale."""
SCALE_BYTES = 4


class FourBitLinear(nn.Linear):
    """A frozen linear layer whose weights are kept in NF4, and computed when the layer runs, forward and backward.

    ``weight`` holds the fp32 scales and then the codes as bytes: methods shard, gather and count it like any frozen
    parameter. bitsandbytes' kernels are used on every device that it supports, the CPU among them.

    Args:
        linear: The layer to take the place of, on ``meta`` or with values.
    """

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        weight = linear.weight.detach()
        self.stored_dtype = weight.dtype
        self.num_scales = -(-weight.numel() // BLOCK)
        if weight.is_meta:
            packed = weight.new_empty(self.num_scales * SCALE_BYTES + -(-weight.numel() // 2), dtype=torch.uint8)
        else:
            packed = torch.cat([each.flatten() for each in quantized(weight)])
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.train(linear.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, in the type of its input or of autocast."""
        kind = input.device.type
        if torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))
        sizes = self.out_features, self.in_features, self.num_scales
        product: torch.Tensor = _FourBitProduct.apply(input, self.weight, sizes)
        return product if self.bias is None else product + self.bias.to(product.dtype)

    def extra_repr(self) -> str:
        """Return sizes and type for ``print(model)``."""
        return f"{super().extra_repr()}, nf4"


def quantized(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and the codes of values, both as bytes; a part that begins at a block has a part of both."""
    codes, scales = torch.ops.bitsandbytes.quantize_4bit(values.contiguous(), BLOCK, "nf4", torch.uint8)
    return scales.float().view(torch.uint8), codes.flatten()


def dequantized(packed: torch.Tensor, sizes: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    """Return the weights (out · in) that a :class:`FourBitLinear` keeps as bytes."""
    rows, columns, num_scales = sizes
    scales = packed[: num_scales * SCALE_BYTES].view(torch.float32)
    codes = packed[num_scales * SCALE_BYTES :]
    found: torch.Tensor = torch.ops.bitsandbytes.dequantize_4bit(codes, scales, BLOCK, "nf4", [rows, columns], dtype)
    return found


def _product(input: torch.Tensor, packed: torch.Tensor, sizes: Sequence[int], is_backward: bool) -> torch.Tensor:
    rows, columns, num_scales = sizes
    weight = dequantized(packed, (rows, columns, num_scales), input.dtype)
    return input @ weight if is_backward else nn.functional.linear(input, weight)


@torch.library.custom_op(
    "meshwright::four_bit_product",
    mutates_args=(),
    schema="(Tensor input, Tensor packed, int[] sizes, bool is_backward) -> Tensor",
)
def _in_compiled_code(
    input: torch.Tensor, packed: torch.Tensor, sizes: Sequence[int], is_backward: bool
) -> torch.Tensor:
    """Multiply as one operator: torch's partitioner would save weights that it sees until backward."""
    return _product(input, packed, sizes, is_backward)


@_in_compiled_code.register_fake
def _(input: torch.Tensor, packed: torch.Tensor, sizes: Sequence[int], is_backward: bool) -> torch.Tensor:
    return input.new_empty(*input.shape[:-1], sizes[1] if is_backward else sizes[0])


class _FourBitProduct(torch.autograd.Function):
    """Multiply by weights that are computed again in backward: saved are their bytes alone."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, packed: torch.Tensor, sizes: tuple[int, int, int]) -> torch.Tensor:
        ctx.save_for_backward(packed)
        ctx.sizes = sizes
        product = _in_compiled_code if torch.compiler.is_compiling() else _product
        return product(input, packed, sizes, False)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (packed,) = ctx.saved_tensors
        product = _in_compiled_code if torch.compiler.is_compiling() else _product
        return product(grads[0], packed, ctx.sizes, True), None, None
