"""The cluster that a job runs on, as far as its processes can tell, or as it was described."""

from __future__ import annotations

import dataclasses
import os

import torch

from meshwright.cost import Cluster, find_cluster, find_device, make_cluster
from meshwright.errors import ConfigError
from meshwright.runtime import host_share_bytes, machine_name


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


def described_cluster(
    given: str | os.PathLike[str] | Cluster, device: torch.device, world: int, local_world: int
) -> tuple[Cluster, tuple[str, ...]]:
    """What a job runs on as it was described, with the job's ranks; and what of it may not hold here.

    Args:
        given: A cluster, a preset's name, or a file such as ``meshwright calibrate`` writes.
        device: Of this rank.
        world: Number of ranks.
        local_world: Of them on this node.

    Raises:
        ConfigError: For a file that cannot be used, and one of other devices.
    """
    known = given if isinstance(given, Cluster) else find_cluster(os.fspath(given))
    here = machine_name(device)
    on_host = device.type == "cpu"
    others = not on_host and _preset(known.device.name) not in (None, _preset(here))
    if others or known.device.is_host != on_host:
        raise ConfigError(
            "cluster describes other devices than those that train",
            expected=f"the one at hand, {here}",
            got=known.device.name,
            fix="name a file that meshwright calibrate has written here, or leave cluster out",
        )
    told, measured = [], known.calibration
    if measured is not None and measured.machine not in (None, here):
        told.append(f"cluster was measured on {measured.machine}, and this is {here}: seconds are that one's")
    if measured is not None and on_host and known.num_devices != world:
        told.append(
            f"cluster was measured with {known.num_devices} ranks, and these are {world}: ranks share the cores of a "
            f"CPU, so measure it with meshwright calibrate --processes {world}"
        )
    known = dataclasses.replace(known, num_devices=world, devices_per_node=max(local_world, 1))
    if device.type == "cuda":
        known = dataclasses.replace(known, host_memory_bytes=host_share_bytes(local_world))
    return known, tuple(told)


def _preset(name: str) -> str | None:
    try:
        return find_device(name).name
    except ConfigError:
        return None
