"""The two moments of Adam in fp32, or in 8 bits between steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Hashable, Mapping
from dataclasses import replace
from typing import Any

import torch

from meshwright.optim.eight_bit.blocks import Blocks, blocks_of
from meshwright.optim.eight_bit.maps import Codec
from meshwright.optim.sharded import Chunk, Kept, Layout, Sum, TensorList

NAMES = ("exp_avg", "exp_avg_sq")
_CODES, _SCALES = "_codes", "_absmax"

FormOf = Callable[[Layout], Kept]
"""From a parameter's layout to the form of its moments."""


def is_eight_bit(form: Kept, group: Mapping[str, Any]) -> bool:
    """Whether a state is kept in 8 bits: by its size on all ranks together, so that no layout changes the answer."""
    return bool(group["nbits"] == 8) and math.prod(form.shape) >= group["min_8bit_size"]


def kept_moments(layout: Layout, form: Kept, group: Mapping[str, Any]) -> dict[str, Kept]:
    """The states in which two moments of this form are kept: themselves, or codes and scales."""
    if not is_eight_bit(form, group):
        return dict.fromkeys(NAMES, form)
    codes, scales = replace(form, dtype=torch.uint8), blocks_of(layout, form, group["block_wise"]).scales
    return {f"{name}{kind}": kept for name in NAMES for kind, kept in ((_CODES, codes), (_SCALES, scales))}


def variant_of_moments(layout: Layout, form: Kept, group: Mapping[str, Any]) -> Hashable:
    """What the moments of parameters must share to be worked on together."""
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
        """Writes the changed moments into the states; asks where ranks share a scale."""
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
        """The values, fp32."""
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
        """The largest values of all of the row's blocks, as far as this rank knows."""
        parts = self._by_member(self._largest)
        return TensorList([blocks.spread(part) for blocks, part in zip(self._blocks, parts, strict=True)])

    def agree(self, scales: TensorList) -> None:
        """What the ranks have agreed on."""
        held = [blocks.held_scales(part).reshape(-1) for blocks, part in zip(self._blocks, scales, strict=True)]
        self._largest = [_joined([held[index] for index in batch]) for batch in self._batches]
        torch._foreach_copy_(self._scales.tensors, scales.tensors)

    def write(self) -> None:
        """Codes and scales of the new values."""
        codes: list[torch.Tensor] = []
        for batch, cut, largest in zip(self._batches, self._cut, self._largest, strict=True):
            # A block of zeros divides by the smallest number, and stays zeros.
            scaled = cut.div_(largest.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1))
            parts = self._split(self._codec.encode(scaled), batch)
            codes += [self._blocks[index].join(part) for index, part in zip(batch, parts, strict=True)]
        torch._foreach_copy_(self._codes.tensors, codes)
        if self.over is None:
            parts = [
                part.view_as(scale) for part, scale in zip(self._by_member(self._largest), self._scales, strict=True)
            ]
            torch._foreach_copy_(self._scales.tensors, parts)
        self._cut = []

    def _split(self, cut: torch.Tensor, batch: range) -> list[torch.Tensor]:
        """Blocks, or a number of each, by member."""
        return list(cut.split([self._blocks[index].rows * self._blocks[index].held for index in batch]))

    def _by_member(self, batches: list[torch.Tensor]) -> list[torch.Tensor]:
        return [part for batch, cut in zip(self._batches, batches, strict=True) for part in self._split(cut, batch)]


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0]
