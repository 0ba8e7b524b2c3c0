"""Which parameters of a real job are offloaded; the twin of :mod:`meshwright.cost.homes`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.cost import Hosted, pick_largest
from meshwright.methods.job import AVERAGED, Job
from meshwright.methods.zero.config import ZeroMethod
from meshwright.methods.zero.units import unit_of, units_of
from meshwright.nn import find_blocks


class Chosen(NamedTuple):
    """Disjoint sets of parameters that train, and those among ``hosted`` whose gradients leave in backward."""

    resident: set[torch.Tensor]
    hosted: set[torch.Tensor]
    in_backward: set[torch.Tensor]


def completed_in_backward(sizes: Mapping[str, int], shard_axis: str | None) -> bool:
    """Whether a gradient is final when backward accumulates it: nobody averages it afterwards."""
    if sizes.get("pipeline", 1) > 1 or sizes.get("expert", 1) > 1:  # stages reduce once, experts apart from the rest
        return False
    alone = all(sizes.get(axis, 1) == 1 for axis in AVERAGED)
    return alone if shard_axis is None else sizes.get("tensor", 1) == 1


def hosted_units(job: Job, fraction: float) -> frozenset[str]:
    """The paths of the blocks whose sharded parameters are to live on the host; ``""`` stands for what is outside."""
    if job.shard_axis is None or not fraction:
        return frozenset()
    config = next(method for method in job.strategy.methods if isinstance(method, ZeroMethod))
    ignored = units_of(config, job.model, job.strategy, dict(job.axes)).ignored
    sizes: dict[str, int] = {}
    seen: set[nn.Parameter] = set(ignored)
    for path, module in [*find_blocks(job.model), ("", job.model)]:
        sizes[path] = sum(parameter.numel() for parameter in module.parameters() if parameter not in seen)
        seen |= set(module.parameters())
    paths = list(sizes)
    picked = pick_largest([()] * len(paths), list(sizes.values()), fraction * sum(sizes.values()))
    return frozenset(paths[place] for place in picked)


def choose(job: Job, hosted: Hosted) -> Chosen:
    """Chooses among the parameters of the model as it is now, sharded or not; equal on every rank."""
    blocks = [path for path, _ in find_blocks(job.model)]
    trainable = {name: parameter for name, parameter in job.model.named_parameters() if parameter.requires_grad}
    resident: set[torch.Tensor] = {
        parameter
        for name, parameter in trainable.items()
        if isinstance(parameter, DTensor) and unit_of(name, blocks) in job.hosted_units
    }
    total = sum(parameter.numel() for parameter in trainable.values())
    taken = sum(parameter.numel() for parameter in resident)
    others: list[torch.Tensor] = [parameter for parameter in trainable.values() if parameter not in resident]
    listed = _largest(others, hosted.optimizer * total - taken)
    complete = [p for p in listed if isinstance(p, DTensor) or job.shard_axis is None]
    return Chosen(resident, set(listed), set(_largest(complete, hosted.gradients * total - taken)))


def _largest(parameters: list[torch.Tensor], budget: float) -> list[torch.Tensor]:
    keys = [tuple(parameter.shape) for parameter in parameters]
    picked = pick_largest(keys, [parameter.numel() for parameter in parameters], budget)
    return [parameters[place] for place in sorted(picked)]
