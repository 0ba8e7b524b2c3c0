"""FSDP2's all-gather and reduce-scatter in few bits, through its seam for custom communication.

FSDP2 packs the shards of a unit's parameters into one buffer and gathers it; it packs their gradients, row by row for
every rank, and reduce-scatters them. What it calls for that is exchanged here. The shard itself stays as it is: only
the copy that travels is quantised, and every rank, its owner too, decodes it from the same bytes. Quantising runs where
FSDP2 runs its collectives, on streams beside the computation.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from meshwright.cost import Encoding, Wire
from meshwright.distributed.packing import Packing
from meshwright.distributed.transport import all_gather_flat
from meshwright.distributed.two_level import Route, gathered_messages, reduced_row
from meshwright.nn import Comm, is_mean, parameter_groups


def quantise_units(model: nn.Module, wire: Wire, way: Route) -> None:
    """Exchanges the collectives of every unit of a sharded model.

    Args:
        model: Sharded with ``fully_shard`` over the ranks of ``way``.
        wire: In how many bits weights and gradients travel.
        way: The ranks that shard, and their nodes.
    """
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        parameters = [parameter for group in parameter_groups(module) for parameter in group.fsdp_params]
        floating = all(parameter.sharded_param.is_floating_point() for parameter in parameters)
        if not parameters or not floating:
            continue
        unit = _Unit(parameters, wire, way)
        if wire.gather is not None or way.nodes is not None:
            module.set_custom_all_gather(_AllGather(unit))  # type: ignore[arg-type]
        if wire.reduce is not None or way.nodes is not None:
            module.set_custom_reduce_scatter(_ReduceScatter(unit))  # type: ignore[arg-type]


class _Unit:
    """The parameters that FSDP2 packs together, and how a rank's part of them travels."""

    def __init__(self, parameters: list[Any], wire: Wire, way: Route) -> None:
        self._parameters, self._wire, self.way = parameters, wire, way
        self._warned = False

    def gathered(self, num_elements: int) -> Packing:
        """A rank's shards, rows that only fill up among them; as they are, they may be packed bytes (fp8)."""
        if self._wire.gather is None:
            return Packing((num_elements,), (False,), None)
        return self._packing(self._parameters, self._wire.gather)

    def reduced(self, num_elements: int) -> Packing:
        """The gradients that one rank will own; all in whole numbers if they are not those of all that trains."""
        trained = [each for each in self._parameters if each.sharded_param.requires_grad]
        packing = self._packing(trained, self._wire.reduce)
        if sum(packing.sizes) == num_elements:
            return packing
        if not self._warned:
            self._warned = True
            warnings.warn(
                "comm: some parameters of a unit took no part in a step, and FSDP2 does not say which; the gradients "
                "of this unit are not quantised in such steps",
                stacklevel=2,
            )
        return Packing((num_elements,), (False,), None)

    def _packing(self, parameters: list[Any], encoding: Encoding | None) -> Packing:
        return Packing(
            tuple(each.padded_sharded_param_size.numel() for each in parameters),
            tuple(each._orig_size.numel() >= self._wire.min_numel for each in parameters),
            encoding,
        )


class _AllGather(Comm):
    """In the place of FSDP2's all-gather."""

    def __init__(self, unit: _Unit) -> None:
        self._unit = unit

    @torch.no_grad()
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fills ``output_tensor`` (ranks · elements) with every rank's ``input_tensor`` as all ranks decode it.

        A smaller group gathers what has been decoded before, as it is (``reshard_after_forward`` an integer).
        """
        way = self._unit.way
        if group.size() != way.size:
            work: dist.Work | None = all_gather_flat(output_tensor, input_tensor, group=group, async_op=async_op)
            return work
        packing = self._unit.gathered(input_tensor.numel())
        messages = gathered_messages(packing.pack(input_tensor.view(1, -1)).view(-1), way)
        packing.unpack(messages, input_tensor.dtype, output_tensor.view(way.size, -1))
        return None  # done, in the order of the stream


class _ReduceScatter(Comm):
    """In the place of FSDP2's reduce-scatter."""

    def __init__(self, unit: _Unit) -> None:
        self._unit = unit

    @torch.no_grad()
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fills ``output_tensor`` (elements) with the sum or mean of the ranks' rows for this one."""
        way = self._unit.way
        rows = input_tensor.view(way.size, -1)
        total = reduced_row(rows, self._unit.reduced(rows.shape[1]), way)
        output_tensor.copy_(total / way.size if is_mean(op) else total)
        return None
