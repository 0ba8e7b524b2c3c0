"""Quantise Adam moments to 8 bits in blocks whose scales do not depend on the layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.functional import pad

from meshwright.optim.sharded import Chunk, Kept, Layout, Sum, TensorList
from meshwright.optim.sharded.tensor_layout import own_region
from meshwright.runtime.torch_internals.optim import foreach_copy_

NAMES = ("exp_avg", "exp_avg_sq")
_CODES, _SCALES = "_codes", "_absmax"

FormOf = Callable[[Layout], Kept]
"""From a parameter's layout to the form of its moments."""


def is_eight_bit(form: Kept, group: Mapping[str, Any]) -> bool:
    """Return whether a state is kept in 8 bits.

    By its size on all ranks together, so that no layout changes the answer.
    """
    return bool(group["nbits"] == 8) and math.prod(form.shape) >= group["min_8bit_size"]


def kept_moments(layout: Layout, form: Kept, group: Mapping[str, Any]) -> dict[str, Kept]:
    """Return the states in which two moments of this form are kept: themselves, or codes and scales."""
    if not is_eight_bit(form, group):
        return dict.fromkeys(NAMES, form)
    codes, scales = replace(form, dtype=torch.uint8), blocks_of(layout, form, group["block_wise"]).scales
    return {f"{name}{kind}": kept for name in NAMES for kind, kept in ((_CODES, codes), (_SCALES, scales))}


def variant_of_moments(layout: Layout, form: Kept, group: Mapping[str, Any]) -> Hashable:
    """Return what the moments of parameters must share to be worked on together."""
    return blocks_of(layout, form, group["block_wise"]).variant if is_eight_bit(form, group) else None


class Moments:
    """Both moments of a chunk's parameters, for one step.

    Args:
        chunk: With the states of :func:`kept_moments`.
        form_of: Their form by layout.
    """

    def __init__(self, chunk: Chunk, form_of: FormOf) -> None:
        self._packed: list[_Packed] = []
        if NAMES[0] in chunk.states:
            self._values = [chunk.states[name] for name in NAMES]
            return
        blocks = [blocks_of(layout, form_of(layout), chunk.group["block_wise"]) for layout in chunk.layouts]
        self._packed = [_Packed(chunk, name, blocks, signed=name == NAMES[0]) for name in NAMES]
        self._values = [packed.read() for packed in self._packed]

    @property
    def first(self) -> TensorList:
        """Means of the gradients, fp32, to be changed in place."""
        return self._values[0]

    @property
    def second(self) -> TensorList:
        """Means of their squares, fp32, to be changed in place."""
        return self._values[1]

    def keep(self) -> Generator[list[Sum], list[Any], None]:
        """Write the changed moments into the states; ask where ranks share a scale."""
        for packed, values in zip(self._packed, self._values, strict=bool(self._packed)):
            packed.take(values)
        over = self._packed[0].over if self._packed else None
        if over is not None:
            answers = yield [Sum(packed.partial_scales(), over, largest=True) for packed in self._packed]
            for packed, answer in zip(self._packed, answers, strict=True):
                packed.agree(answer)
        for packed in self._packed:
            packed.write()


class _Packed:
    """One moment of a chunk's parameters in codes and scales."""

    def __init__(self, chunk: Chunk, name: str, blocks: list[Blocks], signed: bool) -> None:
        self._codes, self._scales = chunk.states[name + _CODES], chunk.states[name + _SCALES]
        self._blocks = blocks
        self._codec = Codec.on(signed, chunk.device)
        self.over = blocks[0].over
        one_width = blocks[0].scales.shape  # otherwise every state is a block of its own size
        self._batches = [range(len(blocks))] if one_width else [range(index, index + 1) for index in range(len(blocks))]
        self._cut: list[torch.Tensor] = []
        self._largest: list[torch.Tensor] = []

    def read(self) -> TensorList:
        """Return the values, fp32."""
        values: list[torch.Tensor] = []
        for batch in self._batches:
            cut = self._codec.decode(_joined([self._blocks[index].cut(self._codes.tensors[index]) for index in batch]))
            scales = [self._blocks[index].held_scales(self._scales.tensors[index]).reshape(-1) for index in batch]
            cut.mul_(_joined(scales).unsqueeze(1))
            values += [
                self._blocks[index].join(part) for index, part in zip(batch, self._split(cut, batch), strict=True)
            ]
        return TensorList(values)

    def take(self, values: TensorList) -> None:
        """New values, and the largest of each of this rank's blocks."""
        self._cut = [
            _joined([self._blocks[index].cut(values.tensors[index]) for index in batch]) for batch in self._batches
        ]
        self._largest = [cut.abs().amax(1) for cut in self._cut]

    def partial_scales(self) -> TensorList:
        """Return the largest values of all of the row's blocks, as far as this rank knows."""
        parts = self._by_member(self._largest)
        return TensorList([blocks.spread(part) for blocks, part in zip(self._blocks, parts, strict=True)])

    def agree(self, scales: TensorList) -> None:
        """What the ranks have agreed on."""
        held = [blocks.held_scales(part).reshape(-1) for blocks, part in zip(self._blocks, scales, strict=True)]
        self._largest = [_joined([held[index] for index in batch]) for batch in self._batches]
        foreach_copy_(self._scales.tensors, scales.tensors)

    def write(self) -> None:
        """Codes and scales of the new values."""
        codes: list[torch.Tensor] = []
        for batch, cut, largest in zip(self._batches, self._cut, self._largest, strict=True):
            # A block of zeros divides by the smallest number, and stays zeros.
            scaled = cut.div_(largest.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1))
            parts = self._split(self._codec.encode(scaled), batch)
            codes += [self._blocks[index].join(part) for index, part in zip(batch, parts, strict=True)]
        foreach_copy_(self._codes.tensors, codes)
        if self.over is None:
            parts = [
                part.view_as(scale) for part, scale in zip(self._by_member(self._largest), self._scales, strict=True)
            ]
            foreach_copy_(self._scales.tensors, parts)
        self._cut = []

    def _split(self, cut: torch.Tensor, batch: range) -> list[torch.Tensor]:
        """Blocks, or a number of each, by member."""
        return list(cut.split([self._blocks[index].rows * self._blocks[index].held for index in batch]))

    def _by_member(self, batches: list[torch.Tensor]) -> list[torch.Tensor]:
        return [part for batch, cut in zip(self._batches, batches, strict=True) for part in self._split(cut, batch)]


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0]


