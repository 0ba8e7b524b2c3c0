"""Adam moments in 8 bits, in blocks that do not depend on the layout."""

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
    """Return whether a state is stored in 8 bits, by its whole size, so that the layout does not matter."""
    return bool(group["nbits"] == 8) and math.prod(form.shape) >= group["min_8bit_size"]


def kept_moments(layout: Layout, form: Kept, group: Mapping[str, Any]) -> dict[str, Kept]:
    """Return the states of two moments of this form: themselves, or codes and scales."""
    if not is_eight_bit(form, group):
        return dict.fromkeys(NAMES, form)
    codes, scales = replace(form, dtype=torch.uint8), blocks_of(layout, form, group["block_wise"]).scales
    return {f"{name}{kind}": each for name in NAMES for kind, each in ((_CODES, codes), (_SCALES, scales))}


def variant_of_moments(layout: Layout, form: Kept, group: Mapping[str, Any]) -> Hashable:
    """Return a key that the moments of one chunk must share."""
    return blocks_of(layout, form, group["block_wise"]).variant if is_eight_bit(form, group) else None


class Moments:
    """Both moments of a chunk's parameters, for one step.

    Args:
        chunk: A chunk with the states of :func:`kept_moments`.
        form_of: Returns the moments' form by layout.
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
        """Return means of the gradients, fp32, to be changed in place."""
        return self._values[0]

    @property
    def second(self) -> TensorList:
        """Return means of their squares, fp32, to be changed in place."""
        return self._values[1]

    def keep(self) -> Generator[list[Sum], list[Any], None]:
        """Write the changed moments into the states, after asking for scales that ranks share."""
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
        one_width = blocks[0].scales.shape  # else every state is one block, of its own size
        self._batches = [range(len(blocks))] if one_width else [range(index, index + 1) for index in range(len(blocks))]
        self._cut: list[torch.Tensor] = []
        self._largest: list[torch.Tensor] = []

    def read(self) -> TensorList:
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
        """Take new values, and find the largest of each of this rank's blocks."""
        self._cut = [
            _joined([self._blocks[index].cut(values.tensors[index]) for index in batch]) for batch in self._batches
        ]
        self._largest = [cut.abs().amax(1) for cut in self._cut]

    def partial_scales(self) -> TensorList:
        """Return the largest values of the blocks of each row, 0 for blocks on other ranks."""
        parts = self._by_member(self._largest)
        return TensorList([blocks.spread(part) for blocks, part in zip(self._blocks, parts, strict=True)])

    def agree(self, scales: TensorList) -> None:
        """Take the scales that ranks have agreed on."""
        held = [blocks.held_scales(part).reshape(-1) for blocks, part in zip(self._blocks, scales, strict=True)]
        self._largest = [_joined([held[index] for index in batch]) for batch in self._batches]
        foreach_copy_(self._scales.tensors, scales.tensors)

    def write(self) -> None:
        """Write codes and scales of the new values."""
        codes: list[torch.Tensor] = []
        for batch, cut, largest in zip(self._batches, self._cut, self._largest, strict=True):
            # A block of zeros is divided by the smallest number and stays zero.
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
        """Split blocks, or numbers of blocks, by member."""
        return list(cut.split([self._blocks[index].rows * self._blocks[index].held for index in batch]))

    def _by_member(self, batches: list[torch.Tensor]) -> list[torch.Tensor]:
        return [part for batch, cut in zip(self._batches, batches, strict=True) for part in self._split(cut, batch)]


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0]


# --- Blocks of elements that share a scale, the same on every layout

BLOCK_SIZE = 256
"""Most elements that share a scale (bitsandbytes' size since 0.44)."""


