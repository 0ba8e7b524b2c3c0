"""From a recorded forward pass to plain data: what it saves, and what recomputing each class of module would change."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from torch import nn

from meshwright.cost import Activations, Placed, RecomputePart
from meshwright.nn import class_names, find_blocks
from meshwright.planner.saved import SavedTensors
from meshwright.planner.saved_blocks import first_blocks
from meshwright.planner.work import PlacedWork


def summarise(model: nn.Module, saved: SavedTensors) -> Activations:
    """What the forward pass of a plain model keeps, and what recomputation can change of that."""
    block_classes = {class_names(block)[0] for _, block in find_blocks(model)}
    by_class: dict[tuple[str, ...], list[nn.Module]] = {}
    for module in saved.inputs:
        if module is not model:
            by_class.setdefault(tuple(class_names(module)), []).append(module)
    blocks = [block for _, block in find_blocks(model)]
    parts = tuple(_part(classes, modules, saved, blocks) for classes, modules in by_class.items())
    sizes = [(saved.places[s], size) for s, size in saved.sizes.items() if s not in saved.weights]
    named = tuple(sorted(block_classes))
    return Activations(saved.bytes, parts, named, saved_at=_grouped(sizes), first_blocks=first_blocks(saved, blocks))


def with_flops(activations: Activations, work: PlacedWork, placed: Placed) -> Activations:
    """The same with the operations of every place."""
    parts = tuple(
        dataclasses.replace(part, flops_at=_grouped(({place}, flops) for place, flops in work.of(part.classes)))
        for part in activations.parts
    )
    return dataclasses.replace(activations, parts=parts, flops_at=placed)


def _grouped(amounts: Iterable[tuple[set[int], int]]) -> Placed:
    found: dict[tuple[int, ...], int] = {}
    for places, amount in amounts:
        key = tuple(sorted(places))
        found[key] = found.get(key, 0) + amount
    return tuple(found.items())


def _part(
    classes: tuple[str, ...], modules: list[nn.Module], saved: SavedTensors, blocks: list[nn.Module]
) -> RecomputePart:
    """What changes when all modules of one class are recomputed: their savings go, their inputs stay."""
    chosen = set(modules)
    kept = {s: size for module in modules for s, size in saved.inputs[module].items() if s not in saved.weights}
    freed = {
        storage
        for storage, stacks in saved.savers.items()
        if storage not in saved.weights and all(chosen.intersection(stack) for stack in stacks)
    }
    working = max(
        sum(saved.sizes[s] for s in freed if any(module in stack for stack in saved.savers[s])) for module in modules
    )
    stacks = {module for every in saved.savers.values() for stack in every for module in _above(stack, chosen)}
    inside = tuple(sorted({name for module in stacks for name in class_names(module)}))
    added = {storage: size for storage, size in kept.items() if storage not in saved.sizes}  # masks, for example
    changes = [(saved.places[s], saved.sizes[s]) for s in freed - kept.keys()]
    changes += [(_taken_at(modules, storage, saved), -size) for storage, size in added.items()]
    freed_bytes = sum(size for _, size in changes)
    copied = first_blocks(saved, blocks, modules)
    return RecomputePart(classes, inside, freed_bytes, working, freed_at=_grouped(changes), first_blocks=copied)


def _taken_at(modules: list[nn.Module], storage: int, saved: SavedTensors) -> set[int]:
    return {place for module in modules if storage in saved.inputs[module] for place in saved.run_at[module]}


def _above(stack: tuple[nn.Module, ...], chosen: set[nn.Module]) -> tuple[nn.Module, ...]:
    """The modules of a stack that enclose a chosen one."""
    for depth, module in enumerate(stack):
        if module in chosen:
            return stack[1:depth]
    return ()