# --- How a state is cut into blocks that share a scale, so that no layout changes which elements share one.

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
        """Return the part of a state that these blocks are of, contiguous; a view of them where nothing was added."""
        if self.before or self.after:
            blocks = blocks.view(self.rows, self.held * self.width).narrow(1, self.before, self._length)
        if self.margins:
            blocks = pad(blocks.reshape(self._padded_shape()), [-margin for margin in self.margins])
        return blocks.reshape(self.shape).contiguous()

    def held_scales(self, scales: torch.Tensor) -> torch.Tensor:
        """A view of those scales that belong to this rank's blocks, shape (rows, held)."""
        return scales.view(self.rows, self.count).narrow(1, self.first, self.held)

    def spread(self, largest: torch.Tensor) -> torch.Tensor:
        """Return the scales with 0 for blocks that this rank holds nothing of.

        Args:
            largest: Of this rank's blocks, shape (blocks,).
        """
        scales = largest.new_zeros(self.rows, self.count)
        self.held_scales(scales).copy_(largest.view(self.rows, self.held))
        return scales.view([self.rows, self.count][2 - len(self.scales.shape) :])

    @property
    def _length(self) -> int:
        """Return the elements that this rank has of a row."""
        return self.held * self.width - self.before - self.after

    def _padded_shape(self) -> list[int]:
        padding = [(0, 0)] * len(self.shape)
        for number in range(len(self.margins) // 2):
            padding[-1 - number] = self.margins[2 * number], self.margins[2 * number + 1]
        return [size + left + right for size, (left, right) in zip(self.shape, padding, strict=True)]


_MADE: WeakKeyDictionary[Layout, dict[Any, Blocks]] = WeakKeyDictionary()


def blocks_of(layout: Layout, form: Kept, block_wise: bool = True) -> Blocks:
    """Return the blocks of a state of this form, of a parameter of this layout.

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
    """Return whether rows are split into equal parts of whole blocks, so that scales can be split the same way."""
    parts = math.prod(axis.size for axis in state.axes[lead])
    inner = math.prod(state.shape[lead + 1 :])
    return list(split) == [lead] and state.shape[lead] % parts == 0 and state.shape[lead] // parts * inner % width == 0


def _place(state: Layout, lead: int, split: Sequence[int]) -> tuple[int, int, tuple[int, ...]]:
    """Return where in a whole row this rank's part begins, its length, and the margins that make its further dims whole."""
    block = own_region(state)
    margins: list[int] = []
    for dim in reversed(range(lead + 1, state.ndim) if any(dim > lead for dim in split) else ()):
        margins += [block.offset[dim], state.shape[dim] - block.offset[dim] - block.size[dim]]
    inner = math.prod(state.shape[lead + 1 :])
    return block.offset[lead] * inner, block.size[lead] * inner, tuple(margins)


# --- Numbers from −1 to 1 in one byte: dynamic maps, which are precise for small numbers too (Dettmers et al. 2022).

_DECADES = 7
_BINS = 1 << 16  # of fp32 numbers with equal sign, exponent and first 7 bits of the mantissa


@cache
def dynamic_map(signed: bool) -> torch.Tensor:
    """Return the 256 numbers that a byte stands for, ascending, fp32 on the CPU (arXiv 2110.02861, section 2.1).

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
        """Return the one for a device; made once."""
        return _made(signed, device)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return the codes of numbers from −1 to 1, uint8 of the same shape; NaN gets the last one."""
        flat = values.reshape(-1)
        bins = (flat.view(torch.int32) >> 16).bitwise_and_(_BINS - 1)
        codes = self._lower_codes.index_select(0, bins)
        # (x > border) as a number: the code above, where the bin has a border and x is beyond it.
        codes += flat > self._borders.index_select(0, codes.int())
        return codes.view(values.shape)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the numbers of codes, fp32 of the same shape."""
        return self._numbers.index_select(0, codes.reshape(-1).int()).view(codes.shape)


@cache
def _made(signed: bool, device: torch.device) -> Codec:
    return Codec(signed, device)


def _smallest_of_bins() -> torch.Tensor:
    """Return the smallest number with each pattern of 16 first bits.

    Of negative ones that is the one with all others set.
    """
    first = torch.arange(_BINS, dtype=torch.int64, device="cpu") << 16
    bits = torch.where(first >= 1 << 31, first + 0xFFFF - (1 << 32), first)
    return bits.to(torch.int32).view(torch.float32)
