"""Rows of several tensors in one message: large ones in few bits, small ones as they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from meshwright.cost import Encoding
from meshwright.distributed.quantise import decode, encode


@dataclass(frozen=True)
class Packing:
    """What lies side by side in a row, and how it travels.

    A message has the quantised parts of a row first, and behind them the others' bytes.
    """

    sizes: tuple[int, ...]
    """Elements of every part, in the order in which they lie in a row."""
    quantised: tuple[bool, ...]
    """Which of them travel in few bits."""
    encoding: Encoding | None
    """How; None: all travel as they are."""

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """Turns rows ``(num_rows, elements)`` of floats into messages ``(num_rows, bytes)``."""
        parts = rows.split(self.sizes, dim=1)
        large, small = self._sorted(parts)
        pieces = [encode(large, self.encoding)] if large and self.encoding is not None else []
        if small:
            pieces.append(torch.cat(small, dim=1).view(torch.uint8))
        return torch.cat(pieces, dim=1) if len(pieces) > 1 else pieces[0]

    def unpack(self, messages: torch.Tensor, sent: torch.dtype, rows: torch.Tensor) -> None:
        """Fills rows ``(num_rows, elements)`` with what messages say.

        Args:
            messages: Bytes ``(num_rows, bytes)``.
            sent: The type in which small parts travel.
            rows: To be overwritten; of any floating type.
        """
        large, small = self._sorted(rows.split(self.sizes, dim=1))
        behind = 0
        if large and self.encoding is not None:
            sizes = [part.shape[1] for part in large]
            behind = sum(self.encoding.num_bytes(size) for size in sizes)
            for part, value in zip(large, decode(messages[:, :behind], sizes, self.encoding, rows.dtype), strict=True):
                part.copy_(value)
        if small:
            values = messages[:, behind:].contiguous().view(sent)
            for part, value in zip(small, values.split([part.shape[1] for part in small], dim=1), strict=True):
                part.copy_(value)

    def _sorted(self, parts: tuple[torch.Tensor, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The parts that are quantised, and the others."""
        both = list(zip(parts, self.quantised, strict=True))
        quantises = self.encoding is not None
        return [p for p, few in both if few and quantises], [p for p, few in both if not (few and quantises)]
