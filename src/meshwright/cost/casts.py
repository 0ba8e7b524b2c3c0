"""What products in 8 or 4 bits move beside their operands: the casts, and what finds their scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.cost.step import Op


@dataclass(frozen=True)
class Casts:
    """Bytes moved for each element that is cast around the three products of a layer.

    Args:
        input: In forward, of the layer's input.
        weight: In forward.
        gradient: In backward, of the gradient of the layer's result.
        input_again: In backward, where forward's cast was not kept.
        weight_again: In backward, likewise.
    """

    input: float
    weight: float
    gradient: float
    input_again: float = 0.0
    weight_again: float = 0.0

    @property
    def listed(self) -> float:
        """Of each operand of a product that is listed in backward by itself: the mean of all four that both have."""
        return (self.gradient + self.input_again + self.weight_again) / 4

    def times(self, factor: float) -> Casts:
        """The same with more bytes, or fewer."""
        parts = (self.input, self.weight, self.gradient, self.input_again, self.weight_again)
        return Casts(*(factor * part for part in parts))


# Both backward products cast what they take anew, their shared gradient twice.
_EACH = Casts(3, 3, 6, 3, 3)
# Transformer Engine casts a tensor once for all products that take it. ``delayed`` reads 2 bytes and writes one in each
# of two layouts, with the largest value found on the way; ``current`` finds that in a pass of its own (2 more). What
# the documentation's timings of 12 products leave when those of products already cast are taken off (gemm_profiling of
# 2.13: 15,872 tokens through layers of 4096 and 16384 on B300 and H200) is 3 to 4 bytes an element for ``delayed``, 6
# to 7 for ``current``, 5 for blocks of 32 (``blocks``) and 8 for 4 bits with their transforms (``nvfp4``), of memory
# that reaches 0.9 of what is stated. torchao's layers keep inputs as they are; compiled, ``tensorwise`` reads a tensor
# for its largest value and once more, and writes the gradient in two layouts.
CASTS: Mapping[str, Casts] = {
    "delayed": Casts(4, 4, 4),
    "current": Casts(6, 6, 6),
    "blocks": Casts(5, 5, 5),
    "nvfp4": Casts(8, 8, 8),
    "tensorwise": Casts(5, 5, 6, 5, 5),
    "rowwise": _EACH,
    "mxfp8": _EACH,
}
"""Of products in 8 and 4 bits, by how tensors are scaled (``Op.scaling``)."""


def casts_of(op: Op, rowwise_bytes: float) -> Casts:
    """Of an op's products; none but in 8 and 4 bits.

    Args:
        op: A product.
        rowwise_bytes: What scales by rows move beside each cast.
    """
    if op.dtype not in ("fp8", "fp4"):
        return Casts(0, 0, 0)
    known = CASTS.get(op.scaling, _EACH)
    if op.scaling == "rowwise":
        known = known.times(1 + rowwise_bytes / _EACH.input)
    return known if op.casts_weight else Casts(known.input, 0, known.gradient, known.input_again)
