"""Copy saved activations to the host in forward and bring them back ahead of backward."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from meshwright.nn import is_compiled, wrap_method
from meshwright.optim import Copies
from meshwright.optim.dtensors import local_tensor, wrapped_like
from meshwright.optim.offload_storage import Event
from meshwright.runtime.torch_internals.tensors import storage_identity, version_of


class SavedStorage:
    """The bytes of a storage on the host; on the device again while backward needs them.

    The saved tensors in the storage keep this object alive; autograd frees them as backward proceeds. The device's
    memory is free again when the device, not the host, has waited for the copy: see :meth:`release`.

    Args:
        tensor: A plain tensor with the storage.
        copies: Copies between host and device.
        pin_memory: Whether host memory is page-locked.
    """

    @torch.no_grad()
    def __init__(self, tensor: torch.Tensor, copies: Copies, pin_memory: bool) -> None:
        self.reference = StorageWeakRef(tensor.untyped_storage())  # no other storage gets this address meanwhile
        self._copies, self._device = copies, tensor.device
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        self._host = torch.empty(flat.shape, dtype=torch.uint8, pin_memory=pin_memory)
        self._gone = copies.to_host([self._host], [flat], copies.mark(), held=True)
        self._leaving = flat if copies.queued else None
        self._back: tuple[torch.Tensor, Event] | None = None
        self._arriving = False

    @property
    def num_bytes(self) -> int:
        """Number of bytes on the host."""
        return self._host.numel()

    def fetch(self) -> None:
        """Begin to copy the bytes back to the device, once."""
        if self._back is None:
            self.release()
            device = torch.empty(self._host.shape, dtype=torch.uint8, device=self._device)
            self._back = device, self._copies.to_device([device], [self._host], self._copies.mark(), held=True)
            self._arriving = self._copies.queued

    def release(self) -> None:
        """Let later work on the device's current stream reuse the memory, after the copy to the host."""
        if self._leaving is not None:
            self._gone.wait()
            self._leaving = None

    def returned(self) -> torch.Tensor:
        """Return the bytes on the device."""
        self.fetch()
        assert self._back is not None
        flat, event = self._back
        event.wait()
        self._arriving = False
        return flat

    def __del__(self) -> None:
        # A graph that is freed without a backward has not waited for its copies.
        if getattr(self, "_leaving", None) is not None:
            self._gone.synchronize()
        if getattr(self, "_arriving", False) and self._back is not None:
            self._back[1].synchronize()


class SavedTensor(NamedTuple):
    """The stand-in that autograd saves in place of a tensor."""

    storage: SavedStorage
    template: torch.Tensor  # layout of the local part, on meta; a DTensor where the tensor was one

    @classmethod
    def of(cls, storage: SavedStorage, tensor: torch.Tensor) -> SavedTensor:
        """Describe a tensor in a storage."""
        local = local_tensor(tensor.detach())
        outline = torch.empty(0, dtype=local.dtype, device="meta").set_(
            torch.UntypedStorage(storage.num_bytes, device="meta"), local.storage_offset(), local.shape, local.stride()
        )
        return cls(storage, wrapped_like(tensor, outline) if isinstance(tensor, DTensor) else outline)

    def unpack(self) -> torch.Tensor:
        """Return the tensor again, on its device."""
        outline = local_tensor(self.template)
        flat = self.storage.returned()
        local = torch.empty(0, dtype=outline.dtype, device=flat.device).set_(
            flat.untyped_storage(), outline.storage_offset(), outline.shape, outline.stride()
        )
        return wrapped_like(self.template, local)


@dataclass(eq=False)
class _Run:
    """One forward of one block."""

    before: weakref.ref[_Run] | None  # the run that saved before it: backward reaches it next
    weights: set[int] = field(default_factory=set)  # storages of parameters and buffers: they are not copied
    saved: weakref.WeakSet[SavedStorage] = field(default_factory=weakref.WeakSet)
    entered: bool = False  # backward has asked for something of it


