"""Fused parameters of a tensor axis, and their states, in the model's own order in every checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import torch

from meshwright.errors import CheckpointError
from meshwright.nn import RankOrder, rank_orders
from meshwright.optim import local_tensor
from meshwright.optim.eight_bit.blocks import BLOCK_SIZE
from meshwright.store.entries import ModelEntries

_CODES, _SCALES = "_codes", "_absmax"  # of states in 8 bits


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


def check_orders(entries: ModelEntries, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuses what could be filled and not be put into the order of ranks; changes nothing.

    Raises:
        CheckpointError: When a state is quantized over what would be torn apart.
    """
    for _ in _fused(entries, tensors):
        pass


def _fused(entries: ModelEntries, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, RankOrder, int]]:
    """Name, order and dim of every tensor that has the rows of a fused parameter."""
    by_identity = rank_orders(entries.module)
    for weight, parameter in entries.tensors.items():
        order = by_identity.get(id(parameter))
        if order is None:
            continue
        for name, tensor in tensors.items():
            if f".{weight}." in f".{name}.":
                codes = tensors.get(f"{name.removesuffix(_SCALES)}{_CODES}") if name.endswith(_SCALES) else None
                if codes is not None:
                    found = _order_of_scales(name, tensor, codes, parameter, order)
                else:
                    found = _order_of(name, tensor, tensors, parameter, order)
                if found is not None:
                    yield name, *found


def _order_of(
    name: str, tensor: torch.Tensor, tensors: Mapping[str, torch.Tensor], parameter: torch.Tensor, order: RankOrder
) -> tuple[RankOrder, int] | None:
    """The order of a tensor and its dim that is the fused one; None when it has none, as a factor of columns."""
    dim = _fused_dim(tensor, parameter, order)
    if dim is None:
        return None
    if not tensor.is_floating_point():
        scales = tensors.get(f"{name.removesuffix(_CODES)}{_SCALES}") if name.endswith(_CODES) else None
        if scales is None:
            raise _torn(name, tensor)
        _order_of_scales(name, scales, tensor, parameter, order)
    return order, dim


def _order_of_scales(
    name: str, scales: torch.Tensor, codes: torch.Tensor, parameter: torch.Tensor, order: RankOrder
) -> tuple[RankOrder, int] | None:
    """The same of the scales of blocks of codes, which lie within rows: one row follows its codes, and whole blocks.

    Raises:
        CheckpointError: When a block reaches across parts that lie elsewhere in the other order.
    """
    dim = _fused_dim(codes, parameter, order)
    if dim is None or scales.numel() == 1:
        return None
    if dim == 0 and codes.ndim > 1 and scales.shape[0] == codes.shape[0]:
        return order, 0
    whole_blocks = all(part % (order.ranks * BLOCK_SIZE) == 0 for part in order.parts)
    if dim != codes.ndim - 1 or codes.ndim > 2 or not whole_blocks:
        raise _torn(name, codes)
    return dataclasses.replace(order, parts=tuple(part // BLOCK_SIZE for part in order.parts)), dim


def _fused_dim(tensor: torch.Tensor, parameter: torch.Tensor, order: RankOrder) -> int | None:
    if tensor.shape == parameter.shape:
        return order.dim
    dims = [dim for dim, size in enumerate(tensor.shape) if size == parameter.shape[order.dim]]
    return dims[0] if dims else None


def _torn(name: str, tensor: torch.Tensor) -> CheckpointError:
    return CheckpointError(
        f"{name} cannot be stored: its blocks of quantized values reach across the parts of a fused projection",
        expected=f"blocks within rows, or parts that are multiples of {BLOCK_SIZE} on every rank",
        got=f"{tensor.dtype} of shape {tuple(tensor.shape)}",
        fix="use an optimizer with states in fp32 or bf16 with tensor_parallel",
    )
