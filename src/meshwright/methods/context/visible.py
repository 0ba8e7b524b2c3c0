"""Which queries of one rank see which keys of another, under a causal or an arbitrary mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakTensorKeyDictionary

from meshwright.methods.sequence.order import TokenOrder

Table = tuple[tuple[bool, ...], ...]
"""Whether any query of each of this rank's chunks sees any key of each chunk of the sequence."""


@dataclass(frozen=True)
class View:
    """What this rank's queries see of one rank's keys: all of the smallest rectangle of chunks that is not masked."""

    rows: slice  # of this rank's queries
    columns: slice  # of the other rank's keys
    is_causal: bool = False  # within it

    def additive(
        self, mask: torch.Tensor | None, order: TokenOrder, source: int, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """This rectangle of a mask over all tokens, as torch's kernels add it to the scores."""
        if mask is None:
            return None
        own = order.part(mask, -2)[..., self.rows, :] if mask.shape[-2] > 1 else mask
        cut = order.at(source).part(own, -1)[..., self.columns]
        if cut.dtype == torch.bool:
            return torch.zeros_like(cut, dtype=dtype).masked_fill_(~cut, -torch.inf)
        return cut.to(dtype)


def causal_table(order: TokenOrder) -> Table:
    """The table of causal attention."""
    return tuple(tuple(key <= query for key in range(order.num_chunks)) for query in order.chunks)


def with_four_dims(mask: torch.Tensor) -> torch.Tensor:
    """A mask as (batch or 1, heads or 1, tokens or 1, tokens)."""
    return mask[(None,) * (4 - mask.dim())]


def mask_table(mask: torch.Tensor, order: TokenOrder) -> Table:
    """The table of a mask (…, tokens or 1, tokens).

    A query sees a key where the mask is True, or above minus infinity. The table is made in one look at values, for
    which a CUDA device is waited for: once for a mask that all layers share. Without values all is visible.
    """
    if isinstance(mask, FakeTensor) or mask.is_meta:
        return ((True,) * order.num_chunks,) * len(order.chunks)
    if mask.is_inference():  # which does not say when it changes
        return _looked_up(with_four_dims(mask), order)
    key = mask._version, order
    known = _tables.get(mask)
    if known is None or known[0] != key:
        known = _tables[mask] = key, _looked_up(with_four_dims(mask), order)
    table: Table = known[1]
    return table


_tables = WeakTensorKeyDictionary()  # mask -> (its version, order), table


def _looked_up(mask: torch.Tensor, order: TokenOrder) -> Table:
    seen = mask if mask.dtype == torch.bool else mask != -torch.inf
    columns = seen.flatten(0, 1).any(0).unflatten(-1, (order.num_chunks, -1)).any(-1)
    if columns.shape[0] == 1:
        return (tuple(columns[0].tolist()),) * len(order.chunks)
    chunks = columns.unflatten(0, (order.num_chunks, -1)).any(1)
    return tuple(map(tuple, chunks[list(order.chunks)].tolist()))


def view_of(table: Table, order: TokenOrder, source: int, tokens: int, *, is_causal: bool) -> View | None:
    """What this rank's queries see of the keys of rank ``source``; None: nothing.

    Args:
        table: See above.
        order: This rank's.
        source: Whose keys they are.
        tokens: That each rank has.
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
