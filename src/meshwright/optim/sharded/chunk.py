"""Chunks of parameters that an update works on at once, with the tensor lists and states they are made of.

See [Note: sharded statistics] in :mod:`meshwright.optim.sharded.whole_tensors`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor

from meshwright.errors import CheckpointError, ModelError, join_names
from meshwright.optim.dtensors import HALF_TYPES, local_tensor
from meshwright.optim.mixed_precision import MASTER, round_stochastically_, shard_generator
from meshwright.optim.sharded.tensor_layout import Kept, Layout
from meshwright.runtime.torch_internals.optim import (
    foreach_add_,
    foreach_addcmul_,
    foreach_copy_,
    foreach_div_,
    foreach_lerp_,
    foreach_mul,
    foreach_mul_,
    foreach_norm,
    foreach_rsqrt,
    foreach_sqrt,
    foreach_sqrt_,
)

_Item = TypeVar("_Item")
Operand = Any
"""A number; a TensorList of the same length; or a vector with one number for each tensor."""


class TensorList:
    """The local tensors of several parameters; operators are torch's multi-tensor (foreach) kernels.

    An update written for one tensor then runs on a whole batch with one call per operation. Scalars that differ from
    tensor to tensor (norms, ratios) are vectors of shape ``(len,)``, computed with in one operation as well.
    """

    __slots__ = ("tensors",)

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = list(tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.tensors)

    def __mul__(self, other: Operand) -> TensorList:
        return TensorList(foreach_mul(self.tensors, self._operand(other)))

    def sqrt(self) -> TensorList:
        """Return √x."""
        return TensorList(foreach_sqrt(self.tensors))

    def rsqrt(self) -> TensorList:
        """Return 1/√x."""
        return TensorList(foreach_rsqrt(self.tensors))

    def in_fp32(self) -> TensorList:
        """Return the tensors in fp32; the list itself if all are fp32."""
        if all(tensor.dtype == torch.float32 for tensor in self.tensors):
            return self
        return TensorList([tensor.float() for tensor in self.tensors])

    def to(self, device: torch.device) -> TensorList:
        """Return the tensors on a device, without waiting for the copies."""
        return TensorList([tensor.to(device, non_blocking=True) for tensor in self.tensors])

    def contiguous(self) -> TensorList:
        """Return the tensors in contiguous memory, copied only where they are not."""
        return TensorList([tensor.contiguous() for tensor in self.tensors])

    def add_(self, other: Operand, alpha: float = 1.0) -> TensorList:
        """Compute x += alpha · other."""
        if isinstance(other, TensorList):
            foreach_add_(self.tensors, other.tensors, alpha=alpha)
        else:
            foreach_add_(self.tensors, self._operand(other if alpha == 1.0 else other * alpha))
        return self

    def mul_(self, other: Operand) -> TensorList:
        """Compute x *= other."""
        foreach_mul_(self.tensors, self._operand(other))
        return self

    def div_(self, other: Operand) -> TensorList:
        """Compute x /= other."""
        foreach_div_(self.tensors, self._operand(other))
        return self

    def sqrt_(self) -> TensorList:
        """Compute x = √x."""
        foreach_sqrt_(self.tensors)
        return self

    def lerp_(self, end: TensorList, weight: float) -> TensorList:
        """Compute x += weight · (end − x), an exponential moving average."""
        foreach_lerp_(self.tensors, end.tensors, weight)
        return self

    def addcmul_(self, first: TensorList, second: Operand, value: float = 1.0) -> TensorList:
        """Compute x += value · first · second."""
        foreach_addcmul_(self.tensors, first.tensors, self._listed(second), value=value)
        return self

    def squares(self) -> torch.Tensor:
        """Return Σx² of every tensor, shape ``(len,)``, in fp32."""
        norms = foreach_norm(self.tensors)
        return torch.stack(norms).square_() if norms else torch.zeros(0)

    def sum(self, *dims: int) -> TensorList:
        """Return the sums over dims."""
        return TensorList([tensor.sum(dims) for tensor in self.tensors])

    def mean(self, *dims: int) -> TensorList:
        """Return the means over dims."""
        return TensorList([tensor.mean(dims) for tensor in self.tensors])

    def unsqueeze(self, dim: int) -> TensorList:
        """Return the tensors with a dim of size one, for broadcasting."""
        return TensorList([tensor.unsqueeze(dim) for tensor in self.tensors])

    def map(self, function: Callable[..., torch.Tensor], *others: TensorList) -> TensorList:
        """Return ``function(x, *others)`` tensor by tensor, where there is no multi-tensor kernel."""
        return TensorList([function(*parts) for parts in zip(self.tensors, *others, strict=True)])

    def _operand(self, other: Operand) -> Any:
        return other if isinstance(other, int | float) else self._listed(other)

    def _listed(self, other: Operand) -> list[torch.Tensor]:
        return other.tensors if isinstance(other, TensorList) else list(other.unbind())


# --- Slots: shard, layout and states of each parameter, looked up once and checked in each step

KeptStates = Callable[[Layout, dict[str, Any]], dict[str, Kept]]


@dataclass(frozen=True, slots=True)
class Place:
    """Location of a parameter's states: with its weights, or (except for the master) in host memory."""

    weights: torch.device
    on_host: bool = False

    def device(self, name: str) -> torch.device:
        """Return the device of a state."""
        return torch.device("cpu") if self.on_host and name != MASTER else self.weights

    def of(self, name: str, shard: torch.Tensor) -> torch.Tensor:
        """Move a state's shard to its device; on the host beside a GPU, to page-locked memory."""
        device = self.device(name)
        shard = shard if shard.device == device else shard.to(device)
        pinned = self.weights.type == "cuda" and device.type == "cpu"
        return shard.pin_memory() if pinned and not shard.is_pinned() else shard


