"""What forward saves for backward: counted on the real step, or predicted with fake tensors that hold no data."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from meshwright.cost import Activations, Boundary, Placed, RecomputePart
from meshwright.methods.tensor.trace import SaveLog
from meshwright.nn import class_names, find_blocks, is_compiled, outside_compiled
from meshwright.planner.saved_blocks import first_blocks
from meshwright.planner.traces import Trace
from meshwright.planner.work import BACKWARD_FLOPS, PlacedWork


@dataclass
class SavedTensors:
    """The storages saved for backward, and the modules that were running when each was saved."""

    sizes: dict[int, int] = field(default_factory=dict)  # storage -> bytes
    savers: dict[int, list[tuple[nn.Module, ...]]] = field(default_factory=dict)  # storage -> module stacks
    inputs: dict[nn.Module, dict[int, int]] = field(default_factory=dict)  # module -> storage of an argument -> bytes
    weights: set[int] = field(default_factory=set)  # storages of parameters and buffers: saved, but not by forward
    alive: list[Any] = field(default_factory=list)  # keeps storages from being freed and their addresses reused
    log: SaveLog = field(default_factory=list)  # the module stack of every save, in order
    places: dict[int, set[int]] = field(default_factory=dict)  # storage -> where in the list of blocks it was saved
    run_at: dict[nn.Module, set[int]] = field(default_factory=dict)  # module -> where it ran

    @property
    def bytes(self) -> int:
        """Bytes saved, every storage counted once and weights not at all."""
        return sum(size for storage, size in self.sizes.items() if storage not in self.weights)


@contextlib.contextmanager
def record_saved(
    model: nn.Module, *, keep_alive: bool = False, blocks: Sequence[nn.Module] = ()
) -> Iterator[SavedTensors]:
    """Records what a forward pass inside the block saves for backward.

    Args:
        model: The model that runs; gathered weights of sharded modules are recognised while they run.
        keep_alive: Keep every saved tensor until the end of the record: only for fake tensors, which hold no data.
        blocks: Those of a list that a pipeline cuts, in the order in which they run; places are told by them.
    """
    saved = SavedTensors()
    stack: list[nn.Module] = []
    index = {block: number for number, block in enumerate(blocks)}
    place = -1

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        key, size = _storage(tensor)
        saved.sizes[key] = size
        saved.savers.setdefault(key, []).append(tuple(stack))
        saved.places.setdefault(key, set()).add(place)
        saved.log.append(tuple(stack))
        if keep_alive:
            saved.alive.append(tensor)
        return tensor

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal place
        stack.append(module)
        place = index.get(module, place)
        saved.run_at.setdefault(module, set()).add(place)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        saved.inputs.setdefault(module, {}).update(map(_storage, tensors))
        if keep_alive:
            saved.alive.extend(tensors)
        inside = is_compiled(module)  # no hook runs there
        for tensor in (*module.parameters(recurse=inside), *module.buffers(recurse=inside)):
            saved.weights.add(_storage(tensor)[0])

    def leave(module: nn.Module, *_: Any) -> None:
        nonlocal place
        stack.pop()
        place += index.get(module) == len(blocks) - 1  # behind the last one

    hooks = [
        hook
        for module in outside_compiled(model)
        for hook in (
            module.register_forward_pre_hook(enter, with_kwargs=True),
            module.register_forward_hook(leave, always_call=True),
        )
    ]
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield saved
    finally:
        for hook in hooks:
            hook.remove()
        saved.alive.clear()


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    while is_traceable_wrapper_subclass(tensor):  # a DTensor, a weight gathered in 8 bits: what they wrap is held
        tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])
    storage = tensor.untyped_storage()
    return storage._cdata, storage.nbytes()


def predict_saved(
    model: nn.Module,
    inputs: Any,
    forward: Callable[[nn.Module, Any], Any],
    *,
    param_dtype: torch.dtype | None,
    autocast_dtype: torch.dtype | None,
    split: Trace | None = None,
    blocks: Sequence[nn.Module] = (),
) -> tuple[Activations, int, tuple[Boundary, ...]]:
    """Predicts what one micro-batch saves, in a forward pass over fake tensors; the model itself is not touched.

    Args:
        model: A plain module, not wrapped or sharded.
        inputs: The model input of one micro-batch, as ``prepare_input`` returns it.
        forward: ``forward(model, inputs)`` computes the loss.
        param_dtype: Precision of the parameters as they compute; None keeps their own.
        autocast_dtype: Precision of autocast; None runs without.
        split: Lets the model run as one rank of the axes that divide layers, tokens or experts; None runs it whole.
        blocks: Those that a pipeline cuts: activations and operations are told apart by their places then.

    Returns:
        The activations, the floating-point operations of forward and backward (recomputation not counted), and what is
        sent over that axis.

    Raises:
        Exception: Whatever the model raises when it runs without data.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))

    def converted(tensor: torch.Tensor) -> torch.Tensor:
        copy: torch.Tensor = fake.from_tensor(tensor.detach())
        return copy.to(param_dtype) if param_dtype is not None and copy.is_floating_point() else copy

    state = {
        f"model.{name}": _one_ranks(converted(tensor), tensor, split).requires_grad_(tensor.requires_grad)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    fake_inputs = tree_map(lambda leaf: converted(leaf) if isinstance(leaf, torch.Tensor) else leaf, inputs)
    counter = FlopCounterMode(display=False)
    autocast = torch.autocast(device.type, dtype=autocast_dtype) if autocast_dtype else contextlib.nullcontext()
    work = PlacedWork(model, blocks, counter)
    recorded = record_saved(model, keep_alive=True, blocks=blocks)
    with warnings.catch_warnings(), fake, counter, autocast, recorded as saved:
        warnings.simplefilter("ignore")
        as_one_rank = split.running(saved.log) if split is not None else contextlib.nullcontext()
        with as_one_rank, work.counting() if blocks else contextlib.nullcontext():
            loss = torch.func.functional_call(_Forward(model, forward), state, (fake_inputs,))
        flops = counter.get_total_flops() * (1 + BACKWARD_FLOPS)
        boundaries = split.boundaries(model, saved.log) if split is not None else ()
        activations = _summarise(model, saved)
        if blocks:
            activations = _with_flops(activations, work, loss)
    return activations, flops, boundaries


def _one_ranks(fake: torch.Tensor, tensor: torch.Tensor, split: Trace | None) -> torch.Tensor:
    if split is None or not isinstance(tensor, nn.Parameter):
        return fake
    shape = split.local_shape(tensor)
    return fake if shape == fake.shape else fake.new_empty(shape)


class _Forward(nn.Module):
    """The model and its loss as one module, so that ``functional_call`` can lend it fake parameters."""

    def __init__(self, model: nn.Module, forward: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.model = model
        self._run = forward

    def forward(self, inputs: Any) -> Any:
        """Computes the loss."""
        return self._run(self.model, inputs)


def _summarise(model: nn.Module, saved: SavedTensors) -> Activations:
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


def _with_flops(activations: Activations, work: PlacedWork, loss: torch.Tensor) -> Activations:
    """The same with the operations of every place; runs backward."""
    parts = tuple(
        dataclasses.replace(part, flops_at=_grouped(({place}, flops) for place, flops in work.of(part.classes)))
        for part in activations.parts
    )
    return dataclasses.replace(activations, parts=parts, flops_at=work.everything(loss))


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
