"""Initial values and groups of distributed parameters. Seed: BMTrain."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshwright.nn.parameter import dim0_part, record_of
from meshwright.runtime import require_distributed, settings


@torch.no_grad()
def init_parameters(model: nn.Module) -> None:
    """Calls the ``init_method`` of every :class:`DistributedParameter` of a model; others keep their values.

    Every rank fills the full tensor, one at a time in the model's order, and keeps its part: with one seed on all ranks
    (``init_distributed`` sees to it) the values are those of a single process, and memory is bounded by one parameter.

    Args:
        model: Any module.

    Raises:
        LaunchError: Before ``init_distributed``.
    """
    require_distributed("init_parameters")
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()
    for parameter in model.parameters():
        record = record_of(parameter)
        if record is None or record.init_method is None:
            continue
        assert isinstance(parameter, DTensor)
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=settings().device)
        record.init_method(full)
        parameter.to_local().copy_(dim0_part(full, parameter.device_mesh))


def grouped_parameters(model: nn.Module) -> Iterator[tuple[str | None, list[nn.Parameter]]]:
    """The model's parameters by the ``group`` they were given, for optimizers with groups of their own.

    Yields:
        ``(group, parameters)`` in order of first appearance; plain parameters are in the group None.
    """
    groups: dict[str | None, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        record = record_of(parameter)
        groups.setdefault(record.group if record else None, []).append(parameter)
    yield from groups.items()
