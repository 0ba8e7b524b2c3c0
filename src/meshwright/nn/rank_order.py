"""Parameters whose rows lie in the order of ranks: fused projections that a tensor axis splits.

A fused projection lists all queries, then all keys, then all values; each rank of a tensor axis needs some of each. So
the DTensor's whole tensor lists rank 0's queries, keys and values, then rank 1's. Everything that does not care for the
order of rows (updates, norms, further sharding) works on it as it is; state dicts and checkpoints have the model's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

_ATTRIBUTE = "_rank_orders"


@dataclass(frozen=True)
class RankOrder:
    """How a dim of a parameter is laid out.

    Args:
        dim: The dim.
        parts: Sizes of what is fused along it, in the model's own order.
        ranks: Size of the tensor axis; divides every one of them.
    """

    dim: int
    parts: tuple[int, ...]
    ranks: int

    def source(self) -> torch.Tensor:
        """For every place in the order of ranks: the place in the model's own order, int64."""
        places = torch.arange(sum(self.parts)).split(list(self.parts))
        return torch.cat([part.chunk(self.ranks)[rank] for rank in range(self.ranks) for part in places])

    def to_model(self, tensor: torch.Tensor, dim: int | None = None) -> torch.Tensor:
        """A tensor in the order of ranks, plain or DTensor, in the model's own; collective for a DTensor."""
        return _permuted(tensor, self.dim if dim is None else dim, self.source().argsort())

    def to_ranks(self, tensor: torch.Tensor, dim: int | None = None) -> torch.Tensor:
        """The way back."""
        return _permuted(tensor, self.dim if dim is None else dim, self.source())


@torch.no_grad()
def _permuted(tensor: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor.detach().index_select(dim, index.to(tensor.device))
    whole: torch.Tensor = tensor.full_tensor().detach()
    whole = whole.index_select(dim, index.to(whole.device))
    return distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)


def keep_rank_order(module: nn.Module, name: str, order: RankOrder) -> None:
    """Notes that a parameter of a module lies in the order of ranks; its state dict keeps the model's own.

    ``state_dict()`` and ``load_state_dict()`` of such a model are collective. With ``keep_vars=True`` the former holds
    the parameters themselves, as they lie.
    """
    orders = module.__dict__.setdefault(_ATTRIBUTE, {})
    if not orders:
        module.register_state_dict_post_hook(_to_model_order)
        module.register_load_state_dict_pre_hook(_to_rank_order)
    orders[name] = order


def rank_orders(model: nn.Module) -> dict[int, RankOrder]:
    """The parameters of a model that lie in the order of ranks, by identity."""
    return {
        id(getattr(module, name)): order
        for module in model.modules()
        for name, order in module.__dict__.get(_ATTRIBUTE, {}).items()
    }


def _to_model_order(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    for name, order in module.__dict__[_ATTRIBUTE].items():
        value = state_dict.get(prefix + name)
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            state_dict[prefix + name] = order.to_model(value)


def _to_rank_order(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, order in module.__dict__[_ATTRIBUTE].items():
        value = state_dict.get(prefix + name)
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            state_dict[prefix + name] = order.to_ranks(value)
