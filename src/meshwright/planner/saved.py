"""What forward saves for backward, and who: counted on the real step, or on fake tensors that hold no data."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from meshwright.methods.recompute.operators import can_keep, kept_now, operator_name
from meshwright.methods.recompute.wrapping import keeps_results
from meshwright.nn import is_compiled, outside_compiled

if TYPE_CHECKING:
    from meshwright.methods.tensor.trace import SaveLog
    from meshwright.planner.profile.flops import FlopCount


@dataclass
class Result:
    """A storage that operators have returned, and that can be kept instead of running them again."""

    num_bytes: int
    operators: list[tuple[str, tuple[nn.Module, ...]]] = field(default_factory=list)  # with the modules that ran
    places: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Call:
    """One call of an operator that computes."""

    operator: str
    stack: tuple[nn.Module, ...]
    num_saved_before: int
    flops: int
    place: int


@dataclass
class SavedTensors:
    """The storages saved for backward, and the modules that were running when each was saved."""

    sizes: dict[int, int] = field(default_factory=dict)  # storage -> bytes
    savers: dict[int, list[tuple[nn.Module, ...]]] = field(default_factory=dict)  # storage -> module stacks
    inputs: dict[nn.Module, dict[int, int]] = field(default_factory=dict)  # module -> storage of an argument -> bytes
    weights: set[int] = field(default_factory=set)  # storages of parameters and buffers: saved, but not by forward
    met: list[StorageWeakRef] = field(default_factory=list)  # keeps addresses of storages from being reused
    log: SaveLog = field(default_factory=list)  # the module stack of every save, in order
    places: dict[int, set[int]] = field(default_factory=dict)  # storage -> where in the list of blocks it was saved
    run_at: dict[nn.Module, set[int]] = field(default_factory=dict)  # module -> where it ran
    runs: Counter[nn.Module] = field(default_factory=Counter)  # module -> how often it ran
    results: dict[int, Result] = field(default_factory=dict)  # storage -> who made it, where all is watched
    work: list[Call] = field(default_factory=list)  # then: calls of operators, in order
    running: list[nn.Module] = field(default_factory=list)  # the modules that run now, outermost first
    place: int = -1  # where in the list of blocks
    complete: bool = False  # whether forward has run: what runs again in backward saves nothing more

    def add(self, storage: int, num_bytes: int, place: int, reference: StorageWeakRef) -> None:
        """A storage is kept for backward without being saved: for the module that took it, or where it was made."""
        taker = next((module for module, taken in self.inputs.items() if storage in taken), None)
        self.sizes[storage] = num_bytes
        self.savers[storage] = [() if taker is None else (taker,)]
        self.places[storage] = {place} if taker is None else set(self.run_at[taker])
        self.met.append(reference)

    @property
    def bytes(self) -> int:
        """Bytes saved, every storage counted once and weights not at all."""
        return sum(size for storage, size in self.sizes.items() if storage not in self.weights)

    def kept_by_place(self) -> dict[int, int]:
        """The same bytes by the first place where each storage was saved."""
        found: dict[int, int] = {}
        for storage, places in self.places.items():
            if storage not in self.weights:
                found[min(places)] = found.get(min(places), 0) + self.sizes[storage]
        return found


@contextlib.contextmanager
def record_saved(
    model: nn.Module, *, counter: FlopCount | None = None, blocks: Sequence[nn.Module] = ()
) -> Iterator[SavedTensors]:
    """Records what a forward pass inside the block saves for backward, results that ``checkpoint`` keeps among them.

    Args:
        model: The model that runs; gathered weights of sharded modules are recognised while they run.
        counter: Records operators too, with the operations that it counts, and keeps the address of every storage
            until the end of the record: only for fake tensors, which hold no data.
        blocks: Those of a list that a pipeline cuts, in the order in which they run; places are told by them.
    """
    recorder = _Recorder(counter, blocks)
    hooks = [
        hook
        for module in outside_compiled(model)
        for hook in (
            module.register_forward_pre_hook(recorder.enter, with_kwargs=True),
            module.register_forward_hook(recorder.leave, always_call=True),
        )
    ]
    if counter is not None:
        watched: contextlib.AbstractContextManager[Any] = _WithoutData(recorder.watch)
    else:
        watched = _Operators(recorder.keep) if keeps_results(model) else contextlib.nullcontext()
    try:
        with torch.autograd.graph.saved_tensors_hooks(recorder.pack, lambda tensor: tensor), watched:
            yield recorder.saved
    finally:
        for hook in hooks:
            hook.remove()
        recorder.saved.met.clear()


class _Recorder:
    """What :func:`record_saved` has called: by autograd, by modules, by operators."""

    def __init__(self, counter: FlopCount | None, blocks: Sequence[nn.Module]) -> None:
        self.saved = SavedTensors()
        self._counter = counter
        self._index = {block: number for number, block in enumerate(blocks)}
        self._stack = self.saved.running

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Autograd saves a tensor."""
        saved, running = self.saved, tuple(self._stack)
        if saved.complete:
            return tensor
        key, size = storage_of(tensor)
        saved.sizes[key] = size
        saved.savers.setdefault(key, []).append(running)
        saved.places.setdefault(key, set()).add(saved.place)
        saved.log.append(running)
        if self._counter is not None:
            saved.met.append(_reference(tensor))
        return tensor

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module begins to run."""
        saved = self.saved
        self._stack.append(module)
        if saved.complete:
            return
        saved.place = self._index.get(module, saved.place)
        saved.run_at.setdefault(module, set()).add(saved.place)
        saved.runs[module] += 1
        tensors = _tensors_in((args, kwargs))
        saved.inputs.setdefault(module, {}).update(map(storage_of, tensors))
        if self._counter is not None:
            saved.met.extend(map(_reference, tensors))
        inside = is_compiled(module)  # no hook runs there
        for tensor in (*module.parameters(recurse=inside), *module.buffers(recurse=inside)):
            saved.weights.add(storage_of(tensor)[0])

    def leave(self, module: nn.Module, *_: Any) -> None:
        """A module has run."""
        self._stack.pop()
        if not self.saved.complete:
            self.saved.place += self._index.get(module) == len(self._index) - 1  # behind the last one

    def keep(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operator runs, whose result a recomputed module may keep."""
        result = operator(*args, **kwargs)
        if kept_now(operator, args, kwargs):
            self.saved.sizes.update(map(storage_of, _tensors_in(result)))
        return result

    def watch(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operator runs without data; outside the model, as in backward, it is no part of forward's work."""
        saved, counter = self.saved, self._counter
        if counter is None or not self._stack or saved.complete:
            return operator(*args, **kwargs)
        position, before = len(saved.log), counter.total
        result = operator(*args, **kwargs)
        name, running, flops = operator_name(operator), tuple(self._stack), counter.total - before
        if flops:
            saved.work.append(Call(name, running, position, flops, saved.place))
        if can_keep(operator, args, kwargs):
            for key, size in map(storage_of, _tensors_in(result)):
                made = saved.results.setdefault(key, Result(size))
                made.operators.append((name, running))
                made.places.add(saved.place)
                saved.met.extend(map(_reference, _tensors_in(result)))
        return result


class _Operators(TorchDispatchMode):
    """Calls every operator through a function."""

    def __init__(self, around: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self._around = around

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._around(func, args, kwargs or {})


class _WithoutData(_Operators):
    """The same for operators without data, of which none is compiled."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch's guard against compilation takes longer than the operators do."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._around(func, args, kwargs or {})


def _tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def storage_of(tensor: torch.Tensor) -> tuple[int, int]:
    """What tells a tensor's storage from all others that are alive, and its bytes."""
    storage = _plain(tensor).untyped_storage()
    return storage._cdata, storage.nbytes()


def _reference(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(_plain(tensor).untyped_storage())


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    while is_traceable_wrapper_subclass(tensor):  # a DTensor, a weight gathered in 8 bits: what they wrap is held
        tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])
    return tensor
