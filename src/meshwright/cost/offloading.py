"""Seconds of what an offloading step moves and updates outside the device's memory."""

from __future__ import annotations

from meshwright.cost.cluster import Cluster
from meshwright.cost.copies import copies
from meshwright.cost.kernels import Machine
from meshwright.cost.step import Copy, Moment, Step

_DISK_BYTES_PER_S = 5e9  # of one NVMe drive of PCIe 4 (datasheets: 5 to 7), which all devices of a node share


def copies_s(step: Step, cluster: Cluster, moment: Moment) -> float:
    """Seconds of the copies at one moment of a step, were they alone.

    A link between device and host carries both directions at once. A disk reads or writes.
    """
    each: dict[str, float] = {}
    for copy in copies(step):
        if copy.moment == moment:
            way = _way(copy)
            each[way] = each.get(way, 0.0) + copy.bytes_per_step / _bytes_per_s(copy, cluster)
    return max(each.values(), default=0.0)


def exposed_copies_s(step: Step, cluster: Cluster, forward_s: float, backward_s: float) -> float:
    """What of the copies beside forward and backward these do not hide.

    Args:
        step: After all ``cost`` twins.
        cluster: What it runs on.
        forward_s: Computing of all micro-batches in forward.
        backward_s: In backward.
    """
    forward, backward = copies_s(step, cluster, "forward"), copies_s(step, cluster, "backward")
    return max(forward - forward_s, 0.0) + max(backward - backward_s, 0.0)


def hosted_update_s(step: Step, machine: Machine, cluster: Cluster, whole_s: float) -> float:
    """Seconds of an update of which the host does a part, with its copies.

    Args:
        step: After all ``cost`` twins.
        machine: The device.
        cluster: Its link to the host: what the host's memory gives to one device's part of the update, too.
        whole_s: Were all on the device.
    """
    moved = copies_s(step, cluster, "update")
    if step.hosted is None or step.on_cpu:
        return whole_s + moved
    slower = machine.bytes_per_s / cluster.host_link.bytes_per_s
    return whole_s * (1 + step.hosted.optimizer * (max(slower, 1.0) - 1)) + moved


def _way(copy: Copy) -> str:
    return "disk" if "disk" in (copy.source, copy.target) else f"to {copy.target}"


def _bytes_per_s(copy: Copy, cluster: Cluster) -> float:
    if _way(copy) == "disk":
        return _DISK_BYTES_PER_S / min(cluster.devices_per_node, cluster.num_devices)
    return cluster.host_link.bytes_per_s
