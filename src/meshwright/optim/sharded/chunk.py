"""Update many parameters as one: tensor lists, per-parameter slots of states, and the chunks of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
        """√x."""
        return TensorList(foreach_sqrt(self.tensors))

    def rsqrt(self) -> TensorList:
        """1/√x."""
        return TensorList(foreach_rsqrt(self.tensors))

    def in_fp32(self) -> TensorList:
        """In fp32; itself, when all are so already."""
        if all(tensor.dtype == torch.float32 for tensor in self.tensors):
            return self
        return TensorList([tensor.float() for tensor in self.tensors])

    def to(self, device: torch.device) -> TensorList:
        """On a device, without waiting for it."""
        return TensorList([tensor.to(device, non_blocking=True) for tensor in self.tensors])

    def contiguous(self) -> TensorList:
        """In the order of their dims; tensors that are so already are not copied."""
        return TensorList([tensor.contiguous() for tensor in self.tensors])

    def add_(self, other: Operand, alpha: float = 1.0) -> TensorList:
        """X += alpha · other."""
        if isinstance(other, TensorList):
            foreach_add_(self.tensors, other.tensors, alpha=alpha)
        else:
            foreach_add_(self.tensors, self._operand(other if alpha == 1.0 else other * alpha))
        return self

    def mul_(self, other: Operand) -> TensorList:
        """X *= other."""
        foreach_mul_(self.tensors, self._operand(other))
        return self

    def div_(self, other: Operand) -> TensorList:
        """X /= other."""
        foreach_div_(self.tensors, self._operand(other))
        return self

    def sqrt_(self) -> TensorList:
        """X = √x."""
        foreach_sqrt_(self.tensors)
        return self

    def lerp_(self, end: TensorList, weight: float) -> TensorList:
        """X += weight · (end − x): an exponential moving average."""
        foreach_lerp_(self.tensors, end.tensors, weight)
        return self

    def addcmul_(self, first: TensorList, second: Operand, value: float = 1.0) -> TensorList:
        """X += value · first · second."""
        foreach_addcmul_(self.tensors, first.tensors, self._listed(second), value=value)
        return self

    def squares(self) -> torch.Tensor:
        """Σx² of every tensor, shape ``(len,)``, in fp32."""
        norms = foreach_norm(self.tensors)
        return torch.stack(norms).square_() if norms else torch.zeros(0)

    def sum(self, *dims: int) -> TensorList:
        """Sum over dims."""
        return TensorList([tensor.sum(dims) for tensor in self.tensors])

    def mean(self, *dims: int) -> TensorList:
        """Means over dims."""
        return TensorList([tensor.mean(dims) for tensor in self.tensors])

    def unsqueeze(self, dim: int) -> TensorList:
        """Return a dim of size one, for broadcasting."""
        return TensorList([tensor.unsqueeze(dim) for tensor in self.tensors])

    def map(self, function: Callable[..., torch.Tensor], *others: TensorList) -> TensorList:
        """``function(x, *others)`` tensor by tensor, where there is no multi-tensor kernel."""
        return TensorList([function(*parts) for parts in zip(self.tensors, *others, strict=True)])

    def _operand(self, other: Operand) -> Any:
        return other if isinstance(other, int | float) else self._listed(other)

    def _listed(self, other: Operand) -> list[torch.Tensor]:
        return other.tensors if isinstance(other, TensorList) else list(other.unbind())


# --- What an optimizer works with for each parameter: its shard, layout and states, looked up once and then checked.

KeptStates = Callable[[Layout, dict[str, Any]], dict[str, Kept]]


@dataclass(frozen=True, slots=True)
class Place:
    """Where the states of a parameter are kept: with its weights, or, but for the master, in host memory."""

    weights: torch.device
    on_host: bool = False

    def device(self, name: str) -> torch.device:
        """Of a state."""
        return torch.device("cpu") if self.on_host and name != MASTER else self.weights

    def of(self, name: str, shard: torch.Tensor) -> torch.Tensor:
        """A state's shard where it is kept: in page-locked memory, if it travels from there to a GPU."""
        device = self.device(name)
        shard = shard if shard.device == device else shard.to(device)
        travels = self.weights.type == "cuda" and device.type == "cpu"
        return shard.pin_memory() if travels and not shard.is_pinned() else shard