@dataclass(slots=True)
class Slot:
    """Shard, layout and states of one parameter, ready for a step."""

    parameter: torch.Tensor
    layout: Layout
    weight: torch.Tensor
    """This rank's shard."""
    stored: dict[str, torch.Tensor]
    """The values in ``optimizer.state`` from which ``states`` were taken."""
    states: dict[str, torch.Tensor]
    """Their shards."""
    device: torch.device
    """The device of the weight, and of the states unless they live in host memory."""
    state: dict[str, Any]
    """The parameter's entry in ``optimizer.state``."""

    @property
    def kind(self) -> tuple[Any, ...]:
        """Return a key that is equal for parameters whose weights can be updated in one operation."""
        return self.device, self.weight.dtype, self.layout.mesh is None, self.layout.signature

    def is_current(self, state: dict[str, Any], weight: torch.Tensor) -> bool:
        """Return whether weight and states are the same objects, in the same place, as in the last step."""
        return (
            weight is self.weight
            and state is self.state
            and weight.device == self.device
            and weight.shape == self.layout.local_shape
            and all(state.get(name) is value for name, value in self.stored.items())
        )


def forms(layout: Layout, group: dict[str, Any], parameter: torch.Tensor, kept_states: KeptStates) -> dict[str, Kept]:
    """Return the form of every state of a parameter, the master included."""
    states = dict(kept_states(layout, group))
    if parameter.dtype in HALF_TYPES and group["half_update"] == "master":
        states[MASTER] = Kept(layout.shape, tuple(range(layout.ndim)))
    return states


def fresh_states(
    layout: Layout, group: dict[str, Any], parameter: torch.Tensor, kept_states: KeptStates, place: Place
) -> dict[str, torch.Tensor]:
    """Make new states of a parameter: zeros, and the master filled from the weights."""
    states = {}
    for name, form in forms(layout, group, parameter, kept_states).items():
        states[name] = layout.wrapped(place.of(name, local_tensor(layout.new(form, place.device(name)))), form)
    if MASTER in states and place.weights.type != "meta":
        local_tensor(states[MASTER]).copy_(local_tensor(parameter))
    return states


