"""Gather an optimizer's states into whole tensors and load them onto any layout, one tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from meshwright.errors import CheckpointError
from meshwright.optim.dtensors import wrapped_like
from meshwright.runtime import any_rank, first_text, pipe_size, rank, same_on_every_rank, world_size
from meshwright.runtime.torch_internals.pytree import tree_map_only

ABSENT = "states_are_on_rank"
"""A key in the state dicts of ranks without states."""


@torch.no_grad()
def gathered_state_dict(optimizer: Optimizer) -> dict[str, Any]:
    """Return the torch state dict with whole tensors on the CPU; collective.

    At most one whole tensor is on a device at a time. The dict of rank 0 can be saved, and loaded by plain torch or by
    :func:`laid_out_like` on any number of ranks; those of other ranks have no states, and an entry that says so.

    Raises:
        CheckpointError: On every rank, when ranks hold parameters of different pipeline stages.
    """
    with same_on_every_rank():
        _refuse_stages(optimizer)
    own = getattr(optimizer, "gathered_state_dict", None)
    return own() if own is not None else gathered(optimizer.state_dict())


def _refuse_stages(optimizer: Optimizer) -> None:
    meshes = [p.device_mesh for p in _parameters(optimizer) if isinstance(p, DTensor)]
    if pipe_size() > 1 and any(mesh.size() < world_size() for mesh in meshes):
        raise CheckpointError(
            "Optimizer states cannot be gathered over pipeline stages yet",
            expected="parameters that all ranks hold parts of",
            got=f"blocks on {pipe_size()} stages",
            fix="save state_dict() without gathering on every rank, and load it on as many ranks and stages",
        )


@torch.no_grad()
def gathered(local: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict of this rank's shards with whole tensors on the CPU of rank 0; collective."""
    is_first = rank() == 0

    def whole(value: torch.Tensor) -> torch.Tensor | None:
        found = whole_tensor(value)
        return found.to("cpu", copy=True) if is_first else None

    states = {index: tree_map_only(torch.Tensor, whole, state) for index, state in local["state"].items()}
    return {**local, "state": states} if is_first else {**local, "state": {}, ABSENT: 0}


def whole_tensor(value: torch.Tensor) -> torch.Tensor:
    """Gather a DTensor, collectively, and return a plain tensor as it is."""
    if isinstance(value, DTensor):
        # Offloaded shards are gathered on the mesh's own device, the only one its groups may know.
        on_mesh: Any = wrapped_like(value, value.to_local().to(value.device_mesh.device_type))
        value = on_mesh.full_tensor()
    return value.detach()


