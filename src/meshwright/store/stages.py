"""Whole tensors between rank 0 and the one pipeline stage that holds them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from meshwright.errors import CheckpointError, join_names
from meshwright.nn import stages_of, whole_model
from meshwright.nn.layout import laid_out_like
from meshwright.runtime import pipe_size, rank, settings, stage_index, world_size
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
        raise CheckpointError(
            f"{what} does not join pipeline stages yet",
            expected="a model without PipelineTransformerBlockList, or pipe_size=1",
            got="blocks on other ranks",
            fix="use meshwright.save",
        )


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
        target.to_local().copy_(laid_out_like(target, whole).to_local())
    else:
        target.copy_(whole)
