"""The collectives that a calibration runs: by kind and size, inside nodes and between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import init_device_mesh

from meshwright.distributed.benchmark import BENCHMARK_OPS, benchmark_operation
from meshwright.distributed.members import Members, members_of
from meshwright.planner.measure.samples import LinkSample
from meshwright.planner.measure.timing import slowest, time_together
from meshwright.runtime import Settings, gather_objects, world_size

_SIZES_CPU = (2**8, 2**14, 2**18, 2**20, 2**22, 2**24)
_SIZES_CUDA = (2**10, 2**16, 2**20, 2**23, 2**26, 2**28)


@dataclass(frozen=True)
class Tier:
    """The ranks that one tier of links joins, as one of them sees it."""

    name: str
    members: Members


def tiers_of(settings: Settings) -> list[Tier]:
    """The ranks of this node, and those of equal number on all nodes; empty for a rank alone. Collective."""
    local, world = settings.local_world_size, world_size()
    if world == 1:
        return []
    if world <= local or world % local:
        return [Tier("intra", members_of(None))]
    mesh = init_device_mesh(settings.device.type, (world // local, local), mesh_dim_names=("node", "local"))
    inter = Tier("inter", members_of(mesh["node"]))
    return [Tier("intra", members_of(mesh["local"])), inter] if local > 1 else [inter]


def link_sizes(device: torch.device) -> tuple[int, ...]:
    """Bytes of the messages."""
    return _SIZES_CUDA if device.type == "cuda" else _SIZES_CPU


def link_samples(tier: Tier, device: torch.device, *, window_s: float) -> Iterator[LinkSample]:
    """Times every kind in every size; collective. Yields the slowest rank's times, alike on every rank."""
    size = tier.members.size
    for op in BENCHMARK_OPS:
        for num_bytes in link_sizes(device):
            message = torch.ones(max(num_bytes // 4 // size, 1) * size, device=device)
            run = benchmark_operation(op, message, tier.members)
            timing = slowest(gather_objects(time_together(run, device, window_s=window_s)))
            kind = "send" if op == "send_recv" else op  # as ``Traffic`` names it; it counts bytes alike
            yield LinkSample(tier.name, kind, message.nbytes, timing)
