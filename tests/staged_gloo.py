"""Carry tensors of a GPU over gloo by way of the host, so that several ranks can share one GPU.

torch's gloo takes the address of a GPU's tensor for one of the host's where it sends, gathers into one tensor or
scatters sums, and the process dies. NCCL wants a GPU for each rank. So what torch calls for tensors of a GPU is
replaced: each collective and each message is copied to the host, carried there by what torch calls for tensors of a
CPU, and copied back. That is slow, and right on every stream: a copy waits for the stream that is current.

All of torch's ways lead through these operators: ``torch.distributed``, functional collectives, and the C++ of DDP.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from meshwright.runtime.torch_internals.pytree import tree_flatten, tree_map

_COLLECTIVES = (
    "allreduce_", "allreduce_coalesced_", "allgather_", "allgather_coalesced_", "allgather_into_tensor_coalesced_",
    "_allgather_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_", "_reduce_scatter_base_", "alltoall_",
    "alltoall_base_", "broadcast_", "reduce_", "gather_", "scatter_",
)  # fmt: skip
_RECEIVES = ("recv_", "recv_any_source_")
_ONLY_WORK = {
    "allreduce_coalesced_", "allgather_coalesced_", "allgather_into_tensor_coalesced_", "alltoall_base_", "gather_",
    "reduce_", "reduce_scatter_tensor_coalesced_",
}  # fmt: skip

ANY_DEVICE = "ADInplaceOrView"
"""A key that comes before those of devices, and that no exchange uses."""

calls: dict[str, int] = {}
"""Counts of each operator that the host has carried."""

_recent: deque[Any] = deque(maxlen=64)  # gloo's threads would need Python's lock to free what they hold last
_underway: set[Received] = set()  # C++ does not keep what Python makes of its classes


class Received(dist.Work):
    """A message that is copied to its device when it is waited for.

    Two ranks that first receive and then send would wait for each other if it were waited for at once.
    """

    def __init__(self, work: dist.Work, buffers: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
        super().__init__()
        self._work, self._buffers, self._targets = work, buffers, targets
        _underway.add(self)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the message is on the device."""
        if self in _underway:
            _underway.discard(self)
            self._work.wait()
            _copy_all(self._targets, self._buffers)
        return True


@contextlib.contextmanager
def carried_by_host(key: str = "CUDA") -> Iterator[None]:
    """Replace torch's operators for tensors of a GPU inside the block.

    Args:
        key: Of torch's dispatcher. :data:`ANY_DEVICE` replaces those of all devices, to try this without a GPU.
    """
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they say that it is replaced
        for name in (*_COLLECTIVES, *_RECEIVES, "send", "barrier"):
            library.impl(name, _staged(name), key, allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def _staged(name: str) -> Callable[..., Any]:
    operator = getattr(torch.ops.c10d, name).default
    not_again = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)

    @torch.no_grad()
    def call(*args: Any) -> Any:
        calls[name] = calls.get(name, 0) + 1
        copies = tree_map(_to_host, args)
        _recent.append(copies)
        with torch._C._ExcludeDispatchKeyGuard(not_again):
            returned = operator(*copies)
        boxed = returned[-1] if isinstance(returned, tuple | list) else returned
        work = dist.Work.unbox(boxed)
        if name in _RECEIVES:
            return Received(work, copies[0], list(args[0])).boxed()
        if name == "send":  # it keeps the copy until the other rank has it
            return boxed
        work.wait()
        if name == "barrier":
            return boxed
        targets, results = tree_flatten(args[0])[0], tree_flatten(copies[0])[0]
        _copy_all(targets, results)
        done = _done(targets).boxed()
        return done if name in _ONLY_WORK else (args[0], done)

    return call


def _to_host(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _copy_all(targets: list[torch.Tensor], results: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for target, result in zip(targets, results, strict=True):
            target.detach().copy_(result)


def _done(tensors: list[torch.Tensor]) -> dist.Work:
    """Make what DDP waits for: its future holds the tensors of the device."""
    on_device = torch.backends.cuda.is_built() and tensors[0].is_cuda
    devices = [tensors[0].device] if on_device else []
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=devices)
    future.set_result(tensors)
    return torch._C._distributed_c10d._create_work_from_future(future)