def made_slot(
    parameter: torch.Tensor,
    group: dict[str, Any],
    state: dict[str, Any],
    kept_states: KeptStates,
    on_host: bool = False,
) -> Slot:
    """Make a parameter's slot, with new states or those that exist, on the weight's device or the host.

    Raises:
        ModelError: When a state does not fit the parameter's present layout.
    """
    layout, weight = Layout.of(parameter), local_tensor(parameter)
    place = Place(weight.device, on_host)
    if not state:
        state["step"] = 0
        state.update(fresh_states(layout, group, parameter, kept_states, place))
    for name, form in forms(layout, group, parameter, kept_states).items():
        if name not in state and name == MASTER:  # the state was saved where the weights were fp32
            state[name] = layout.new(form, weight.device)
            local_tensor(state[name]).copy_(weight)
        state[name] = _fitted(name, state.get(name), parameter, layout, form, place)
    state["step"] = int(state["step"])
    stored = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    shards = {name: local_tensor(value) for name, value in stored.items()}
    return Slot(parameter, layout, weight, stored, shards, weight.device, state)


def check_states(
    groups: Sequence[dict[str, Any]], defaults: dict[str, Any], state_dict: Mapping[str, Any], kept_states: KeptStates
) -> None:
    """Refuse a state dict without the states that its hyperparameters ask for, before it is loaded.

    Args:
        groups: The optimizer's parameter groups.
        defaults: Values that saved groups may lack.
        state_dict: A state dict; objects with a shape may stand for its tensors.
        kept_states: Returns the forms of states by layout and group.

    Raises:
        CheckpointError: Naming the states.
    """
    for own, saved in zip(groups, state_dict["param_groups"], strict=False):
        group = {**defaults, **saved}
        for parameter, key in zip(own["params"], saved["params"], strict=False):
            state = state_dict["state"].get(key)
            needed = forms(Layout.of(parameter), group, parameter, kept_states) if state else {}
            needed.pop(MASTER, None)
            shapes = {name: tuple(getattr(value, "shape", ())) for name, value in (state or {}).items()}
            if any(shapes.get(name) != form.shape for name, form in needed.items()):
                raise CheckpointError(
                    "The saved states are of another kind of optimizer: it lacks states, or has them in other shapes",
                    expected=_described({name: form.shape for name, form in needed.items()}),
                    got=f"{_described(shapes)} for a parameter of shape {tuple(parameter.shape)}",
                    fix="load it into an optimizer of the class and options that saved it (nbits=32 for moments in "
                    "fp32), or begin with fresh states",
                )


