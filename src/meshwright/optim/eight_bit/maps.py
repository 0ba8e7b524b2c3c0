"""Numbers from −1 to 1 in one byte: dynamic maps, which are precise for small numbers too (Dettmers et al. 2022)."""

from __future__ import annotations

from functools import cache

import torch

_DECADES = 7
_BINS = 1 << 16  # of fp32 numbers with equal sign, exponent and first 7 bits of the mantissa


@cache
def dynamic_map(signed: bool) -> torch.Tensor:
    """The 256 numbers that a byte stands for, ascending, fp32 on the CPU (arXiv 2110.02861, section 2.1).

    A code names a decade from 10⁻⁶ to 1 and a step in it, and the steps double from decade to decade: the largest has
    64 steps (128 unsigned), the smallest 1 (2). A step stands for its middle. 0 and 1 have codes of their own; signed
    codes are the same numbers with both signs, but −1.
    """
    numbers = [torch.tensor([0.0, 1.0], dtype=torch.float64, device="cpu")]
    for decade in range(_DECADES):
        edges = torch.linspace(0.1, 1.0, (1 if signed else 2) * 2**decade + 1, dtype=torch.float64, device="cpu")
        middles = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade - _DECADES + 1)
        numbers += [middles, -middles] if signed else [middles]
    return torch.cat(numbers).sort().values.float()


class Codec:
    """A dynamic map on one device: numbers to codes and back.

    The code is that of the nearest number, but an unsigned map keeps 0 for 0 alone: a second moment that was rounded
    to 0 would make the next step as large as 1 / eps.

    A number's first 16 bits tell its code up to one, as no two borders between codes share them; a table answers them
    ten times faster than a search on a CPU does.

    Args:
        signed: For first moments; unsigned for second ones.
        device: Where the numbers will be.
    """

    def __init__(self, signed: bool, device: torch.device) -> None:
        numbers = dynamic_map(signed)
        borders = (numbers[1:] + numbers[:-1]) / 2
        if not signed:
            borders[0] = 0.0
        self._numbers = numbers.to(device)
        self._borders = torch.cat([borders, torch.tensor([torch.inf], device="cpu")]).to(device)
        self._lower_codes = torch.bucketize(_smallest_of_bins(), borders, out_int32=True).to(torch.uint8).to(device)

    @classmethod
    def on(cls, signed: bool, device: torch.device) -> Codec:
        """The one for a device; made once."""
        return _made(signed, device)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Codes of numbers from −1 to 1, uint8 of the same shape; NaN gets the last one."""
        flat = values.reshape(-1)
        bins = (flat.view(torch.int32) >> 16).bitwise_and_(_BINS - 1)
        codes = self._lower_codes.index_select(0, bins)
        # (x > border) as a number: the code above, where the bin has a border and x is beyond it.
        codes += flat > self._borders.index_select(0, codes.int())
        return codes.view(values.shape)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """The numbers of codes, fp32 of the same shape."""
        return self._numbers.index_select(0, codes.reshape(-1).int()).view(codes.shape)


@cache
def _made(signed: bool, device: torch.device) -> Codec:
    return Codec(signed, device)


def _smallest_of_bins() -> torch.Tensor:
    """The smallest number with each pattern of 16 first bits; of negative ones that is the one with all others set."""
    first = torch.arange(_BINS, dtype=torch.int64, device="cpu") << 16
    bits = torch.where(first >= 1 << 31, first + 0xFFFF - (1 << 32), first)
    return bits.to(torch.int32).view(torch.float32)
