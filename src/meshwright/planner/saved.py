"""What forward saves for backward, and who: counted on the real step, or on fake tensors that hold no data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from meshwright.methods.tensor.trace import SaveLog
from meshwright.nn import is_compiled, outside_compiled


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
    running: list[nn.Module] = field(default_factory=list)  # the modules that run now, outermost first

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
    stack = saved.running
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