def _described(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return join_names(f"{name}{list(shape) if shape else ''}" for name, shape in sorted(shapes.items()))


def absent_slot(parameter: torch.Tensor, group: dict[str, Any], kept_states: KeptStates) -> Slot:
    """Make a slot without values, for a parameter that has neither states nor, on this rank, a gradient."""
    layout, weight = Layout.of(parameter), local_tensor(parameter)
    fresh = fresh_states(layout, group, parameter, kept_states, Place(torch.device("meta")))
    shards = {name: local_tensor(value) for name, value in fresh.items()}
    return Slot(parameter, layout, weight, {}, shards, weight.device, {})


def _fitted(name: str, value: Any, parameter: torch.Tensor, layout: Layout, form: Kept, place: Place) -> torch.Tensor:
    """Return a state in its type and at its place."""
    here = layout.restricted(form)
    if (
        isinstance(value, torch.Tensor)
        and isinstance(value, DTensor) == isinstance(parameter, DTensor)
        and tuple(value.shape) == form.shape
        and Layout.of(value).signature == here.signature
        and local_tensor(value).shape == here.local_shape
    ):
        part = local_tensor(value)
        moved = place.of(name, part.to(dtype=form.dtype))
        return value if moved is part else layout.wrapped(moved, form)
    raise ModelError(
        f"The state {name!r} does not fit its parameter: the parameter was laid out anew after the state was made, "
        "or the state was loaded from another optimizer",
        expected=f"shape {form.shape}, placed as {layout.placements_of(form)}",
        got=f"shape {tuple(value.shape)}, placed as {getattr(value, 'placements', 'a plain tensor')}"
        if isinstance(value, torch.Tensor)
        else repr(value),
        fix="save the optimizer's state, build it over the parameters as they are now, and load the state",
    )


# --- Chunks: parameters that one pass of an update works on at once

_DEVICE_ELEMENTS = 1 << 26  # keeps an accelerator busy, without temporaries as large as the model


@dataclass(frozen=True, slots=True)
class Member:
    """One parameter of a chunk."""

    position: int
    """The parameter's index in the optimizer."""
    slot: Slot
    gradient: torch.Tensor | None


@dataclass
class Chunk:
    """Parameters of one group, device, step number and kind, all split by the same axes.

    The chunk of sharded parameters without a gradient on this rank is on the ``meta`` device: the update runs without
    computing, so that this rank takes part in every sum with zeros.
    """

    group: Mapping[str, Any]
    """Hyperparameters."""
    step: int
    """Number of this step for these parameters, from 1."""
    members: Sequence[Member]
    weights: TensorList
    """fp32 shards to be updated in place: the parameters, or their masters."""
    gradients: TensorList
    """fp32 shards (see ``takes_half_gradients``). Read only: they may be the parameters' own gradients."""
    states: dict[str, TensorList]
    """The shards of every state, by name."""
    has_gradients: bool = True

    def __len__(self) -> int:
        return len(self.members)

    @property
    def layouts(self) -> list[Layout]:
        """Return the layouts of all members, which are split by the same axes."""
        return [member.slot.layout for member in self.members]

    @property
    def layout(self) -> Layout:
        """Return the first layout, for what all have in common: number of dims and splitting axes."""
        return self.members[0].slot.layout

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        return self.weights.tensors[0].device

    @property
    def is_local(self) -> bool:
        """Return whether no axis splits these parameters, so that partial sums are whole."""
        return self.layout.is_whole()

    def vector(self, values: Sequence[float]) -> torch.Tensor:
        """Make an fp32 vector of one number per parameter, without waiting for the device."""
        host = torch.tensor(values, dtype=torch.float32)
        return host if self.device.type == "cpu" else host.to(self.device, non_blocking=True)

    def numels(self) -> torch.Tensor:
        """Return the elements of each whole parameter, shape ``(len,)``."""
        return self.vector([layout.numel for layout in self.layouts])

    def in_fp32(self, *, gradients: bool = True) -> Chunk:
        """Return the chunk with weights (and gradients) in fp32, copied only where they are not."""
        read = self.gradients.in_fp32() if gradients else self.gradients
        return replace(self, weights=self.weights.in_fp32(), gradients=read)

    def with_states_here(self) -> Chunk:
        """Return the chunk with copies on the weights' device of states in host memory."""
        if all(values.tensors[0].device == self.device for values in self.states.values()):
            return self
        return replace(self, states={name: values.to(self.device) for name, values in self.states.items()})

    def send_back_states(self, visiting: Chunk) -> None:
        """Copy states back from a chunk made by :meth:`with_states_here`, behind the device's work."""
        for name, values in self.states.items():
            if values is not visiting.states[name]:
                foreach_copy_(values.tensors, visiting.states[name].tensors, non_blocking=True)

    def without_values(self) -> Chunk:
        """Return the chunk on the meta device: its update asks in the right shapes and changes nothing."""

        def meta(tensors: TensorList) -> TensorList:
            return TensorList([torch.empty_like(tensor, device="meta") for tensor in tensors])

        states = {name: meta(values) for name, values in self.states.items()}
        weights = meta(self.weights.in_fp32())
        return replace(self, weights=weights, gradients=meta(weights), states=states)

    def write_back(self, results: TensorList) -> None:
        """Round fp32 results into half-precision weights."""
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
    """Make a chunk of members of one kind, with weights and gradients in their own types."""
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
    """Cut members into runs of at most a chunk's elements (``host_elements`` on a CPU); a parameter is never cut."""
    limit = host_elements if members[0].slot.device.type == "cpu" else _DEVICE_ELEMENTS
    return runs(members, lambda member: member.slot.weight.numel(), limit)


def runs(items: Iterable[_Item], size_of: Callable[[_Item], int], limit: int) -> list[list[_Item]]:
    """Cut items into consecutive runs whose sizes add up to at most ``limit``; a larger item is a run of its own."""
    found: list[list[_Item]] = [[]]
    total = 0
    for item in items:
        size = size_of(item)
        if found[-1] and total + size > limit:
            found.append([])
            total = 0
        found[-1].append(item)
        total += size
    return found
