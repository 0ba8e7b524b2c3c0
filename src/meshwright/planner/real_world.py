"""The cluster that this process trains on, where its devices are known by name."""

from __future__ import annotations

import dataclasses

import torch

from meshwright.cost import Cluster, make_cluster
from meshwright.errors import ConfigError
from meshwright.runtime import host_share_bytes


def cluster_at_hand(device: torch.device, world: int, local_world: int) -> Cluster | None:
    """What a job runs on, with the links that are usual for its devices, and the host memory that is free.

    None for a CPU, and for unknown devices.

    Args:
        device: Of this rank; all ranks are taken to have one like it.
        world: Number of ranks.
        local_world: Of them on this node.
    """
    if device.type != "cuda":
        return None
    try:
        known = make_cluster(torch.cuda.get_device_name(device), world, max(local_world, 1))
    except ConfigError:
        return None
    return dataclasses.replace(known, host_memory_bytes=host_share_bytes(local_world))
