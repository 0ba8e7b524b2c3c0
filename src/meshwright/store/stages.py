"""Whole tensors between rank 0 and the one pipeline stage that holds them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from meshwright.errors import CheckpointError, join_names
from meshwright.nn import stages_of, whole_model
from meshwright.runtime import gather_objects, pipe_size, rank, settings, stage_index, world_size
from meshwright.store.entries import ModelEntries, model_entries


def whole_entries(model: torch.nn.Module) -> tuple[ModelEntries, dict[str, int]]:
    """The entries of a model, those of other pipeline stages on ``meta``, and the stages of those that are on one.

    Raises:
        CheckpointError: When a module on a stage has extra state that is no tensor.
    """
    with whole_model():
        entries = model_entries(model)
    stages = stages_of(entries.module, entries.raw)
    other = [name for name in stages if not isinstance(entries.raw[name], torch.Tensor)]
    if other:
        raise CheckpointError(
            "Extra state of modules on pipeline stages cannot be stored yet",
            expected="parameters and buffers in a PipelineTransformerBlockList",
            got=join_names(other),
            fix="keep it in buffers, or in a module outside the list",
        )
    return entries, stages


def refuse_stages(model: torch.nn.Module, what: str) -> None:
    """Refuses what handles models that every rank holds alike.

    Raises:
        CheckpointError: When the model is spread over pipeline stages.
    """
    if whole_entries(model)[1]:
        raise _not_joined(what, "a model without PipelineTransformerBlockList, or pipe_size=1", "use meshwright.save")


def refuse_parts(holders: dict[str, int], what: str, fix: str) -> None:
    """Refuses the same for the stages of ``pipeline_parallel``; see :func:`holders_of`.

    Raises:
        CheckpointError: When ranks hold different names.
    """
    if holders:
        raise _not_joined(what, "a model without pipeline_parallel", fix)


def _not_joined(what: str, expected: str, fix: str) -> CheckpointError:
    return CheckpointError(
        f"{what} does not join pipeline stages yet", expected=expected, got="blocks on other ranks", fix=fix
    )


def holders_of(names: Iterable[str]) -> dict[str, int]:
    """The first rank that holds each name, where ``pipeline_parallel`` left ranks with different ones; collective.

    Args:
        names: Of this rank's state dict.

    Returns:
        Equal on every rank; empty where all hold the same names.
    """
    own = list(names)
    every = gather_objects(own)
    if all(each == own for each in every):
        return {}
    holders: dict[str, int] = {}
    for number, each in enumerate(every):
        for name in each:
            holders.setdefault(name, number)
    return holders


def collect_parts(own: Mapping[str, Any], holders: Mapping[str, int]) -> dict[str, Any]:
    """Everything that ranks hold together, whole, on the host of rank 0; elsewhere empty. Collective.

    Args:
        own: This rank's state dict.
        holders: Of :func:`holders_of`.
    """
    here = {name for name, first in holders.items() if first == rank()}
    told = {n: (v.shape, v.dtype) if isinstance(v, torch.Tensor) else v for n, v in own.items() if n in here}
    described = {name: about for each in gather_objects(told) for name, about in each.items()}
    state_dict: dict[str, Any] = {}
    for name, first in holders.items():
        value, about = own.get(name), described[name]
        if isinstance(value, DTensor):  # all its holders are here: their state dicts have one order
            value = value.full_tensor()
        if not (isinstance(about, tuple) and isinstance(about[0], torch.Size)):
            state_dict[name] = about
        elif first == rank() != 0:
            assert isinstance(value, torch.Tensor)
            dist.send(value.detach().contiguous(), dst=0)
        elif rank() == 0 and first > 0:
            state_dict[name] = torch.empty(*about[:1], dtype=about[1], device=settings().device)
            dist.recv(state_dict[name], src=first)
            state_dict[name] = state_dict[name].cpu()
        elif rank() == 0:
            state_dict[name] = value.detach().to("cpu", copy=True)  # type: ignore[union-attr]
    return state_dict if rank() == 0 else {}


def collect_from_stage(tensor: torch.Tensor, stage: int) -> torch.Tensor | None:
    """A copy on the host of rank 0 of what one stage holds; None elsewhere. Every rank of the world calls it.

    Args:
        tensor: On ranks of other stages one on ``meta`` of its shape and dtype.
        stage: Where it is.
    """
    tensor = tensor.detach()
    first = stage * (world_size() // pipe_size())
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    if rank() == first != 0:
        dist.send(whole.contiguous(), dst=0)
    if rank() > 0:
        return None
    if first > 0:
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=settings().device)
        dist.recv(whole, src=first)
    return whole.to("cpu", copy=True)


def spread_to_stage(source: torch.Tensor | None, target: torch.Tensor, stage: int) -> None:
    """Copies a whole tensor, which rank 0 holds, into what one stage holds of it. Every rank of the world calls it."""
    target = target.detach()
    if source is not None:
        whole = source.to(settings().device, target.dtype).contiguous()
    else:
        whole = torch.empty(target.shape, dtype=target.dtype, device=settings().device)
    dist.broadcast(whole, src=0)
    if stage_index() != stage:
        return
    if isinstance(target, DTensor):
        part = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(part.to_local())
    else:
        target.copy_(whole)
