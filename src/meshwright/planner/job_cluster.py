"""The cluster that a job runs on: found on its devices, or described by the caller."""

from __future__ import annotations

import dataclasses
import os

import torch

from meshwright.cost import Cluster, find_cluster, find_device, make_cluster
from meshwright.errors import ConfigError
from meshwright.runtime import host_share_bytes, machine_name


def cluster_at_hand(device: torch.device, world: int, local_world: int) -> Cluster | None:
    """Return the cluster of a job, with the usual links of its devices and the free host memory.

    The result is None for CPUs and unknown devices.

    Args:
        device: Device of this rank; all ranks are assumed to have one like it.
        world: Number of ranks.
        local_world: Number of ranks on this node.
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
    """Return a described cluster with the job's ranks, and a sentence on every figure that may be wrong here.

    Args:
        given: A cluster, a preset's name, or a file such as ``meshwright calibrate`` writes.
        device: Device of this rank.
        world: Number of ranks.
        local_world: Number of ranks on this node.

    Raises:
        ConfigError: For a file that cannot be used, and for one that describes other devices.
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
    doubts, measured = [], known.calibration
    if measured is not None and measured.machine not in (None, here):
        doubts.append(f"cluster was measured on {measured.machine}, and this is {here}: seconds are that one's")
    if measured is not None and on_host and known.num_devices != world:
        doubts.append(
            f"cluster was measured with {known.num_devices} ranks, and these are {world}: ranks share the cores of a "
            f"CPU, so measure it with meshwright calibrate --nproc {world}"
        )
    known = dataclasses.replace(known, num_devices=world, devices_per_node=max(local_world, 1))
    if device.type == "cuda":
        known = dataclasses.replace(known, host_memory_bytes=host_share_bytes(local_world))
    return known, tuple(doubts)


def _preset(name: str) -> str | None:
    try:
        return find_device(name).name
    except ConfigError:
        return None
