"""Gather and load optimizer state dicts where ranks have parts of a model, as pipeline ranks do.

Where every rank has the whole model, :mod:`meshwright.optim.full_state_dict` does the work alone.
"""

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
from meshwright.optim import full_state_dict as full
from meshwright.optim.dtensors import ParameterPlacement, is_in_parts, placement_of
from meshwright.optim.full_state_dict import parameters_by_key
from meshwright.runtime import agreed, any_rank, first_text, largest, rank, same_on_every_rank, settings
from meshwright.runtime.agreement import gather_distinct


def gathered_state_dict(optimizer: Optimizer) -> dict[str, Any]:
    """Return the torch state dict with whole tensors on the CPU of rank 0; collective.

    See :func:`meshwright.optim.full_state_dict.gathered_state_dict`; here the optimizer may have a part of a model.
    """
    if not any_rank(is_in_parts(optimizer)):
        return full.gathered_state_dict(optimizer)
    return _gathered(optimizer, WholeGroups.of(optimizer))


def laid_out_like(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict whose states are sharded like the optimizer's parameters; collective.

    See :func:`meshwright.optim.full_state_dict.laid_out_like`; here the optimizer may have a part of a model.
    """
    lacking = full.ABSENT in state_dict
    in_parts, is_sent, has_shards = largest([int(is_in_parts(optimizer)), int(lacking), int(_has_shards(state_dict))])
    if not in_parts:
        return full.laid_out_like(optimizer, state_dict)
    whole = WholeGroups.of(optimizer)
    is_whole = not has_shards and _sizes(state_dict) == [len(g) for g in whole.groups]
    # Otherwise it is every rank's own state dict, of this very layout.
    if not any_rank(is_sent > 0 or is_whole):
        return full.laid_out_like(optimizer, state_dict)
    return _laid_out(optimizer, whole, state_dict, is_sent > 0)


@dataclass(frozen=True)
class WholeGroups:
    """Parameter groups of the whole model, and this rank's parameters among them."""

    groups: list[list[int]]
    """Positions of each group's parameters in the model; equal on every rank."""
    parameters: dict[int, tuple[torch.Tensor, ParameterPlacement]]
    """This rank's parameters by position."""

    @classmethod
    def of(cls, optimizer: Optimizer) -> WholeGroups:
        """Unite the groups of all ranks' optimizers; collective.

        Raises:
            CheckpointError: On every rank, when numbers of groups differ, or parameters have no placement.
        """
        groups = [[(p, placement_of(p)) for p in group["params"]] for group in optimizer.param_groups]
        own = [[None if placement is None else placement.position for _, placement in group] for group in groups]
        every = [each for _, each in gather_distinct(own, repr(own))]
        strange = any(position is None for ranks_groups in every for group in ranks_groups for position in group)
        if strange or len({len(ranks_groups) for ranks_groups in every}) != 1:
            raise agreed(
                CheckpointError(
                    "The optimizers of pipeline ranks have groups that do not belong together",
                    expected="as many groups on every rank, of parameters of the accelerated model",
                    got=f"{[len(each) for each in every]} groups" if not strange else "parameters of another model",
                    fix="build groups by rules that hold on every rank; a group may be empty on some",
                )
            )
        united = [sorted({position for group in same for position in group}) for same in zip(*every, strict=True)]
        here = {placement.position: (p, placement) for group in groups for p, placement in group if placement}
        return cls(united, here)

    @property
    def keys(self) -> dict[int, int]:
        """Return each parameter's key in torch's state dict of one process, by position."""
        return {position: key for key, position in enumerate(position for group in self.groups for position in group)}


def _sizes(state_dict: dict[str, Any]) -> list[int]:
    return [len(group["params"]) for group in state_dict["param_groups"]]


def _has_shards(state_dict: dict[str, Any]) -> bool:
    states = state_dict.get("state", {}).values()  # a wrapper's state dict may have another form
    return any(isinstance(each, DTensor) for state in states for each in state.values())


@torch.no_grad()
def _gathered(optimizer: Optimizer, whole: WholeGroups) -> dict[str, Any]:
    """Collect every state whole on the CPU of rank 0, sent by the first rank that has it."""
    local = optimizer.state_dict()
    mine = {
        placement.position: local["state"].get(key) or {}
        for key, parameter in full.parameters_by_key(optimizer, local).items()
        if (placement := placement_of(parameter)) is not None
    }
    with same_on_every_rank():  # states that cannot be reordered fail before any rank waits for them
        for position, state in mine.items():
            for name, value in state.items():
                _fused_dim(name, value, *whole.parameters[position])
    outline = {position: _outline(state) for position, state in mine.items()}
    # Pipeline ranks of one stage have the same, and the first of them sends it.
    outlines = [(ranks[0], its) for ranks, its in gather_distinct(outline, repr(sorted(outline.items())))]
    states: dict[int, dict[str, Any]] = {}
    for position, key in whole.keys.items():
        owner, described = next((first, known[position]) for first, known in outlines if position in known)
        found = {name: _collected(whole, mine, position, name, each, owner) for name, each in described.items()}
        if found:
            states[key] = found
    groups = [
        {**{name: value for name, value in group.items() if name != "param_names"}, "params": keys}
        for group, keys in zip(local["param_groups"], _keys_of_groups(whole), strict=True)
    ]
    if rank() == 0:
        return {**local, "state": states, "param_groups": groups}
    return {**local, "state": {}, "param_groups": groups, full.ABSENT: 0}


def _keys_of_groups(whole: WholeGroups) -> list[list[int]]:
    return [[whole.keys[position] for position in group] for group in whole.groups]


def _outline(state: dict[str, Any]) -> dict[str, Any]:
    return {key: full.Description(v) if isinstance(v, torch.Tensor) else v for key, v in state.items()}


def _collected(
    whole: WholeGroups, mine: dict[int, dict[str, Any]], position: int, name: str, outline: Any, owner: int
) -> Any:
    """Return one whole state on rank 0, which the ranks that have shards of it put together."""
    if not isinstance(outline, full.Description):
        return outline
    value = None
    if name in mine.get(position, {}):
        parameter, placement = whole.parameters[position]
        value = full.whole_tensor(mine[position][name])
        dim = _fused_dim(name, value, parameter, placement)
        if placement.order is not None and dim is not None:
            value = placement.order.to_model(value, dim)
    if rank() == owner != 0:
        assert value is not None
        dist.send(value.to(settings().device).contiguous(), dst=0)
    if rank() > 0:
        return None
    if owner > 0:
        value = torch.empty(outline.shape, dtype=outline.dtype, device=settings().device)
        dist.recv(value, src=owner)
    assert value is not None
    return value.to("cpu", copy=True)


def _fused_dim(name: str, value: Any, parameter: torch.Tensor, placement: ParameterPlacement) -> int | None:
    """Return the dim of a state (or its description) that lies in the order of ranks, like its parameter's."""
    if placement.order is None or not isinstance(value, torch.Tensor | full.Description) or not value.shape:
        return None
    if value.shape == parameter.shape and not value.dtype.is_floating_point:
        raise CheckpointError(
            f"The state {name!r} has quantized values across the parts of a fused projection: they cannot be separated",
            expected="states in floating point under tensor_parallel",
            got=str(value.dtype),
            fix="use an optimizer with states in fp32 or bf16 with tensor_parallel",
        )
    if value.shape == parameter.shape:
        return placement.order.dim
    dims = [dim for dim, size in enumerate(value.shape) if size == parameter.shape[placement.order.dim]]
    return dims[0] if dims else None


@torch.no_grad()
def _laid_out(optimizer: Optimizer, whole: WholeGroups, state_dict: dict[str, Any], is_sent: bool) -> dict[str, Any]:
    """Lay whole states, of rank 0 or of every rank, out like the parameters here."""
    received = full.Received(state_dict["state"]) if is_sent else None
    outline = state_dict["state"] if received is None else received.outline
    local, places = _local_groups(optimizer, whole, state_dict)
    lacking = {full.ABSENT: 0} if full.ABSENT in state_dict else {}
    shapes = {
        **lacking,
        "state": {places[key]: state for key, state in outline.items() if key in places},
        "param_groups": local,
    }
    wrong = "" if _sizes(state_dict) == [len(g) for g in whole.groups] else f"groups of {_sizes(state_dict)} parameters"
    wrong = first_text(wrong or full.misfit(optimizer, shapes))
    if wrong:
        raise agreed(full.of_others(whole.groups, wrong))
    parameters = {whole.keys[position]: both for position, both in whole.parameters.items()}
    groups = full.groups_by_key(shapes)
    with same_on_every_rank():
        for key in outline.keys() & parameters.keys():
            for name, value in outline[key].items():
                _fused_dim(name, value, *parameters[key])
    elsewhere = torch.empty(0, device=settings().device)
    result: dict[int, dict[str, Any]] = {}
    for key, state in outline.items():
        parameter, placement = parameters.get(key, (elsewhere, None))
        template = full.template_of(optimizer, parameter, groups[places[key]]) if placement is not None else {}
        for name, value in state.items():
            given = value if received is None else received.tensor(key, name, value, parameter)
            if placement is None:
                continue
            dim = _fused_dim(name, given, parameter, placement)
            given = placement.order.to_ranks(given, dim) if placement.order is not None and dim is not None else given
            placed = full.placed(given, name, parameter, template.get(name))
            result.setdefault(places[key], {})[name] = placed
    return {"state": result, "param_groups": local}


def _local_groups(
    optimizer: Optimizer, whole: WholeGroups, state_dict: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[int, int]]:
    """Return the saved groups with this rank's parameters, and the local numbers of these by whole-model key."""
    places: dict[int, int] = {}
    groups = []
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
        numbers = []
        for parameter in group["params"]:
            placement = placement_of(parameter)
            assert placement is not None, "WholeGroups.of has checked"
            numbers.append(len(places))
            places[whole.keys[placement.position]] = numbers[-1]
        groups.append({**saved, "params": numbers})
    return groups, places


# --- The base class of our optimizers' state dicts: saved as shards or whole, loaded onto any layout


class ShardedStateDict(Optimizer):
    """Base class of optimizers whose states follow their parameters' layout when they are saved and loaded."""

    def check_saved(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse a state dict whose states do not fit by name and shape.

        Raises:
            CheckpointError: Naming the states.
        """

    @abstractmethod
    def forget(self) -> None:
        """Release states that are about to be replaced."""

    def state_dict(self, gather: bool = False) -> dict[str, Any]:
        """Return the torch state dict, with this rank's shards as DTensors.

        Args:
            gather: Return whole tensors on the CPU of rank 0 instead; collective, see
                :func:`meshwright.optim.full_state_dict.gathered_state_dict`.
        """
        return gathered_state_dict(self) if gather else super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of any world size, whole or sharded; collective.

        Raises:
            CheckpointError: On every rank, when it is of other parameters or of another kind of optimizer.
        """
        self.take_laid_out(laid_out_like(self, state_dict))

    def take_laid_out(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict with states laid out like the parameters, which the optimizer owns from then on.

        torch's ``load_state_dict`` would round the fp32 states of half-precision parameters.

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
