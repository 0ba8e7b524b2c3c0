"""What travels in few bits: how many bytes stand for so many numbers, and which way they go between nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from meshwright.errors import StrategyError

Kind = Literal["int8", "int4", "fp8"]


@dataclass(frozen=True)
class Encoding:
    """Numbers in 8 or 4 bits; every block of them shares a scale."""

    kind: Kind
    block_size: int  # elements that share a scale
    scale_bytes: int = 4  # 4: fp32, 2: bf16

    def num_bytes(self, numel: int) -> int:
        """Bytes of so many neighbouring elements of one tensor, the last block shorter."""
        codes = -(-numel // 2) if self.kind == "int4" else numel
        return codes + -(-numel // self.block_size) * self.scale_bytes


@dataclass(frozen=True)
class Wire:
    """How weights and gradients travel; None: as they are."""

    gather: Encoding | None = None
    reduce: Encoding | None = None
    min_numel: int = 0  # tensors of fewer elements travel as they are
    ranks_per_node: int | None = None  # of the job; None: one collective over all nodes

    def num_bytes(self, encoding: Encoding | None, tensor_numel: int, numel: int, itemsize: int) -> int:
        """Bytes of ``numel`` elements, a part of a floating tensor of ``tensor_numel``."""
        if encoding is None or tensor_numel < self.min_numel:
            return numel * itemsize
        return encoding.num_bytes(numel)

    def neighbours(self, axes: Sequence[tuple[str, int]], axis: str) -> int | None:
        """How many consecutive ranks along an axis share a node; None where one collective goes over them all.

        Args:
            axes: ``(name, size)``, innermost first: neighbours along an axis lie as many ranks apart as the axes
                before it hold.
            axis: Along which a collective goes.

        Raises:
            StrategyError: When nodes cut the axis into unequal parts.
        """
        size, names = dict(axes).get(axis, 1), [name for name, _ in axes]
        if self.ranks_per_node is None or size == 1:
            return None
        stride = math.prod(each for _, each in axes[: names.index(axis)])
        if stride % self.ranks_per_node == 0:
            return None  # every rank on a node of its own
        found, rest = divmod(self.ranks_per_node, stride)
        if not rest and found % size == 0:
            return None  # all on one node
        if rest or size % found:
            raise StrategyError(
                "comm: nodes cut the axis that communicates into unequal parts",
                expected=f"ranks per node that divide {stride * size}, or are divided by it, in steps of {stride}",
                got=f"{self.ranks_per_node} ranks per node, {axis}={size}"
                + (f" over {stride} ranks each" if stride > 1 else ""),
                fix="change the sizes of the axes, or leave hierarchical out",
            )
        return found