@dataclass(frozen=True)
class Blocks:
    """The blocks of one state, and this rank's part of them.

    A state of shape (H, …) is a table of H rows. Each row, of all further dims in their order, is cut into blocks of
    256 elements, the last one shorter; a split of the first dim therefore cuts no block. A state of one dim is one
    row. Where rows are split and parts end within blocks, the ranks agree on the scales and all of them store these.
    """

    scales: Kept
    """The form of the scales: (H, blocks of a row), or no dims for one scale of all."""
    over: tuple[int, ...] | None
    """The parameter's dims whose splits cut blocks, over which ranks agree on scales. None: no block is cut."""
    width: int
    """Elements of a block."""
    rows: int
    """Rows on this rank."""
    count: int
    """Blocks of a row for which this rank stores scales."""
    first: int
    """Index among these of the first block that this rank has elements of."""
    held: int
    """Number of blocks of a row that this rank has elements of."""
    before: int
    """Elements of the first of these that are on other ranks."""
    after: int
    """Elements of the last of these that are on other ranks, or do not exist."""
    shape: tuple[int, ...]
    """Shape of this rank's part of the state."""
    margins: tuple[int, ...]
    """Zeros before and after this rank's part that make its rows whole, as torch's ``pad`` takes them: for rows of
    several dims that are split in another than their first. Empty otherwise."""

    @property
    def variant(self) -> Hashable:
        """Return a key that is equal for states of one chunk."""
        return (self.width if self.scales.shape else None), self.over

    def cut(self, values: torch.Tensor) -> torch.Tensor:
        """Cut this rank's part of a state into blocks, shape (blocks, width), with zeros for missing elements."""
        if self.margins:
            values = pad(values, self.margins)
        if self.before or self.after:
            values = pad(values.reshape(self.rows, self._length), (self.before, self.after))
        return values.reshape(self.rows * self.held, self.width)

    def join(self, blocks: torch.Tensor) -> torch.Tensor:
        """Join blocks to this rank's part of a state, contiguous; a view where nothing was padded."""
        if self.before or self.after:
            blocks = blocks.view(self.rows, self.held * self.width).narrow(1, self.before, self._length)
        if self.margins:
            blocks = pad(blocks.reshape(self._padded_shape()), [-margin for margin in self.margins])
        return blocks.reshape(self.shape).contiguous()

    def held_scales(self, scales: torch.Tensor) -> torch.Tensor:
        """Return a view of the scales of this rank's blocks, shape (rows, held)."""
        return scales.view(self.rows, self.count).narrow(1, self.first, self.held)

    def spread(self, largest: torch.Tensor) -> torch.Tensor:
        """Return scales of all ``count`` blocks, with 0 for those that this rank has no elements of.

        Args:
            largest: The largest value of each of this rank's blocks, shape (blocks,).
        """
        scales = largest.new_zeros(self.rows, self.count)
        self.held_scales(scales).copy_(largest.view(self.rows, self.held))
        return scales.view([self.rows, self.count][2 - len(self.scales.shape) :])

    @property
    def _length(self) -> int:
        """Return the number of this rank's elements of a row."""
        return self.held * self.width - self.before - self.after

    def _padded_shape(self) -> list[int]:
        padding = [(0, 0)] * len(self.shape)
        for number in range(len(self.margins) // 2):
            padding[-1 - number] = self.margins[2 * number], self.margins[2 * number + 1]
        return [size + left + right for size, (left, right) in zip(self.shape, padding, strict=True)]


_MADE: WeakKeyDictionary[Layout, dict[Any, Blocks]] = WeakKeyDictionary()


def blocks_of(layout: Layout, form: Kept, block_wise: bool = True) -> Blocks:
    """Return the blocks of a state, from a cache.

    Args:
        layout: The parameter's layout.
        form: The state's form.
        block_wise: False for one block of the whole state.
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
    """Return whether rows are split into equal parts of whole blocks, so that scales are split in the same way."""
    parts = math.prod(axis.size for axis in state.axes[lead])
    inner = math.prod(state.shape[lead + 1 :])
    return list(split) == [lead] and state.shape[lead] % parts == 0 and state.shape[lead] // parts * inner % width == 0


def _place(state: Layout, lead: int, split: Sequence[int]) -> tuple[int, int, tuple[int, ...]]:
    """Return offset and length of this rank's part of a row, and the margins that make its further dims whole."""
    block = own_region(state)
    margins: list[int] = []
    for dim in reversed(range(lead + 1, state.ndim) if any(dim > lead for dim in split) else ()):
        margins += [block.offset[dim], state.shape[dim] - block.offset[dim] - block.size[dim]]
    inner = math.prod(state.shape[lead + 1 :])
    return block.offset[lead] * inner, block.size[lead] * inner, tuple(margins)


# --- Dynamic maps of numbers from −1 to 1 to one byte, precise for small numbers (Dettmers et al. 2022)

_DECADES = 7
_BINS = 1 << 16  # sets of fp32 numbers with equal sign, exponent and first 7 bits of the mantissa


@cache
def dynamic_map(signed: bool) -> torch.Tensor:
    """Return the 256 numbers that a byte stands for, ascending, fp32 on the CPU (arXiv 2110.02861, section 2.1).

    A code names a decade from 10⁻⁶ to 1 and a step in it, and stands for the middle of the step. The number of steps
    doubles from decade to decade: the largest has 64 (128 unsigned), the smallest 1 (2). 0 and 1 have codes of their
    own. Signed codes are the same numbers with both signs, without −1.
    """
    numbers = [torch.tensor([0.0, 1.0], dtype=torch.float64, device="cpu")]
    for decade in range(_DECADES):
        edges = torch.linspace(0.1, 1.0, (1 if signed else 2) * 2**decade + 1, dtype=torch.float64, device="cpu")
        middles = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade - _DECADES + 1)
        numbers += [middles, -middles] if signed else [middles]
    return torch.cat(numbers).sort().values.float()


class Codec:
    """A dynamic map on one device, from numbers to codes and back.

    The code is that of the nearest number, but in an unsigned map only 0 has the code of 0: a second moment rounded to
    0 would make the next step as large as 1 / eps.

    The first 16 bits of a number determine its code up to one, as no two borders between codes share them. A table
    lookup by these bits is ten times faster on a CPU than a search.

    Args:
        signed: Whether for first moments; second moments are unsigned.
        device: The device of the numbers.
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
        """Return the codec of a device, from a cache."""
        return _made(signed, device)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return the codes of numbers from −1 to 1, uint8 of the same shape; NaN gets the last code."""
        flat = values.reshape(-1)
        bins = (flat.view(torch.int32) >> 16).bitwise_and_(_BINS - 1)
        codes = self._lower_codes.index_select(0, bins)
        # (x > border) as a number: one code higher, where the bin contains a border and x is beyond it.
        codes += flat > self._borders.index_select(0, codes.int())
        return codes.view(values.shape)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the numbers of codes, fp32 of the same shape."""
        return self._numbers.index_select(0, codes.reshape(-1).int()).view(codes.shape)


@cache
def _made(signed: bool, device: torch.device) -> Codec:
    return Codec(signed, device)


def _smallest_of_bins() -> torch.Tensor:
    """Return the smallest number with each pattern of 16 first bits."""
    # For negative numbers that is the one with all other bits set.
    first = torch.arange(_BINS, dtype=torch.int64, device="cpu") << 16
    bits = torch.where(first >= 1 << 31, first + 0xFFFF - (1 << 32), first)
    return bits.to(torch.int32).view(torch.float32)