class ActivationOffload:
    """Offloads what the forward of some blocks saves for backward; under recomputation, what that keeps.

    Every storage is copied once, however many tensors in it are saved; weights are not copied. When backward first
    needs a saved tensor of a block, the storages of the ``prefetch`` blocks before it begin to come back.

    As with every saved-tensor hook, autograd does not notice when a saved tensor is changed in place afterwards: it
    computes with the values that were saved. A second backward through the same graph finds them on the device.

    When a block is done, the device waits for the copies of the block before: the host may be far ahead, and memory
    would otherwise be free only when the host checks. So the device has the saved tensors of at most two blocks.

    Args:
        blocks: Modules, in the order in which they run.
        copies: Copies between host and device.
        pin_memory: Whether host memory is page-locked.
        prefetch: Number of blocks whose activations come back ahead.
    """

    def __init__(self, blocks: Sequence[nn.Module], copies: Copies, *, pin_memory: bool, prefetch: int) -> None:
        self._copies, self._pin, self._prefetch = copies, pin_memory, prefetch
        self._known: weakref.WeakValueDictionary[tuple[int, int], SavedStorage] = weakref.WeakValueDictionary()
        self._running: list[_Run] = []
        self._last: weakref.ref[_Run] | None = None
        self._leaving: _Run | None = None  # the last run: its copies may not be done, and its memory not free
        self.num_bytes = 0
        """Bytes copied to the host so far."""
        for block in blocks:
            wrap_method(block, "forward", self._around)
            # The graph of compiled code would break at hooks.
            for module in block.modules() if not is_compiled(block) else ():
                module.register_forward_pre_hook(self._enter)

    def _around(self, forward: functools.partial[Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        block: nn.Module = forward.args[0]  # not the one that was wrapped: it may be a copy of it
        with (
            self._run() as run,
            torch.autograd.graph.saved_tensors_hooks(lambda tensor: self._pack(run, tensor), self._unpack),
        ):
            # The block's own hook ran before this run began, and compiled ones have none.
            run.weights |= {_storage(tensor) for tensor in (*block.parameters(), *block.buffers())}
            return forward(*args, **kwargs)

    def forget(self, model: nn.Module, args: Any) -> None:
        """Forget all storages before the model's forward (a hook): they may have other contents than in the last one.

        Gathering weights again does not raise their version, and blocks may compute with weights of other modules.
        """
        self._known = weakref.WeakValueDictionary()

    @contextlib.contextmanager
    def _run(self) -> Iterator[_Run]:
        run = _Run(self._last)
        self._running.append(run)
        try:
            yield run
        finally:
            self._running.pop()
            self._last = weakref.ref(run)
            self._release()
            self._leaving = run

    def _release(self) -> None:
        for storage in list(self._leaving.saved) if self._leaving is not None else ():
            storage.release()

    def _enter(self, module: nn.Module, args: Any) -> None:
        # Gathered weights exist only while a module runs.
        for run in self._running:
            tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
            run.weights |= {_storage(tensor) for tensor in tensors}

    def _pack(self, run: _Run, tensor: torch.Tensor) -> Any:
        local = local_tensor(tensor)
        if _storage(tensor) in run.weights or local.device.type not in ("cpu", "cuda") or local.is_sparse:
            return tensor.detach()
        key = (_storage(tensor), version_of(local))
        storage = self._known.get(key)
        if storage is None:
            storage = SavedStorage(local.detach(), self._copies, self._pin)
            self._known[key] = storage
            self.num_bytes += storage.num_bytes
        run.saved.add(storage)
        return run, SavedTensor.of(storage, tensor)

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        run, saved = packed
        if not run.entered:
            run.entered = True
            self._fetch(run)
        return saved.unpack()

    def _fetch(self, run: _Run) -> None:
        following: _Run | None = run
        for _ in range(self._prefetch + 1):
            if following is None:
                return
            for storage in list(following.saved):
                storage.fetch()
            following = following.before() if following.before is not None else None


def _storage(tensor: torch.Tensor) -> int:
    return storage_identity(local_tensor(tensor).untyped_storage())
