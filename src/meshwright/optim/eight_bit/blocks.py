"""How a state is cut into blocks that share a scale, so that no layout changes which elements share one."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.functional import pad

from meshwright.optim.sharded import Kept, Layout
from meshwright.optim.sharded.regions import own_region

BLOCK_SIZE = 256
"""Elements that share a scale, at most (bitsandbytes' size since 0.44)."""


@dataclass(frozen=True)
class Blocks:
    """The blocks of one state, and what this rank holds of them.

    A state of shape (H, …) is a table of H rows; each row, of all further dims in their order, is cut into blocks of
    256 elements, the last one shorter. So a split of the first dim cuts no block. A state of one dim is one row. Where
    the row itself is split and parts end within blocks, the ranks agree on scales that all of them keep.
    """

    scales: Kept
    """The form of the scales: (H, blocks of a row), or no dims for one scale of all."""
    over: tuple[int, ...] | None
    """The parameter's dims that cut blocks: over these the scales are agreed on. None: no block is cut."""
    width: int
    """Elements of a block."""
    rows: int
    """On this rank."""
    count: int
    """Blocks that a row has on the ranks that keep the same scales."""
    first: int
    """Number among these of the first block that this rank has elements of."""
    held: int
    """Blocks of a row that this rank has elements of."""
    before: int
    """Elements of the first one that are on other ranks."""
    after: int
    """Elements of the last one that are on other ranks, or nowhere."""
    shape: tuple[int, ...]
    """Of this rank's part of the state."""
    margins: tuple[int, ...]
    """For rows of several dims, split in another than their first: the zeros before and after this rank's part that
    make its rows whole, as torch's ``pad`` takes them; empty otherwise."""

    @property
    def variant(self) -> Hashable:
        """Equal for states that can be worked on together."""
        return (self.width if self.scales.shape else None), self.over

    def cut(self, values: torch.Tensor) -> torch.Tensor:
        """This rank's part of a state in blocks, shape (blocks, width); zeros where it has no elements."""
        if self.margins:
            values = pad(values, self.margins)
        if self.before or self.after:
            values = pad(values.reshape(self.rows, self._length), (self.before, self.after))
        return values.reshape(self.rows * self.held, self.width)

    def join(self, blocks: torch.Tensor) -> torch.Tensor:
        """The part of a state that these blocks are of, contiguous; a view of them where nothing was added."""
        if self.before or self.after:
            blocks = blocks.view(self.rows, self.held * self.width).narrow(1, self.before, self._length)
        if self.margins:
            blocks = pad(blocks.reshape(self._padded_shape()), [-margin for margin in self.margins])
        return blocks.reshape(self.shape).contiguous()

    def held_scales(self, scales: torch.Tensor) -> torch.Tensor:
        """A view of those scales that belong to this rank's blocks, shape (rows, held)."""
        return scales.view(self.rows, self.count).narrow(1, self.first, self.held)

    def spread(self, largest: torch.Tensor) -> torch.Tensor:
        """The scales with 0 for blocks that this rank holds nothing of.

        Args:
            largest: Of this rank's blocks, shape (blocks,).
        """
        scales = largest.new_zeros(self.rows, self.count)
        self.held_scales(scales).copy_(largest.view(self.rows, self.held))
        return scales.view([self.rows, self.count][2 - len(self.scales.shape) :])

    @property
    def _length(self) -> int:
        """Elements that this rank has of a row."""
        return self.held * self.width - self.before - self.after

    def _padded_shape(self) -> list[int]:
        padding = [(0, 0)] * len(self.shape)
        for number in range(len(self.margins) // 2):
            padding[-1 - number] = self.margins[2 * number], self.margins[2 * number + 1]
        return [size + left + right for size, (left, right) in zip(self.shape, padding, strict=True)]


_MADE: WeakKeyDictionary[Layout, dict[Any, Blocks]] = WeakKeyDictionary()


def blocks_of(layout: Layout, form: Kept, block_wise: bool = True) -> Blocks:
    """The blocks of a state of this form, of a parameter of this layout.

    Args:
        layout: The parameter's.
        form: The state's.
        block_wise: False for one block that is the whole state.
    """
    made = _MADE.setdefault(layout, {})
    key = (form, block_wise)
    if key not in made:
        made[key] = _cut_by_rows(layout, form) if block_wise else _one_block(layout, form)
    return made[key]


def _one_block(layout: Layout, form: Kept) -> Blocks:
    state = layout.restricted(form)
    split = [dim for own, dim in enumerate(form.dims) if dim is not None and not state.is_whole(own)]
    numel = math.prod(state.local_shape)
    return Blocks(
        scales=Kept((), ()), over=tuple(split) or None, width=max(numel, 1), rows=1, count=1, first=0,
        held=min(numel, 1), before=0, after=0, shape=state.local_shape, margins=(),
    )  # fmt: skip


def _cut_by_rows(layout: Layout, form: Kept) -> Blocks:
    state = layout.restricted(form)
    lead = max(min(1, state.ndim - 1), 0)
    length = math.prod(state.shape[lead:])
    width = min(BLOCK_SIZE, max(length, 1))
    count = -(-length // width)
    split = [dim for dim in range(lead, state.ndim) if not state.is_whole(dim)]
    between = not split or _parts_end_between_blocks(state, lead, split, width)
    kept_dims = (*form.dims[:lead], form.dims[lead] if split and between else None)
    start, here, margins = (0, math.prod(state.local_shape[lead:]), ()) if between else _place(state, lead, split)
    first, before = divmod(start, width) if here else (0, 0)
    held = -(-(before + here) // width)
    return Blocks(
        scales=Kept((*state.shape[:lead], count), kept_dims),
        over=None if between else tuple(dim for dim in (form.dims[own] for own in split) if dim is not None),
        width=width,
        rows=math.prod(state.local_shape[:lead]),
        count=held if between else count,
        first=first,
        held=held,
        before=before,
        after=held * width - before - here,
        shape=state.local_shape,
        margins=margins,
    )


def _parts_end_between_blocks(state: Layout, lead: int, split: Sequence[int], width: int) -> bool:
    """Whether rows are split into equal parts of whole blocks, so that scales can be split the same way."""
    parts = math.prod(axis.size for axis in state.axes[lead])
    inner = math.prod(state.shape[lead + 1 :])
    return list(split) == [lead] and state.shape[lead] % parts == 0 and state.shape[lead] // parts * inner % width == 0


def _place(state: Layout, lead: int, split: Sequence[int]) -> tuple[int, int, tuple[int, ...]]:
    """Where in a whole row this rank's part begins, its length, and the margins that make its further dims whole."""
    block = own_region(state)
    margins: list[int] = []
    for dim in reversed(range(lead + 1, state.ndim) if any(dim > lead for dim in split) else ()):
        margins += [block.offset[dim], state.shape[dim] - block.offset[dim] - block.size[dim]]
    inner = math.prod(state.shape[lead + 1 :])
    return block.offset[lead] * inner, block.size[lead] * inner, tuple(margins)
