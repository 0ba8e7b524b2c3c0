"""Initial values and groups of distributed parameters. Seed: BMTrain."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshwright.nn.layout import local_part
from meshwright.nn.parameter import record_of
from meshwright.nn.stages import all_parameters
from meshwright.runtime import gather_objects, require_distributed, settings


@torch.no_grad()
def init_parameters(model: nn.Module) -> None:
    """Calls the ``init_method`` of every :class:`DistributedParameter` of a model; others keep their values.

    Every rank fills the full tensor, one at a time in the model's order and with rank 0's random generators, and keeps
    its part: the values are those of a single process, and memory is bounded by one parameter. Collective.

    Args:
        model: Any module.

    Raises:
        LaunchError: Before ``init_distributed``.
    """
    require_distributed("init_parameters")
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()
    with _generators_of_rank_0():
        for parameter, is_here in all_parameters(model):
            record = record_of(parameter)
            if record is None or record.init_method is None:
                continue
            full = torch.empty(parameter.shape, dtype=parameter.dtype, device=settings().device)
            record.init_method(full)
            if not is_here:  # drawn all the same: what other ranks draw next must not depend on the stage
                continue
            assert isinstance(parameter, DTensor)
            parameter.to_local().copy_(local_part(full, parameter))


@contextlib.contextmanager
def _generators_of_rank_0() -> Iterator[None]:
    """Lets all ranks draw what rank 0 draws, also after the first forward, which gave them seeds of their own."""
    device = settings().device
    own = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    shared = gather_objects(own)[0]
    _set_generators(shared, device)
    yield
    if not torch.equal(own[0], shared[0]):
        _set_generators(own, device)


def _set_generators(states: tuple[torch.Tensor, torch.Tensor | None], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1], device)


def grouped_parameters(model: nn.Module) -> Iterator[tuple[str | None, list[nn.Parameter]]]:
    """The model's parameters by the ``group`` they were given, for optimizers with groups of their own.

    Yields:
        ``(group, parameters)`` in order of first appearance; plain parameters are in the group None. The same groups on
        every stage of a pipeline, with the parameters that are there, which may be none.
    """
    groups: dict[str | None, list[nn.Parameter]] = {}
    for parameter, is_here in all_parameters(model):
        record = record_of(parameter)
        group = groups.setdefault(record.group if record else None, [])
        if is_here:
            group.append(parameter)
    yield from groups.items()
