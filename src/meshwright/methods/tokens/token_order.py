"""Deal the tokens of a sequence to the ranks of an axis, and tell which of each other's tokens these attend to."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from meshwright.errors import ModelError
from meshwright.runtime.torch_internals.fake_tensors import FakeTensor
from meshwright.runtime.torch_internals.tensors import version_of


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


# --- Which chunks of keys a rank's queries see

Table = tuple[tuple[bool, ...], ...]
"""Per chunk of this rank and chunk of the sequence: whether any query of the one sees any key of the other."""


@dataclass(frozen=True)
class View:
    """The smallest rectangle of chunks that holds all keys of one rank which this rank's queries see."""

    rows: slice  # of this rank's queries
    columns: slice  # of the other rank's keys
    is_causal: bool = False  # within the rectangle

    def without_padding(self, rows: int, columns: int) -> View | None:
        """Return the part of the rectangle within the first ``rows`` and ``columns``; None if nothing is left."""
        rows, columns = min(rows, self.rows.stop), min(columns, self.columns.stop)
        if rows <= self.rows.start or columns <= self.columns.start:
            return None
        return View(slice(self.rows.start, rows), slice(self.columns.start, columns), self.is_causal)

    def additive(
        self, mask: torch.Tensor | None, order: TokenOrder, source: int, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Cut this rectangle out of a mask over all tokens, as a tensor that is added to the scores."""
        if mask is None:
            return None
        own = order.part(mask, -2)[..., self.rows, :] if mask.shape[-2] > 1 else mask
        cut = order.at(source).part(own, -1)[..., self.columns]
        if cut.dtype == torch.bool:
            return torch.zeros_like(cut, dtype=dtype).masked_fill_(~cut, -torch.inf)
        return cut.to(dtype)


def causal_table(order: TokenOrder) -> Table:
    """Return the table of causal attention."""
    return tuple(tuple(key <= query for key in range(order.num_chunks)) for query in order.chunks)


def with_four_dims(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask as (batch or 1, heads or 1, tokens or 1, tokens)."""
    return mask[(None,) * (4 - mask.dim())]


def mask_table(mask: torch.Tensor, order: TokenOrder, hidden: float = -torch.inf) -> Table:
    """Return the table of a mask (…, tokens or 1, tokens).

    A query sees a key where the mask is True, or above ``hidden``, the number that hides keys. Reading the values makes
    the host wait for a CUDA device, so the table is cached: a mask that all layers share is read once. In a fake tensor
    all is visible.
    """
    if isinstance(mask, FakeTensor) or mask.is_meta:
        return ((True,) * order.num_chunks,) * len(order.chunks)
    if mask.is_inference():  # it has no version, so changes could not be seen
        return _read_table(with_four_dims(mask), order, hidden)
    key = version_of(mask), order, hidden
    known = _tables.get(mask)
    if known is None or known[0] != key:
        known = _tables[mask] = key, _read_table(with_four_dims(mask), order, hidden)
    table: Table = known[1]
    return table


_tables = WeakTensorKeyDictionary()  # mask -> (its version, order, what hides), table


def _read_table(mask: torch.Tensor, order: TokenOrder, hidden: float) -> Table:
    seen = mask if mask.dtype == torch.bool else mask > hidden
    missing = order.padded(mask.shape[-1]) - mask.shape[-1]
    seen = F.pad(seen, (0, missing, 0, missing if mask.shape[-2] > 1 else 0))
    columns = seen.flatten(0, 1).any(0).unflatten(-1, (order.num_chunks, -1)).any(-1)
    if columns.shape[0] == 1:
        return (tuple(columns[0].tolist()),) * len(order.chunks)
    chunks = columns.unflatten(0, (order.num_chunks, -1)).any(1)
    return tuple(map(tuple, chunks[list(order.chunks)].tolist()))


def view_of(table: Table, order: TokenOrder, source: int, tokens: int, *, is_causal: bool) -> View | None:
    """Describe which keys of rank ``source`` this rank's queries see; None if they see none.

    Args:
        table: See :data:`Table`.
        order: This rank's order of tokens.
        source: The rank whose keys they are.
        tokens: Number of tokens of each rank.
        is_causal: Whether attention is causal.
    """
    keys = order.at(source).chunks
    rows = [place for place, row in enumerate(table) if any(row[key] for key in keys)]
    if not rows:
        return None
    columns = [place for place, key in enumerate(keys) if any(row[key] for row in table)]
    size = tokens // len(keys)
    return View(
        slice(rows[0] * size, (rows[-1] + 1) * size),
        slice(columns[0] * size, (columns[-1] + 1) * size),
        is_causal and source == order.index,
    )
