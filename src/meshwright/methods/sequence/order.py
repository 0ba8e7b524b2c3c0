"""Which tokens of a sequence each rank of an axis has."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from meshwright.errors import ModelError


@dataclass(frozen=True)
class TokenOrder:
    """How the tokens of a sequence are dealt to the ranks of an axis, as one of them sees it."""

    method: str
    """The method that deals them, for errors."""
    size: int
    index: int
    balanced: bool = False
    """Zig-zag: of 2 n chunks, rank r has r and 2 n - 1 - r, which see equally many earlier tokens on every rank."""
    within: int = 1
    """Ranks of another axis among whom this rank's tokens are divided once more."""

    @property
    def chunks(self) -> tuple[int, ...]:
        """The chunks that this rank has, ascending."""
        return (self.index, 2 * self.size - 1 - self.index) if self.balanced else (self.index,)

    @property
    def num_chunks(self) -> int:
        """Equal chunks that a sequence falls into."""
        return self.size * len(self.chunks)

    def at(self, index: int) -> TokenOrder:
        """The same order as another rank sees it."""
        return dataclasses.replace(self, index=index)

    def part(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's tokens along ``dim``, in memory of its own: what keeps it must not keep all tokens."""
        chunks = whole.chunk(self.num_chunks, dim)
        mine = [chunks[chunk] for chunk in self.chunks]
        return torch.cat(mine, dim) if len(mine) > 1 else mine[0].clone()

    def in_order(self, parts: torch.Tensor, dim: int) -> torch.Tensor:
        """The parts of all ranks, one behind the other along ``dim``, put into the order of the tokens."""
        if not self.balanced:
            return parts
        chunks = parts.chunk(self.num_chunks, dim)
        held = [chunk for rank in range(self.size) for chunk in self.at(rank).chunks]
        return torch.cat([chunks[held.index(chunk)] for chunk in range(self.num_chunks)], dim)

    def check(self, tokens: int) -> None:
        """Refuses numbers of tokens that cannot be dealt.

        Raises:
            ModelError: Alike on every rank of the axis.
        """
        chunks = self.num_chunks
        # A single query looks like generation, which has no causal mask.
        if tokens % chunks or tokens < 2 * self.size:
            raise ModelError(
                f"{self.method}: the axis does not divide the tokens into "
                + ("two equal chunks per rank" if self.balanced else "parts of two or more"),
                expected=f"a multiple of {chunks} tokens, {2 * self.size} or more",
                got=str(tokens),
                fix="pad the sequences" + (", or set balance=False" if self.balanced else ""),
            )