@torch.no_grad()
def laid_out_like(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict whose states are sharded like the optimizer's parameters; collective.

    Args:
        optimizer: Any torch optimizer; its states are not touched. Its ``empty_state(parameter)``, or
            ``empty_state_under(parameter, group)`` where states depend on hyperparameters, gives the layout of states
            that are not laid out like their parameter; its ``laid_out(state_dict)`` does all of the work.
        state_dict: Local (DTensors, of this or another layout), or whole: on every rank, or on rank 0 alone, which then
            sends it to the others tensor by tensor.

    Returns:
        A new state dict that shares no tensor with the given one.

    Raises:
        CheckpointError: When parameters or shapes do not fit, on every rank.
    """
    own = getattr(optimizer, "laid_out", None)
    if own is not None:
        laid_out: dict[str, Any] = own(state_dict)
        return laid_out
    received = _agreed_source(optimizer, state_dict)
    parameters, groups = parameters_by_key(optimizer, state_dict), groups_by_key(state_dict)
    result: dict[Any, Any] = {}
    for name, state in (state_dict["state"] if received is None else received.outline).items():
        parameter = parameters.get(name)
        if parameter is None:  # torch leaves entries that belong to no parameter as they are
            result[name] = state
            continue
        template = template_of(optimizer, parameter, groups[name])
        result[name] = {}
        for key, value in state.items():
            whole = value if received is None else received.tensor(name, key, value, parameter)
            result[name][key] = placed(whole, key, parameter, template.get(key))
    return {"state": result, "param_groups": state_dict["param_groups"]}


def parameters_by_key(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[Any, torch.Tensor]:
    """Return the optimizer's parameters by their keys in a state dict: positions, or names in a distributed one."""
    saved = [name for group in state_dict["param_groups"] for name in group["params"]]
    return dict(zip(saved, _parameters(optimizer), strict=False))


def groups_by_key(state_dict: dict[str, Any]) -> dict[Any, dict[str, Any]]:
    """Return the saved group of every parameter, by its key in the state dict."""
    return {name: group for group in state_dict["param_groups"] for name in group["params"]}


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _agreed_source(optimizer: Optimizer, state_dict: dict[str, Any]) -> Received | None:
    """Return the states that rank 0 sends; None where every rank has its own.

    Raises:
        CheckpointError: On every rank, when they do not fit on one.
    """
    lacking = ABSENT in state_dict
    wrong = first_text(misfit(optimizer, state_dict))
    if wrong:
        raise of_others([group["params"] for group in optimizer.param_groups], wrong)
    return Received(state_dict["state"]) if any_rank(lacking) else None


def of_others(groups: Sequence[Sequence[Any]], got: str) -> CheckpointError:
    """Return the error for states of other parameters than those of these groups."""
    return CheckpointError(
        "The optimizer's saved states are not for these parameters",
        expected=f"groups of {[len(group) for group in groups]} parameters, in the shapes they have here",
        got=got,
        fix="build model, groups and optimizers as when the states were saved; load what rank 0 saved",
    )


def check_fit(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Refuse a state dict of other parameters, on this rank.

    Raises:
        CheckpointError: Naming what does not fit.
    """
    wrong = misfit(optimizer, state_dict)
    if wrong:
        raise of_others([group["params"] for group in optimizer.param_groups], wrong)


def load_laid_out(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Load what :func:`laid_out_like` returned, without laying it out once more."""
    take = getattr(optimizer, "take_laid_out", optimizer.load_state_dict)
    take(state_dict)


def misfit(optimizer: Optimizer, state_dict: dict[str, Any]) -> str:
    """Return a description of what does not fit in a state dict, or an empty string."""
    if ABSENT in state_dict and rank() == 0:
        return "a dict without states, as gathering leaves it on other ranks than 0"
    groups = [len(group["params"]) for group in state_dict["param_groups"]]
    if groups != [len(group["params"]) for group in optimizer.param_groups]:
        return f"groups of {groups} parameters"
    saved = groups_by_key(state_dict)
    for name, parameter in parameters_by_key(optimizer, state_dict).items():
        state = state_dict["state"].get(name) or {}
        template = template_of(optimizer, parameter, saved[name]) if state else {}
        like = template or dict.fromkeys(("exp_avg", "exp_avg_sq", "momentum_buffer", "master"), parameter)
        for key, wanted in like.items():
            value = state.get(key)
            if not (isinstance(value, torch.Tensor | Description) and isinstance(wanted, torch.Tensor)):
                continue
            if value.shape != wanted.shape:
                return f"{key} of shape {tuple(value.shape)} for parameter {name} of {tuple(parameter.shape)}"
    return ""


def template_of(optimizer: Optimizer, parameter: torch.Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return fresh states of a parameter, of optimizers that can make them without a step.

    Args:
        optimizer: See :func:`laid_out_like`.
        parameter: A parameter of the optimizer.
        group: The hyperparameters saved with the states, on which their precision and rank may depend.
    """
    under = getattr(optimizer, "empty_state_under", None)
    if under is not None:
        return dict(under(parameter, group))
    own = getattr(optimizer, "empty_state", None)
    return own(parameter) if own is not None else {}


def placed(value: Any, key: str, parameter: torch.Tensor, template: Any) -> Any:
    """Return one state on the layout of its template, or of its parameter where there is none."""
    if not isinstance(value, torch.Tensor):
        return value
    like = template if isinstance(template, torch.Tensor) else parameter
    if isinstance(value, DTensor):
        if isinstance(like, DTensor) and value.device_mesh == like.device_mesh and value.placements == like.placements:
            return wrapped_like(value, value.to_local().clone())
        value = whole_tensor(value)
    elif not isinstance(like, DTensor):
        return value.clone()
    if isinstance(like, DTensor) and value.shape == like.shape and key != "step":
        mesh = like.device_mesh
        sharded = distribute_tensor(value.to(mesh.device_type), mesh, like.placements, src_data_rank=None)
        # A copy on the template's device: a shard may be a view of the whole tensor, which must be freed.
        device = template.to_local().device if isinstance(template, DTensor) else mesh.device_type
        return wrapped_like(sharded, sharded.to_local().to(device, copy=True))
    return value.clone()


class Received:
    """The states of rank 0, sent to every rank one tensor at a time.

    Args:
        states: The states of rank 0; other ranks may pass anything.
    """

    def __init__(self, states: dict[Any, Any]) -> None:
        self._states = states
        described = [tree_map_only(torch.Tensor, Description, states) if rank() == 0 else None]
        dist.broadcast_object_list(described, src=0)
        self.outline: dict[Any, Any] = described[0] or {}
        """The states with a description in place of each tensor."""

    def tensor(self, name: Any, key: str, value: Any, parameter: torch.Tensor) -> Any:
        """Return one whole tensor; collective, in the order of ``outline``."""
        if not isinstance(value, Description):
            return value
        device = parameter.device if parameter.device.type != "meta" else torch.device("cpu")
        if rank() == 0:
            tensor = self._states[name][key].to(device).contiguous()
        else:
            tensor = torch.empty(value.shape, dtype=value.dtype, device=device)
        dist.broadcast(tensor, src=0)
        # Step counts live on the host unless the optimizer itself moves them.
        return tensor.cpu() if key == "step" else tensor


class Description:
    """Shape and type of a tensor, in place of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype

    def __repr__(self) -> str:
        """Return a text that is equal for equal descriptions."""
        return f"{tuple(self.shape)} {self.dtype}"
