"""From a recorded forward pass to plain data: each tensor with who saves, takes and makes it, and all work."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn

from meshwright.cost import Activations, SavedTensor, TracedModule, Transient, Work
from meshwright.cost.activations import Running
from meshwright.nn import class_names, find_blocks

if TYPE_CHECKING:
    from meshwright.planner.saved import SavedTensors

_Key = tuple[tuple[Running, ...], tuple[int, ...], tuple[tuple[str, Running], ...], tuple[int, ...], int]  # of equals


def summarise(model: nn.Module, saved: SavedTensors, transients: tuple[Transient, ...]) -> Activations:
    """What the forward pass of a plain model keeps, and what recomputation can change of that."""
    named = [(path, module) for path, module in model.named_modules() if path]
    numbers = {module: number for number, (_, module) in enumerate(named)}
    blocks = [block for _, block in find_blocks(model)]
    block_of = {module: place for place, block in enumerate(blocks) for module in block.modules()}
    return Activations(
        saved.bytes,
        modules=tuple(TracedModule(path, tuple(class_names(module)), block_of.get(module)) for path, module in named),
        blocks=tuple(numbers[block] for block in blocks),
        stages=(_tensors(saved, numbers),),
        work=_work(saved, numbers),
        transients=transients,
    ).settled()


def _tensors(saved: SavedTensors, numbers: dict[nn.Module, int]) -> tuple[SavedTensor, ...]:
    inputs: dict[int, list[int]] = {}
    sizes = dict(saved.sizes)
    places = {storage: set(found) for storage, found in saved.places.items()}
    for module, taken in saved.inputs.items():
        for storage, size in taken.items():
            sizes.setdefault(storage, size)
            if module in numbers:
                inputs.setdefault(storage, []).append(numbers[module])
            if storage not in saved.sizes:
                places.setdefault(storage, set()).update(saved.run_at[module])
    for storage, made in saved.results.items():
        sizes.setdefault(storage, made.num_bytes)
        places.setdefault(storage, set()).update(made.places)
    found: dict[_Key, SavedTensor] = {}
    for storage, size in sizes.items():
        if storage in saved.weights:
            continue
        made_by = saved.results[storage].operators if storage in saved.results else []
        tensor = SavedTensor(
            size,
            tuple(sorted({_running(stack, numbers) for stack in saved.savers.get(storage, [])})),
            tuple(sorted(set(inputs.get(storage, [])))),
            tuple(sorted({(operator, _running(stack, numbers)) for operator, stack in made_by})),
            tuple(sorted(places[storage])),
            min(saved.places.get(storage) or places[storage]),
        )
        key = (tensor.savers, tensor.inputs_of, tensor.results, tensor.places, tensor.needed_from)
        found[key] = tensor if key not in found else _larger(found[key], size)
    return tuple(found[key] for key in sorted(found))  # two runs that save the same are equal


def _larger(tensor: SavedTensor, more: int) -> SavedTensor:
    return dataclasses.replace(tensor, num_bytes=tensor.num_bytes + more)


def _work(saved: SavedTensors, numbers: dict[nn.Module, int]) -> tuple[Work, ...]:
    last: dict[nn.Module, int] = {}  # the number of the last tensor saved while it runs
    for position, stack in enumerate(saved.log):
        last.update(dict.fromkeys(stack, position))
    found: dict[tuple[str, Running, int, int], int] = {}
    for each in saved.work:
        needed = sum(last.get(module, -1) >= each.num_saved_before for module in each.stack if module in numbers)
        key = each.operator, _running(each.stack, numbers), needed, each.place
        found[key] = found.get(key, 0) + each.flops
    return tuple(
        Work(operator, running, needed, flops, place)
        for (operator, running, needed, place), flops in sorted(found.items())
    )


def _running(stack: Iterable[nn.Module], numbers: dict[nn.Module, int]) -> Running:
    return tuple(numbers[module] for module in stack if module in numbers)
