"""Gather and load optimizer state dicts when the model is split over pipeline ranks, or held whole."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshwright.errors import CheckpointError
from meshwright.optim import full_state_dict as whole_state
from meshwright.optim.dtensors import ParameterPlacement, is_in_parts, placement_of
from meshwright.optim.full_state_dict import parameters_by_key
from meshwright.runtime import agreed, gather_objects, rank, same_on_every_rank, settings


def gathered_state_dict(optimizer: Optimizer) -> dict[str, Any]:
    """:func:`meshwright.optim.full_state_dict.gathered_state_dict`, also of an optimizer over a part of a model."""
    if not any(gather_objects(is_in_parts(optimizer))):
        return whole_state.gathered_state_dict(optimizer)
    return _gathered(optimizer, Whole.of(optimizer))


def laid_out_like(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """:func:`meshwright.optim.full_state_dict.laid_out_like`, also of an optimizer over a part of a model."""
    lacking = whole_state.ABSENT in state_dict
    every = gather_objects((is_in_parts(optimizer), lacking, _has_shards(state_dict)))
    if not any(in_parts for in_parts, _, _ in every):
        return whole_state.laid_out_like(optimizer, state_dict)
    whole = Whole.of(optimizer)
    is_sent = any(lacks for _, lacks, _ in every)
    is_whole = not any(shards for _, _, shards in every) and _sizes(state_dict) == [len(g) for g in whole.groups]
    if not any(gather_objects(is_sent or is_whole)):  # every rank's own, of this very layout
        return whole_state.laid_out_like(optimizer, state_dict)
    return _laid_out(optimizer, whole, state_dict, is_sent)


@dataclass(frozen=True)
class Whole:
    """The groups of one process, and what of them is here."""

    groups: list[list[int]]
    """Positions of parameters in the model; equal on every rank."""
    parameters: dict[int, tuple[torch.Tensor, ParameterPlacement]]
    """This rank's, by position."""

    @classmethod
    def of(cls, optimizer: Optimizer) -> Whole:
        """Of this rank's optimizer and all others'; collective.

        Raises:
            CheckpointError: On every rank, when groups are not the same everywhere, or parameters of unknown place.
        """
        groups = [[(parameter, placement_of(parameter)) for parameter in g["params"]] for g in optimizer.param_groups]
        every = gather_objects([[held.position if held is not None else None for _, held in g] for g in groups])
        strange = any(position is None for told in every for group in told for position in group)
        if strange or len({len(told) for told in every}) != 1:
            raise agreed(
                CheckpointError(
                    "The optimizers of pipeline ranks have groups that do not belong together",
                    expected="as many groups on every rank, of parameters of the accelerated model",
                    got=f"{[len(told) for told in every]} groups" if not strange else "parameters of another model",
                    fix="build groups by rules that hold on every rank; a group may be empty on some",
                )
            )
        united = [sorted({position for told in every for position in told[index]}) for index in range(len(every[0]))]
        here = {held.position: (parameter, held) for g in groups for parameter, held in g if held is not None}
        return cls(united, here)

    @property
    def keys(self) -> dict[int, int]:
        """Return what torch's state dict of one process calls each parameter, by its position."""
        return {position: key for key, position in enumerate(position for group in self.groups for position in group)}


def _sizes(state_dict: dict[str, Any]) -> list[int]:
    return [len(group["params"]) for group in state_dict["param_groups"]]


def _has_shards(state_dict: dict[str, Any]) -> bool:
    states = state_dict.get("state", {}).values()  # an optimizer around another may have a form of its own
    return any(isinstance(each, DTensor) for state in states for each in state.values())


@torch.no_grad()
def _gathered(optimizer: Optimizer, whole: Whole) -> dict[str, Any]:
    """Every state whole on the CPU of rank 0, sent by the first rank that holds it."""
    local = optimizer.state_dict()
    mine = {
        held.position: local["state"].get(key) or {}
        for key, parameter in whole_state.parameters_by_key(optimizer, local).items()
        if (held := placement_of(parameter)) is not None
    }
    with same_on_every_rank():  # what cannot be put in order is an error before anybody waits for it
        for position, state in mine.items():
            for name, value in state.items():
                _fused_dim(name, value, *whole.parameters[position])
    outlines = gather_objects({position: _outline(state) for position, state in mine.items()})
    states: dict[int, dict[str, Any]] = {}
    for position, key in whole.keys.items():
        owner = next(index for index, told in enumerate(outlines) if position in told)
        outline = outlines[owner][position]
        found = {name: _collected(whole, mine, position, name, told, owner) for name, told in outline.items()}
        if found:
            states[key] = found
    groups = [
        {**{name: value for name, value in group.items() if name != "param_names"}, "params": keys}
        for group, keys in zip(local["param_groups"], _keys_of_groups(whole), strict=True)
    ]
    if rank() == 0:
        return {**local, "state": states, "param_groups": groups}
    return {**local, "state": {}, "param_groups": groups, whole_state.ABSENT: 0}


def _keys_of_groups(whole: Whole) -> list[list[int]]:
    return [[whole.keys[position] for position in group] for group in whole.groups]


def _outline(state: dict[str, Any]) -> dict[str, Any]:
    return {key: whole_state.Description(v) if isinstance(v, torch.Tensor) else v for key, v in state.items()}


