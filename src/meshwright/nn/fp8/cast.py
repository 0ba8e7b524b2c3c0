"""Casting to 8 bits, and the product of two tensors that are in 8 bits.

Shapes: M rows (tokens), N output and K input features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from meshwright.nn.fp8.recipe import DelayedScaling

ROWS = 16  # the tensor cores sum over multiples of so many elements
_EXPONENT_BITS = 0x7F800000  # of fp32
_LARGEST_SCALE = 2.0**126  # its inverse is still a normal number


class Scaled(NamedTuple):
    """A tensor in 8 bits: ``values * inverse`` is what it stands for."""

    values: torch.Tensor
    inverse: torch.Tensor  # 0-dim fp32


def largest(tensor: torch.Tensor) -> torch.Tensor:
    """The largest absolute value, 0-dim fp32; inf or nan where there is one."""
    return torch.linalg.vector_norm(tensor, ord=float("inf"), dtype=torch.float32)


def cast(tensor: torch.Tensor, amax: torch.Tensor, known: torch.Tensor, recipe: DelayedScaling, role: int) -> Scaled:
    """Casts a tensor to the 8-bit type of its role; values beyond the largest saturate.

    A tensor that holds inf or nan becomes nan as a whole: saturating would hide an overflow from the loss scale.

    Args:
        tensor: Of any floating type.
        amax: Its :func:`largest`.
        known: The scale from its history, 0-dim fp32; 0 where there is none yet. Then its own amax serves, and the
            scale is rounded down to a power of two: ranks that see other data then round alike, as long as no history
            has made their scales equal.
        recipe: Formats and margin.
        role: Which of the three tensors of a layer it is.
    """
    own = recipe.scale(amax, role).clamp(max=_LARGEST_SCALE)
    own = (own.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    scale = torch.where(known > 0, known, own)
    limit = torch.finfo(recipe.dtype(role)).max
    values = (tensor.float() * scale).clamp(-limit, limit).to(recipe.dtype(role))
    return Scaled(values, torch.where(torch.isfinite(amax), scale.reciprocal(), float("nan")))


def product(left_MK: Scaled, right_KN: Scaled, dtype: torch.dtype, *, fast: bool, emulate: bool) -> torch.Tensor:
    """Multiplies two 8-bit matrices, with sums in fp32.

    Args:
        left_MK: In row order.
        right_KN: In column order: the transpose of a matrix in row order. K is a multiple of 16, and so is N.
        dtype: Of the result.
        fast: Let the tensor cores sum in fewer bits, as is usual in forward.
        emulate: Multiply the same 8-bit values in fp32, where the hardware has no such product.
    """
    if emulate:
        with torch.autocast(left_MK.values.device.type, enabled=False):
            sums = left_MK.values.float() @ right_KN.values.float()
        return (sums * (left_MK.inverse * right_KN.inverse)).to(dtype)
    return torch._scaled_mm(
        left_MK.values,
        right_KN.values,
        scale_a=left_MK.inverse,
        scale_b=right_KN.inverse,
        out_dtype=dtype,
        use_fast_accum=fast,
    )


def transposed(scaled_MK: Scaled) -> Scaled:
    """The transpose in row order, (K, M): products read both sides along the dim they sum over.

    M is filled up with zeros to a multiple of 16; they add nothing to a sum over it.
    """
    bits = scaled_MK.values.view(torch.uint8)  # few operations take 8-bit floats
    missing = -bits.shape[0] % ROWS
    flipped = F.pad(bits, (0, 0, 0, missing)).t().contiguous() if missing else bits.t().contiguous()
    return Scaled(flipped.view(scaled_MK.values.dtype), scaled_MK.inverse)
