"""Deal the tokens of a sequence to the ranks of an axis."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch

from meshwright.errors import ModelError


@dataclass(frozen=True)
class TokenOrder:
    """The distribution of a sequence's tokens over the ranks of an axis, from the view of one rank."""

    method: str
    """The method that distributes them, for errors."""
    size: int
    index: int
    balanced: bool = False
    """Zig-zag: of 2 n chunks, rank r has r and 2 n - 1 - r, which see equally many earlier tokens on every rank."""
    within: int = 1
    """Number of parts into which other axes divide this rank's tokens once more."""
    multiple: int = 1
    """Each rank has a multiple of so many tokens, padding included."""

    @property
    def chunks(self) -> tuple[int, ...]:
        """This rank's chunks, ascending."""
        return (self.index, 2 * self.size - 1 - self.index) if self.balanced else (self.index,)

    @property
    def num_chunks(self) -> int:
        """Number of equal chunks of a sequence."""
        return self.size * len(self.chunks)

    def chunk_size(self, tokens: int) -> int:
        """Return the size of a chunk of a sequence; the last chunks are filled up with padding."""
        least, step = -(-tokens // self.num_chunks), self._step
        return -(-least // step) * step

    @property
    def _step(self) -> int:
        """Return the number of tokens of which every chunk has a multiple."""
        return self.multiple // math.gcd(self.multiple, len(self.chunks))

    def padded(self, tokens: int) -> int:
        """Return the number of tokens of all ranks together, padding included."""
        return self.chunk_size(tokens) * self.num_chunks

    def real(self, tokens: int) -> int:
        """Return how many of this rank's tokens, the first ones, are no padding."""
        size = self.chunk_size(tokens)
        return sum(min(max(tokens - chunk * size, 0), size) for chunk in self.chunks)

    def at(self, index: int) -> TokenOrder:
        """Return the same distribution from the view of another rank."""
        return dataclasses.replace(self, index=index)

    def part(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Copy this rank's tokens along ``dim``; a view would keep all tokens alive.

        Padding repeats the last token, so that no code computes with values that are not a token's.
        """
        missing = self.padded(whole.shape[dim]) - whole.shape[dim]
        if missing:
            last = whole.detach().narrow(dim, whole.shape[dim] - 1, 1)
            whole = torch.cat([whole, *[last] * missing], dim)
        chunks = whole.chunk(self.num_chunks, dim)
        mine = [chunks[chunk] for chunk in self.chunks]
        return torch.cat(mine, dim) if len(mine) > 1 else mine[0].clone()

    def in_order(self, parts: torch.Tensor, dim: int) -> torch.Tensor:
        """Sort the concatenated parts of all ranks along ``dim`` into the order of the tokens."""
        if not self.balanced:
            return parts
        chunks = parts.chunk(self.num_chunks, dim)
        order = [chunk for rank in range(self.size) for chunk in self.at(rank).chunks]
        return torch.cat([chunks[order.index(chunk)] for chunk in range(self.num_chunks)], dim)

    def check(self, tokens: int, *, equally: bool = False) -> None:
        """Refuse numbers of tokens that cannot be distributed.

        Args:
            tokens: Number of tokens of a sequence.
            equally: Whether no rank may have padding.

        Raises:
            ModelError: On every rank of the axis.
        """
        chunks = self.num_chunks * self._step
        # A single query looks like generation, which has no causal mask.
        if tokens < 2 * self.size or (equally and tokens % chunks):
            raise ModelError(
                f"{self.method}: the axis does not divide the tokens into "
                + ("two chunks per rank" if self.balanced else "parts of two or more")
                + (", equal ones, as stages of a pipeline take them" if equally else ""),
                expected=(f"a multiple of {chunks} tokens, " if equally else "") + f"{2 * self.size} tokens or more",
                got=str(tokens),
                fix="pad the sequences" + (", or set balance=False" if self.balanced else ""),
            )
