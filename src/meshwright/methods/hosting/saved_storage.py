"""One storage that forward saves for backward, moved to the host; and the tensors that lie in it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from meshwright.optim.clip import local_tensor
from meshwright.optim.layouts import wrapped_like
from meshwright.optim.offload import Copies
from meshwright.optim.offload.copies import Event


class SavedStorage:
    """A storage's bytes on the host, and again on the device from when backward needs them until it has used them.

    Whoever saved a part of the storage keeps this object; autograd lets go of it behind itself. The device's memory is
    free again when the device, not the host, has waited for the copy: see :meth:`release`.

    Args:
        tensor: A plain tensor with the storage.
        copies: The way between host and device.
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
        """Bytes on the host."""
        return self._host.numel()

    def fetch(self) -> None:
        """Begins to bring the bytes back; nothing where that has begun."""
        if self._back is None:
            self.release()
            device = torch.empty(self._host.shape, dtype=torch.uint8, device=self._device)
            self._back = device, self._copies.to_device([device], [self._host], self._copies.mark(), held=True)
            self._arriving = self._copies.queued

    def release(self) -> None:
        """Lets what comes on the device's current stream use the memory again, behind the copy to the host."""
        if self._leaving is not None:
            self._gone.wait()
            self._leaving = None

    def returned(self) -> torch.Tensor:
        """The bytes on the device."""
        self.fetch()
        assert self._back is not None
        flat, event = self._back
        event.wait()
        self._arriving = False
        return flat

    def __del__(self) -> None:
        """Of a graph that was let go of without a backward: nobody has waited."""
        if getattr(self, "_leaving", None) is not None:
            self._gone.synchronize()
        if getattr(self, "_arriving", False) and self._back is not None:
            self._back[1].synchronize()


class SavedTensor(NamedTuple):
    """What autograd keeps in place of a tensor."""

    storage: SavedStorage
    template: torch.Tensor  # a DTensor without data where it was one, else on meta; the layout of the local part

    @classmethod
    def of(cls, storage: SavedStorage, tensor: torch.Tensor) -> SavedTensor:
        """Describes a tensor in a storage."""
        local = local_tensor(tensor.detach())
        outline = torch.empty(0, dtype=local.dtype, device="meta").set_(
            torch.UntypedStorage(storage.num_bytes, device="meta"), local.storage_offset(), local.shape, local.stride()
        )
        return cls(storage, wrapped_like(tensor, outline) if isinstance(tensor, DTensor) else outline)

    def unpack(self) -> torch.Tensor:
        """The tensor again, on its device."""
        outline = local_tensor(self.template)
        flat = self.storage.returned()
        local = torch.empty(0, dtype=outline.dtype, device=flat.device).set_(
            flat.untyped_storage(), outline.storage_offset(), outline.shape, outline.stride()
        )
        return wrapped_like(self.template, local)
