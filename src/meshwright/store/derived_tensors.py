"""Values that follow from those of stored tensors: bases in 4 bits, and the magnitudes of DoRA.

Both are read by parts, like the tensors that they are computed from: a rank reads what its own part follows from, some
megabytes at a time, and never holds a whole weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.nn.four_bit import BLOCK, SCALE_BYTES, FourBitLinear, quantized
from meshwright.store.stored_tensors import StoredTensor

_PIECE = 2**17  # values in memory at a time; on CPUs bitsandbytes takes a hundred bytes for each


def with_derived(
    model: nn.Module, stored: Mapping[str, StoredTensor], entries: Mapping[str, torch.Tensor]
) -> dict[str, StoredTensor]:
    """Return stored tensors by a model's names, with those of its entries that are computed from stored ones.

    Args:
        model: It may hold 4-bit layers and peft's DoRA, and be on ``meta``.
        stored: By the model's names; of layers in 4 bits the weights as they are before.
        entries: The model's state dict.
    """
    found = dict(stored)
    for path, module in model.named_modules():
        name = f"{path}.weight" if path else "weight"
        base = stored.get(name)
        if isinstance(module, FourBitLinear) and base is not None:
            # Of other shapes it stays, to be refused by its own shape.
            if base.shape == (module.out_features, module.in_features):
                found[name] = FourBitBytes(base, module.stored_dtype)
            continue
        norms = getattr(module, "lora_magnitude_vector", None)
        if isinstance(norms, nn.ModuleDict):
            found |= _magnitudes(path, norms, stored, entries)
    return found


def _magnitudes(
    path: str, layers: nn.ModuleDict, stored: Mapping[str, StoredTensor], entries: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the magnitudes with which the adapters of a layer begin, while they add nothing to its weights."""
    base = f"{path}.base_layer.weight"
    for name, layer in layers.items():
        # Those of embeddings and convolutions are other norms.
        if type(layer).__name__ == "DoraLinearLayer" and base in stored and len(stored[base].shape) == 2:
            along: Any = 0 if layer.fan_in_fan_out else 1
            yield f"{path}.lora_magnitude_vector.{name}.weight", Norms(stored[base], along, entries[base].dtype)


def _pieces(first: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    for at in range(first, end, size):
        yield at, min(at + size, end)


@dataclass(frozen=True)
class Norms(StoredTensor):
    """The norms of a matrix along one of its two dims, as peft computes those of a whole one in memory."""

    source: StoredTensor
    along: int
    dtype: torch.dtype
    """Type of the matrix in the model, and of the norms."""

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Return the number of norms."""
        return (self.source.shape[1 - self.along],)

    @property
    def by_parts(self) -> bool:
        """Return whether the matrix can be read by parts."""
        return self.source.by_parts

    @property
    def num_bytes(self) -> int:
        """Return 0: the matrix is counted as itself."""
        return 0

    def read_into(self, out: torch.Tensor, start: Sequence[int]) -> None:
        """Fill ``out`` with its norms, some rows or columns of the matrix at a time."""
        length = self.source.shape[self.along]
        size = max(1, _PIECE // max(1, length)) if self.by_parts else max(1, len(out))
        for first, end in _pieces(start[0], start[0] + len(out), size):
            index = [slice(first, end), slice(0, length)]
            values = self.source.read(tuple(index if self.along else index[::-1]), self.dtype)
            out[first - start[0] : end - start[0]] = torch.linalg.norm(values, dim=self.along)


@dataclass(frozen=True)
class FourBitBytes(StoredTensor):
    """The bytes of a :class:`FourBitLinear`: the scales of its weights, and then their codes."""

    source: StoredTensor
    """The weights (out · in)."""
    values_dtype: torch.dtype
    """Type in which they are quantized."""
    dtype = torch.uint8

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Return the number of bytes."""
        return (self._scales_end + -(-self._count // 2),)

    @property
    def by_parts(self) -> bool:
        """Return whether the weights can be read by parts."""
        return self.source.by_parts

    @property
    def num_bytes(self) -> int:
        """Return the size of the weights, as they are stored."""
        return self.source.num_bytes

    @property
    def _count(self) -> int:
        return self.source.shape[0] * self.source.shape[1]

    @property
    def _scales_end(self) -> int:
        return -(-self._count // BLOCK) * SCALE_BYTES

    def read_into(self, out: torch.Tensor, start: Sequence[int]) -> None:
        """Fill ``out`` with its bytes: of a rank whose part begins among the scales, both of scales and of codes."""
        first, end = start[0], start[0] + len(out)
        scales_end = self._scales_end
        if first < scales_end:
            self._fill(out[: scales_end - first], first, SCALE_BYTES, 0)
        if end > scales_end:
            at = max(first, scales_end)
            self._fill(out[at - first :], at - scales_end, BLOCK // 2, 1)

    def _fill(self, out: torch.Tensor, first: int, width: int, which: int) -> None:
        """Fill ``out`` from byte ``first`` of the scales (``which`` is 0) or the codes (1), ``width`` to a block."""
        end = first + len(out)
        size = _PIECE // BLOCK if self.by_parts else -(-self._count // BLOCK)
        for block, last in _pieces(first // width, -(-end // width), size):
            made = quantized(self._values(block * BLOCK, min(last * BLOCK, self._count)))[which]
            at = block * width
            low, high = max(first, at), min(end, at + len(made))
            out[low - first : high - first] = made[low - at : high - at]

    def _values(self, first: int, end: int) -> torch.Tensor:
        """Read a stretch of the weights as they lie one behind the other, by the rows that hold it."""
        width = self.source.shape[1]
        row = first // width
        rows = self.source.read((slice(row, -(-end // width)), slice(0, width)), self.values_dtype)
        return rows.flatten()[first - row * width : end - row * width]
