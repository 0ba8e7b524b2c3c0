"""A training state as it is now, ready to be written while training goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from meshwright import runtime
from meshwright.optim.clip import local_tensor
from meshwright.optim.layouts import wrapped_like
from meshwright.runtime import synchronize_device
from meshwright.store.generators import generator_tensors
from meshwright.store.record import Record
from meshwright.store.replicas import begin, completed
from meshwright.store.shards import writable
from meshwright.store.snapshot import capture
from meshwright.store.state import TrainingState
from meshwright.store.union import united


@dataclass(frozen=True)
class Staged:
    """Everything one rank writes of a checkpoint."""

    tensors: Mapping[str, torch.Tensor]
    record: Record
    generators: Mapping[str, torch.Tensor]


def staged(state: TrainingState) -> Staged:
    """Names everything in a training state; collective. The tensors are live: the next step changes them.

    Raises:
        CheckpointError: On every rank, when something in it cannot be stored.
    """
    begin(state, to_load=False)
    with runtime.same_on_every_rank():
        snapshot = capture(state, runtime.world_size())
    record = united(snapshot.record) if snapshot.replica is None else completed(snapshot.record, snapshot.replica)
    return Staged(writable(snapshot.tensors), record, generator_tensors())


class HostCopies:
    """Copies of a rank's tensors in host memory, whose buffers are used again by the next save.

    Fresh memory costs more than filling it: the system hands it out page by page, and locks the pages where a GPU
    copies into them.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def of(self, live: Staged) -> Staged:
        """The same with copies of the tensors, valid until the next call."""
        tensors = {name: self._copy(name, tensor) for name, tensor in live.tensors.items()}
        for device in {local_tensor(tensor).device for tensor in live.tensors.values()}:
            synchronize_device(device)  # copies from a GPU were only queued
        self._buffers = {name: local_tensor(tensor) for name, tensor in tensors.items()}
        return Staged(tensors, live.record, live.generators)

    def _copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        local = local_tensor(tensor)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
            buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
        buffer.copy_(local, non_blocking=True)
        return wrapped_like(tensor, buffer)