@dataclass(slots=True)
class Slot:
    """One parameter, ready for a step."""

    parameter: torch.Tensor
    layout: Layout
    weight: torch.Tensor
    """This rank's shard."""
    kept: dict[str, torch.Tensor]
    """The values in ``optimizer.state`` from which ``states`` were taken."""
    states: dict[str, torch.Tensor]
    """Their shards."""
    device: torch.device
    """Where the weight is; the states, too, or they wait in host memory."""
    state: dict[str, Any]
    """The parameter's entry in ``optimizer.state``."""

    @property
    def kind(self) -> tuple[Any, ...]:
        """Return what parameters share whose weights can be computed with together."""
        return self.device, self.weight.dtype, self.layout.mesh is None, self.layout.signature

    def is_current(self, state: dict[str, Any], weight: torch.Tensor) -> bool:
        """Return whether nobody has replaced or moved the weight, or replaced a state, since the last step."""
        return (
            weight is self.weight
            and state is self.state
            and weight.device == self.device
            and weight.shape == self.layout.local_shape
            and all(state.get(name) is value for name, value in self.kept.items())
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
    """New states of a parameter: zeros, and the master filled from the weights."""
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
    """Fill a parameter's empty states, or take over those that are there, on the weight's device or the host.

    Raises:
        ModelError: When a state does not fit the parameter as it is laid out now.
    """
    layout, weight = Layout.of(parameter), local_tensor(parameter)
    place = Place(weight.device, on_host)
    if not state:
        state["step"] = 0
        state.update(fresh_states(layout, group, parameter, kept_states, place))
    for name, form in forms(layout, group, parameter, kept_states).items():
        if name not in state and name == MASTER:  # saved where the weights were fp32
            state[name] = layout.new(form, weight.device)
            local_tensor(state[name]).copy_(weight)
        state[name] = _fitted(name, state.get(name), parameter, layout, form, place)
    state["step"] = int(state["step"])
    kept = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    shards = {name: local_tensor(value) for name, value in kept.items()}
    return Slot(parameter, layout, weight, kept, shards, weight.device, state)


def check_states(
    groups: Sequence[dict[str, Any]], defaults: dict[str, Any], state_dict: Mapping[str, Any], kept_states: KeptStates
) -> None:
    """Refuse a state dict that lacks what would be kept under the hyperparameters it brings, before it is loaded.

    Args:
        groups: The optimizer's.
        defaults: What a saved group that does not say it has.
        state_dict: With anything that has a shape in place of its tensors.
        kept_states: By layout and group.

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
    """A slot without values, for a parameter that has neither states nor, on this rank, a gradient."""
    layout, weight = Layout.of(parameter), local_tensor(parameter)
    fresh = fresh_states(layout, group, parameter, kept_states, Place(torch.device("meta")))
    shards = {name: local_tensor(value) for name, value in fresh.items()}
    return Slot(parameter, layout, weight, {}, shards, weight.device, {})


def _fitted(name: str, value: Any, parameter: torch.Tensor, layout: Layout, form: Kept, place: Place) -> torch.Tensor:
    """Return a state in the type and at the place where it is kept."""
    here = layout.restricted(form)
    if (
        isinstance(value, torch.Tensor)
        and isinstance(value, DTensor) == isinstance(parameter, DTensor)
        and tuple(value.shape) == form.shape
        and Layout.of(value).signature == here.signature
        and local_tensor(value).shape == here.local_shape
    ):
        part = local_tensor(value)
        kept = place.of(name, part.to(dtype=form.dtype))
        return value if kept is part else layout.wrapped(kept, form)
    raise ModelError(
        f"The state {name!r} does not fit its parameter: the parameter was laid out anew after the state was made, "
        "or the state was loaded from another optimizer",
        expected=f"shape {form.shape}, placed as {layout.placements_of(form)}",
        got=f"shape {tuple(value.shape)}, placed as {getattr(value, 'placements', 'a plain tensor')}"
        if isinstance(value, torch.Tensor)
        else repr(value),
        fix="save the optimizer's state, build it over the parameters as they are now, and load the state",
    )


# --- A batch of parameters that one pass of an update works on together.

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
        """Return where the weights are."""
        return self.weights.tensors[0].device

    @property
    def is_local(self) -> bool:
        """Return whether no axis splits these parameters: partial sums are whole already."""
        return self.layout.is_whole()

    def vector(self, values: Sequence[float]) -> torch.Tensor:
        """One number per parameter, shape ``(len,)`` fp32, made without waiting for the device."""
        host = torch.tensor(values, dtype=torch.float32)
        return host if self.device.type == "cpu" else host.to(self.device, non_blocking=True)

    def numels(self) -> torch.Tensor:
        """Return the elements of each whole parameter, shape ``(len,)``."""
        return self.vector([layout.numel for layout in self.layouts])

    def in_fp32(self, *, gradients: bool = True) -> Chunk:
        """Return the same chunk with weights (and gradients) in fp32; tensors that are so already are not copied."""
        read = self.gradients.in_fp32() if gradients else self.gradients
        return replace(self, weights=self.weights.in_fp32(), gradients=read)

    def with_states_here(self) -> Chunk:
        """Return the same chunk with copies, on the weights' device, of states that wait elsewhere."""
        if all(values.tensors[0].device == self.device for values in self.states.values()):
            return self
        return replace(self, states={name: values.to(self.device) for name, values in self.states.items()})

    def send_back_states(self, visiting: Chunk) -> None:
        """Take over the states of a chunk that was made with states here; they arrive behind the device's work."""
        for name, values in self.states.items():
            if values is not visiting.states[name]:
                foreach_copy_(values.tensors, visiting.states[name].tensors, non_blocking=True)

    def without_values(self) -> Chunk:
        """Return the same chunk on the meta device: an update of it asks in the right sizes and changes nothing."""

        def meta(tensors: TensorList) -> TensorList:
            return TensorList([torch.empty_like(tensor, device="meta") for tensor in tensors])

        states = {name: meta(values) for name, values in self.states.items()}
        weights = meta(self.weights.in_fp32())
        return replace(self, weights=weights, gradients=meta(weights), states=states)

    def write_back(self, results: TensorList) -> None:
        """Round fp32 results into weights that are kept in half precision."""
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
