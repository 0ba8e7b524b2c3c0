"""Writing fp32 results into bfloat16 weights with random rounding: small updates survive on average, without a copy."""

from __future__ import annotations

import torch

_DROPPED_BITS = 16  # of an fp32 mantissa, in bfloat16


def round_stochastically_(target: torch.Tensor, value: torch.Tensor, generator: torch.Generator) -> None:
    """Rounds fp32 to one of the two neighbouring bfloat16 numbers, with probabilities that keep the mean (in place).

    Adding random bits below the kept mantissa and cutting them off carries with exactly that probability
    (Gupta et al. 2015; Zamirai et al. 2020 for bfloat16 training). Infinities and NaN stay what they are.

    Args:
        target: bfloat16, written to.
        value: fp32 of the same shape.
        generator: Of the same device; ranks that hold the same shard must draw the same bits.
    """
    bits = value.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << _DROPPED_BITS, bits.shape, generator=generator, device=bits.device, dtype=torch.int32)
    rounded = ((bits + noise) & -(1 << _DROPPED_BITS)).view(torch.float32)
    target.copy_(torch.where(torch.isfinite(value), rounded, value))


def shard_generator(device: torch.device, step: int, position: int, shard: int) -> torch.Generator:
    """Random bits that depend on step, parameter and shard and on nothing else, so replicas stay equal."""
    generator = torch.Generator(device)
    generator.manual_seed(((step * 1_000_003 + position) * 1_000_003 + shard) % (1 << 63))
    return generator
