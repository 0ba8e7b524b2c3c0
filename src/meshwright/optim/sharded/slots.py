"""What an optimizer works with for each parameter: its shard, layout and states, looked up once and then checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright.errors import CheckpointError, ModelError, join_names
from meshwright.optim.clip import local_tensor
from meshwright.optim.layouts import HALF_TYPES
from meshwright.optim.master import MASTER
from meshwright.optim.sharded.layout import Kept, Layout

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
        """What parameters share whose weights can be computed with together."""
        return self.device, self.weight.dtype, self.layout.mesh is None, self.layout.signature

    def is_current(self, state: dict[str, Any], weight: torch.Tensor) -> bool:
        """Whether nobody has replaced or moved the weight, or replaced a state, since the last step."""
        return (
            weight is self.weight
            and state is self.state
            and weight.device == self.device
            and weight.shape == self.layout.local_shape
            and all(state.get(name) is value for name, value in self.kept.items())
        )


def forms(layout: Layout, group: dict[str, Any], parameter: torch.Tensor, kept_states: KeptStates) -> dict[str, Kept]:
    """The form of every state of a parameter, the master included."""
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
    """Fills a parameter's empty states, or takes over those that are there, on the weight's device or the host.

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
    """Refuses a state dict that lacks what would be kept under the hyperparameters it brings, before it is loaded.

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
    """A state in the type and at the place where it is kept."""
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
