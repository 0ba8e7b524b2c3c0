"""Fused parameters of a tensor axis, and their states, in the model's own order in every checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from meshwright.errors import CheckpointError
from meshwright.nn import RankOrder, rank_orders
from meshwright.optim import local_tensor
from meshwright.store.entries import ModelEntries


def in_model_order(entries: ModelEntries, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors with those that lie in the order of ranks replaced by copies in the model's; collective for these.

    Args:
        entries: The model.
        tensors: By names that contain those of the model: weights, masters and states.

    Raises:
        CheckpointError: When a state is quantized over what would be torn apart.
    """
    return dict(tensors) | {name: order.to_model(tensors[name], dim) for name, order, dim in _fused(entries, tensors)}


@torch.no_grad()
def to_rank_order_(entries: ModelEntries, tensors: Mapping[str, torch.Tensor]) -> None:
    """Puts tensors that were filled in the model's order into the order of ranks, in place; collective for these."""
    for name, order, dim in _fused(entries, tensors):
        local_tensor(tensors[name].detach()).copy_(local_tensor(order.to_ranks(tensors[name], dim)))


def _fused(entries: ModelEntries, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, RankOrder, int]]:
    """Name, order and dim of every tensor that has the rows of a fused parameter."""
    by_identity = rank_orders(entries.module)
    for weight, parameter in entries.tensors.items():
        order = by_identity.get(id(parameter))
        if order is None:
            continue
        for name, tensor in tensors.items():
            if f".{weight}." in f".{name}.":
                dim = _fused_dim(name, tensor, parameter, order)
                if dim is not None:
                    yield name, order, dim


def _fused_dim(name: str, tensor: torch.Tensor, parameter: torch.Tensor, order: RankOrder) -> int | None:
    """The dim of a tensor that is the fused one of its parameter; None when it has none, as a factor of columns."""
    if tensor.shape == parameter.shape and not tensor.is_floating_point():
        raise CheckpointError(
            f"{name} cannot be stored: its blocks of quantized values reach across the parts of a fused projection",
            expected="states in floating point under tensor_parallel",
            got=str(tensor.dtype),
            fix="use an optimizer with states in fp32 or bf16 with tensor_parallel",
        )
    if tensor.shape == parameter.shape:
        return order.dim
    dims = [dim for dim, size in enumerate(tensor.shape) if size == parameter.shape[order.dim]]
    return dims[0] if dims else None