def _collected(whole: Whole, mine: dict[int, dict[str, Any]], position: int, name: str, told: Any, owner: int) -> Any:
    """One state on rank 0; its holders put it together."""
    if not isinstance(told, whole_state.Description):
        return told
    value = None
    if name in mine.get(position, {}):
        parameter, held = whole.parameters[position]
        value = whole_state.whole_tensor(mine[position][name])
        dim = _fused_dim(name, value, parameter, held)
        if held.order is not None and dim is not None:
            value = held.order.to_model(value, dim)
    if rank() == owner != 0:
        assert value is not None
        dist.send(value.to(settings().device).contiguous(), dst=0)
    if rank() > 0:
        return None
    if owner > 0:
        value = torch.empty(told.shape, dtype=told.dtype, device=settings().device)
        dist.recv(value, src=owner)
    assert value is not None
    return value.to("cpu", copy=True)


def _fused_dim(name: str, value: Any, parameter: torch.Tensor, held: ParameterPlacement) -> int | None:
    """Return the dim of a state, a tensor or the description of one, that lies in the order of ranks as its parameter does."""
    if held.order is None or not isinstance(value, torch.Tensor | whole_state.Description) or not value.shape:
        return None
    if value.shape == parameter.shape and not value.dtype.is_floating_point:
        raise CheckpointError(
            f"The state {name!r} has quantized values across the parts of a fused projection: they cannot be separated",
            expected="states in floating point under tensor_parallel",
            got=str(value.dtype),
            fix="use an optimizer with states in fp32 or bf16 with tensor_parallel",
        )
    if value.shape == parameter.shape:
        return held.order.dim
    dims = [dim for dim, size in enumerate(value.shape) if size == parameter.shape[held.order.dim]]
    return dims[0] if dims else None


@torch.no_grad()
def _laid_out(optimizer: Optimizer, whole: Whole, state_dict: dict[str, Any], is_sent: bool) -> dict[str, Any]:
    """Whole states, of rank 0 or on every rank, as the parameters here lie."""
    received = whole_state.Received(state_dict["state"]) if is_sent else None
    outline = state_dict["state"] if received is None else received.outline
    local, places = _local_groups(optimizer, whole, state_dict)
    lacking = {whole_state.ABSENT: 0} if whole_state.ABSENT in state_dict else {}
    shapes = {
        **lacking,
        "state": {places[key]: state for key, state in outline.items() if key in places},
        "param_groups": local,
    }
    wrong = "" if _sizes(state_dict) == [len(g) for g in whole.groups] else f"groups of {_sizes(state_dict)} parameters"
    wrong = next((text for text in gather_objects(wrong or whole_state.misfit(optimizer, shapes)) if text), "")
    if wrong:
        raise agreed(whole_state.of_others(whole.groups, wrong))
    parameters = {whole.keys[position]: both for position, both in whole.parameters.items()}
    groups = whole_state.groups_by_key(shapes)
    with same_on_every_rank():
        for key in outline.keys() & parameters.keys():
            for name, value in outline[key].items():
                _fused_dim(name, value, *parameters[key])
    elsewhere = torch.empty(0, device=settings().device)
    result: dict[int, dict[str, Any]] = {}
    for key, state in outline.items():
        parameter, held = parameters.get(key, (elsewhere, None))
        template = whole_state.template_of(optimizer, parameter, groups[places[key]]) if held is not None else {}
        for name, value in state.items():
            given = value if received is None else received.tensor(key, name, value, parameter)
            if held is None:
                continue
            dim = _fused_dim(name, given, parameter, held)
            given = held.order.to_ranks(given, dim) if held.order is not None and dim is not None else given
            placed = whole_state.placed(given, name, parameter, template.get(name))
            result.setdefault(places[key], {})[name] = placed
    return {"state": result, "param_groups": local}


def _local_groups(
    optimizer: Optimizer, whole: Whole, state_dict: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[int, int]]:
    """Return the saved groups with this rank's parameters, and the numbers of these by what the whole calls them."""
    places: dict[int, int] = {}
    groups = []
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
        numbers = []
        for parameter in group["params"]:
            held = placement_of(parameter)
            assert held is not None, "Whole.of has looked"
            numbers.append(len(places))
            places[whole.keys[held.position]] = numbers[-1]
        groups.append({**saved, "params": numbers})
    return groups, places


# --- State dicts of an optimizer over shards: local, or whole tensors on rank 0; loaded onto any layout.


class ShardedStateDict(Optimizer):
    """Base of optimizers whose states follow their parameters' layout when they are saved and loaded."""

    def check_saved(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse a state dict that this optimizer could not go on with; of the states only names and shapes count.

        Raises:
            CheckpointError: Naming the states.
        """

    @abstractmethod
    def forget(self) -> None:
        """Let go of states that are about to be replaced."""

    def state_dict(self, gather: bool = False) -> dict[str, Any]:
        """Return the torch state dict, with this rank's shards as DTensors.

        Args:
            gather: Whole tensors on the CPU of rank 0 instead, collective; see
                :func:`meshwright.optim.full_state_dict.gathered_state_dict`.
        """
        return gathered_state_dict(self) if gather else super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state dict of any world size, whole or sharded. Collective.

        Raises:
            CheckpointError: On every rank, when it is of other parameters or of another kind of optimizer.
        """
        self.take_laid_out(laid_out_like(self, state_dict))

    def take_laid_out(self, state_dict: dict[str, Any]) -> None:
        """Take over a state dict with states laid out like the parameters; they belong to the optimizer from then on.

        Torch's own way would round the fp32 states of half parameters to half.

        Raises:
            CheckpointError: On every rank, when :meth:`check_saved` refuses it on one; nothing is changed then.
        """
        with same_on_every_rank():
            self.check_saved(state_dict)
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self.forget()
        parameters = parameters_by_key(self, state_dict)
        for name, state in state_dict["state"].items():
            self.state[parameters.get(name, name)] = state
