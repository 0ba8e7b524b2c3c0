"""A batch of parameters that one pass of an update works on together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from meshwright.optim.layouts import HALF_TYPES
from meshwright.optim.master import MASTER
from meshwright.optim.sharded.layout import Layout
from meshwright.optim.sharded.rounding import round_stochastically_, shard_generator
from meshwright.optim.sharded.slots import Slot
from meshwright.optim.sharded.tensor_list import TensorList

_DEVICE_ELEMENTS = 1 << 26  # keeps an accelerator busy without holding temporaries of the whole model


@dataclass(frozen=True, slots=True)
class Member:
    """One parameter of a chunk."""

    position: int
    """The parameter's place in the optimizer."""
    slot: Slot
    gradient: torch.Tensor | None


@dataclass
class Chunk:
    """Parameters of one group, device, step number and kind, all split by the same axes: what an update computes with.

    Where a parameter has no gradient on this rank but shares axes with other parameters, its chunk stands on the
    ``meta`` device: the update runs without computing, so that this rank takes part in every sum with zeros.
    """

    group: Mapping[str, Any]
    """Hyperparameters."""
    step: int
    """Number of this step for these parameters, from 1."""
    members: Sequence[Member]
    weights: TensorList
    """fp32 shards to be moved in place: the parameters, or their masters."""
    gradients: TensorList
    """fp32 shards (see ``takes_half_gradients``); may be the user's own tensors: to be read only."""
    states: dict[str, TensorList]
    """The shards of every state, by name."""
    has_gradients: bool = True

    def __len__(self) -> int:
        return len(self.members)

    @property
    def layouts(self) -> list[Layout]:
        """Whole shapes and splitting axes; the axes are the same for all."""
        return [member.slot.layout for member in self.members]

    @property
    def layout(self) -> Layout:
        """One of the layouts, for what they have in common: number of dims and splitting axes."""
        return self.members[0].slot.layout

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.weights.tensors[0].device

    @property
    def is_local(self) -> bool:
        """Whether no axis splits these parameters: partial sums are whole already."""
        return self.layout.is_whole()

    def vector(self, values: Sequence[float]) -> torch.Tensor:
        """One number per parameter, shape ``(len,)`` fp32, made without waiting for the device."""
        host = torch.tensor(values, dtype=torch.float32)
        return host if self.device.type == "cpu" else host.to(self.device, non_blocking=True)

    def numels(self) -> torch.Tensor:
        """Elements of each whole parameter, shape ``(len,)``."""
        return self.vector([layout.numel for layout in self.layouts])

    def in_fp32(self, *, gradients: bool = True) -> Chunk:
        """The same chunk with weights (and gradients) in fp32; tensors that are so already are not copied."""
        read = self.gradients.in_fp32() if gradients else self.gradients
        return replace(self, weights=self.weights.in_fp32(), gradients=read)

    def with_states_here(self) -> Chunk:
        """The same chunk with copies, on the weights' device, of states that wait elsewhere."""
        if all(values.tensors[0].device == self.device for values in self.states.values()):
            return self
        return replace(self, states={name: values.to(self.device) for name, values in self.states.items()})

    def send_back_states(self, visiting: Chunk) -> None:
        """Takes over the states of a chunk that was made with states here; they arrive behind the device's work."""
        for name, values in self.states.items():
            if values is not visiting.states[name]:
                torch._foreach_copy_(values.tensors, visiting.states[name].tensors, non_blocking=True)

    def without_values(self) -> Chunk:
        """The same chunk on the meta device: an update of it asks in the right sizes and changes nothing."""

        def meta(tensors: TensorList) -> TensorList:
            return TensorList([torch.empty_like(tensor, device="meta") for tensor in tensors])

        states = {name: meta(values) for name, values in self.states.items()}
        weights = meta(self.weights.in_fp32())
        return replace(self, weights=weights, gradients=meta(weights), states=states)

    def write_back(self, results: TensorList) -> None:
        """Rounds fp32 results into weights that are kept in half precision."""
        if self.members[0].slot.weight.dtype not in HALF_TYPES:  # a chunk has one type
            return
        for member, result in zip(self.members, results, strict=True):
            weight = member.slot.weight
            if self.group["half_update"] == "master":
                weight.copy_(result)
            else:
                shard = member.slot.layout.shard_index
                generator = shard_generator(weight.device, self.step, member.position, shard)
                round_stochastically_(weight, result, generator)


def made_chunk(group: Mapping[str, Any], step: int, members: Sequence[Member]) -> Chunk:
    """A chunk of members that fit together; weights and gradients are in their own types."""
    slots = [member.slot for member in members]
    has_gradients = members[0].gradient is not None
    gradients = [member.slot.weight if member.gradient is None else member.gradient for member in members]
    names = [name for name in slots[0].states if name != MASTER]
    return Chunk(
        group,
        step,
        members,
        TensorList([slot.states.get(MASTER, slot.weight) for slot in slots]),
        TensorList(gradients),
        {name: TensorList([slot.states[name] for slot in slots]) for name in names},
        has_gradients,
    )


def cut(members: Sequence[Member], host_elements: int) -> list[list[Member]]:
    """Consecutive parts of at most a chunk's elements, ``host_elements`` on a CPU; a parameter is never cut."""
    limit = host_elements if members[0].slot.device.type == "cpu" else _DEVICE_ELEMENTS
    parts: list[list[Member]] = [[]]
    size = 0
    for member in members:
        elements = member.slot.weight.numel()
        if parts[-1] and size + elements > limit:
            parts.append([])
            size = 0
        parts[-1].append(member)
        size += elements
    return parts
