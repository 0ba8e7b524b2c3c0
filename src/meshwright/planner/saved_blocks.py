"""What each of a model's blocks saves for backward, by the storages that were recorded."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from torch import nn

from meshwright.cost import BlockSaves


class Recorded(Protocol):
    """What :mod:`meshwright.planner.saved` has recorded."""

    sizes: dict[int, int]
    savers: dict[int, list[tuple[nn.Module, ...]]]
    inputs: dict[nn.Module, dict[int, int]]
    weights: set[int]


def first_blocks(
    saved: Recorded, blocks: list[nn.Module], recomputed: Collection[nn.Module] = ()
) -> tuple[BlockSaves, ...]:
    """What copying everything that the first block, the first two, and so on save would change.

    Args:
        saved: A forward pass.
        blocks: The blocks, in the order in which they run.
        recomputed: Modules that keep nothing but their inputs.
    """
    place_of = {module: place for place, block in enumerate(blocks) for module in block.modules()}
    places = _places(saved, place_of, set(recomputed))
    sizes = {storage: size for module in recomputed for storage, size in saved.inputs[module].items()} | saved.sizes
    freed, copied = [0] * len(blocks), [0] * len(blocks)
    for storage, found in places.items():
        inside = [place for place in found if place is not None]
        if inside:
            copied[min(inside)] += sizes[storage]
        if inside and None not in found:
            freed[max(inside)] += sizes[storage]
    return tuple(BlockSaves(sum(freed[: count + 1]), sum(copied[: count + 1])) for count in range(len(blocks)))


def _places(
    saved: Recorded, place_of: Mapping[nn.Module, int], recomputed: set[nn.Module]
) -> dict[int, set[int | None]]:
    """By storage: the blocks that save it, and None for whatever is in no block."""
    places: dict[int, set[int | None]] = {}
    for storage, stacks in saved.savers.items():
        for stack in stacks:
            if storage not in saved.weights and not recomputed.intersection(stack):
                inside = [place_of[module] for module in stack if module in place_of]
                places.setdefault(storage, set()).add(inside[0] if inside else None)
    for module in recomputed:
        for storage in saved.inputs[module].keys() - saved.weights:
            places.setdefault(storage, set()).add(place_of.get(module))
    return places
