"""FSDP2's collectives on CPUs: through memory that the ranks of a host share, or by gloo's all-to-all.

That and a sum take half the time of gloo's own reduce-scatter.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from meshwright.errors import StrategyError
from meshwright.nn.fsdp_groups import parameter_groups
from meshwright.nn.host_exchange import HostExchange, HostGathers, HostReductions


def is_mean(op: Any) -> bool:
    """Whether FSDP2 asks a reduction for a mean of gradients, and not for their sum.

    Raises:
        StrategyError: When it asks for something else.
    """
    if op in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
        return bool(op == dist.ReduceOp.AVG)
    raise StrategyError(
        "Gradients cannot be reduced in this way",
        expected="a sum or a mean",
        got=str(op),
        fix="do not call set_gradient_divide_factor on the model",
    )


_Exchanges = MutableMapping[dist.ProcessGroup, HostExchange]
# By the ranks that shard Blocks one by one; the entry of a group that is gone goes with it.
_of_blocks: weakref.WeakKeyDictionary[dist.ProcessGroup, HostExchange] = weakref.WeakKeyDictionary()


def exchange_on_host(model: nn.Module, *, is_block: bool = False) -> None:
    """Exchanges the collectives of every unit of a sharded model on CPUs, whose values travel as they are.

    All ranks call it alike: memory is theirs together.

    Args:
        model: Sharded with ``fully_shard``.
        is_block: Whether it is a part of a model, which shares its memory with the other parts.
    """
    known: _Exchanges = _of_blocks if is_block else {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in parameter_groups(module):
                gathering, reducing = (
                    known.setdefault(ranks, HostExchange(ranks))
                    for ranks in (group._all_gather_process_group, group._reduce_scatter_process_group)
                )
                _exchange(module, group, gathering.gathers, reducing.reductions)


def _exchange(module: FSDPModule, group: Any, gathers: HostGathers, reductions: HostReductions) -> None:
    """Of one unit; ``group`` is what FSDP2 keeps of its parameters."""
    policy = group.mp_policy
    parameters = [(each.sharded_param, each.padded_sharded_param_size.numel()) for each in group.fsdp_params]
    if not group._use_post_forward_mesh:  # which gathers part of the time over fewer ranks
        gathers.expect(gathers.num_ranks * sum(numel * _itemsize(p, policy.param_dtype) for p, numel in parameters))
        module.set_custom_all_gather(_Gather(gathers))  # type: ignore[arg-type]
    dtype, trained = policy.reduce_dtype or policy.param_dtype, [each for each in parameters if each[0].requires_grad]
    reductions.expect(reductions.num_ranks * sum(numel * _itemsize(p, dtype) for p, numel in trained))
    module.set_custom_reduce_scatter(_Reduce(reductions))  # type: ignore[arg-type]


def _itemsize(parameter: torch.Tensor, dtype: torch.dtype | None) -> int:
    return (dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype).itemsize


class Comm:
    """What FSDP2 asks of a custom collective besides being called."""

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer for FSDP2 to pack into."""
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(Comm):
    """In the place of FSDP2's all-gather of one unit."""

    def __init__(self, gathers: HostGathers) -> None:
        self._gathers = gathers

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """What all ranks pack into, and unpack from."""
        return self._gathers.allocate(math.prod(size), dtype).view(size)

    @torch.no_grad()
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fills ``output_tensor`` (ranks · elements) with every rank's ``input_tensor``."""
        return self._gathers.gather(output_tensor, input_tensor, async_op=async_op)


class _Reduce(Comm):
    """In the place of FSDP2's reduce-scatter of one unit.

    gloo's ring adds a row up rank by rank, each waiting for the one before; here all rows are there at once. They are
    added in the order of ranks, and half precision in fp32.
    """

    def __init__(self, reductions: HostReductions) -> None:
        self._reductions = reductions
        self._size: int | None = None  # packed, until FSDP2 asks for a place for the sum
        self._shared = False

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """What this rank packs into; then a place for the sum, which stays as the gradient."""
        numel = math.prod(size)
        if self._size == numel * self._reductions.num_ranks:
            self._size = None
            return super().allocate(size, dtype=dtype, device=device)
        self._size, packed = numel, self._reductions.allocate(numel, dtype)
        self._shared = packed is not None
        return super().allocate(size, dtype=dtype, device=device) if packed is None else packed.view(size)

    @torch.no_grad()
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Fills ``output_tensor`` (elements) with the sum or mean of the ranks' rows for this one."""
        mean = is_mean(op)
        if self._shared:
            self._reductions.reduce(output_tensor)
        else:
            arrived = torch.empty_like(input_tensor)
            dist.all_to_all_single(arrived, input_tensor, group=group)
            torch.sum(arrived.view(group.size(), -1), 0, out=output_tensor)
        if mean:
            output_tensor.div_(group.size())
