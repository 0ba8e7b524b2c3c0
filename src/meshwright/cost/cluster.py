"""Clusters: nodes of equal devices, and the links inside and between nodes; presets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.cost.device import Device, find_device
from meshwright.cost.efficiency import Calibration
from meshwright.errors import ConfigError


@dataclass(frozen=True)
class Link:
    """One tier of links.

    Args:
        bytes_per_s: Per device, in one direction.
        latency_s: Of one hop.
    """

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal devices.

    Args:
        device: What computes.
        num_devices: All of them.
        devices_per_node: In one node.
        intra: Links inside a node.
        inter: Links between nodes, as each device's share of its node's.
        host_link: Between a device and host memory, in one direction, while no other device copies.
        host_memory: Each device's share of the host's memory bandwidth.
        disk: Each device's share of its node's disks.
        host_memory_bytes: Each device's share of its node's memory, which offloading fills; None: unknown, or the
            device's own.
        calibration: What its kernels and links reach, where that was measured; None: the fitted presets.
        devices_per_host_link: Neighbours behind one PCIe switch, which copy over its one link to the host.
    """

    device: Device
    num_devices: int
    devices_per_node: int = 8
    intra: Link = Link(300e9, 2e-6)
    inter: Link = Link(25e9, 1.2e-5)
    host_link: Link = Link(25e9, 1e-5)
    host_memory: Link = Link(40e9, 1e-7)
    disk: Link = Link(3e9, 1e-4)
    host_memory_bytes: int | None = None
    calibration: Calibration | None = field(default=None, hash=False)
    devices_per_host_link: int = 1

    @property
    def host_share(self) -> Link:
        """A device's part of its link to host memory, in one direction, while all devices of the job copy."""
        sharing = min(self.devices_per_host_link, self.devices_per_node, self.num_devices)
        return dataclasses.replace(self.host_link, bytes_per_s=self.host_link.bytes_per_s / sharing)

    @property
    def is_one_node(self) -> bool:
        """Whether all devices are in one node."""
        return self.num_devices <= self.devices_per_node

    @property
    def price_per_hour(self) -> float | None:
        """Of all devices, in US dollars; None: unknown."""
        price = self.device.price_per_hour
        return None if price is None else price * self.num_devices

    def resized(self, num_devices: int) -> Cluster:
        """The same with another number of devices; a single node that is not full grows up to what is usual."""
        per_node = self.devices_per_node
        if self.num_devices <= per_node:
            per_node = max(per_node, min(num_devices, most_joined(self.device)))
        return dataclasses.replace(self, num_devices=num_devices, devices_per_node=per_node)


# Per device, one direction: NVLink 2, 3, 4, 5 and xGMI; PCIe where there is no such link between more than pairs, and
# less where drivers let no board reach another (GeForce: all passes through the host's memory, there and back); the
# usual network of a node over its devices (DGX-1: 4 x 100 Gb/s; DGX A100: 8 x 200; DGX H100: 8 x 400; Frontier's and
# LUMI's nodes of 8 dies: 4 x 200). Datasheets.
_INTRA = {
    "V100-PCIe": 16e9, "V100S": 16e9, "V100": 150e9, "A100-PCIe": 32e9, "A100": 300e9, "A800-PCIe": 32e9, "A800": 200e9,
    "H100-PCIe": 64e9, "H100-NVL": 64e9, "H100": 450e9,
    "H800-PCIe": 64e9, "H800": 200e9,
    "H200": 450e9, "B200": 900e9, "GB200": 900e9, "GB300": 900e9, "B300": 900e9, "GH200": 450e9,
    "H20": 450e9, "MI300X": 448e9, "MI325X": 448e9, "MI250X": 200e9,
    "A10G": 25e9, "A10": 25e9, "L40S": 25e9, "L40": 25e9, "L4": 25e9, "CPU": 4e9,
    "RTX-A6000": 25e9, "RTX-6000-Ada": 25e9, "RTX-PRO-6000": 50e9, "RTX-3090": 18e9, "RTX-4090": 18e9, "RTX-5090": 32e9,
}  # fmt: skip
_NODE_GBPS = {
    "V100": 400, "A100": 1600, "A800": 1600, "H100": 3200, "H800": 3200, "H200": 3200, "B200": 3200, "GB200": 3200,
    "GB300": 6400, "B300": 6400, "GH200": 3200, "H20": 3200, "MI300X": 3200, "MI325X": 3200, "MI250X": 800,
    "A10G": 100, "A10": 100, "L40S": 400, "L40": 400, "L4": 100, "CPU": 10, "RTX": 100, "RTX-PRO-6000": 400,
}  # fmt: skip
# NVL72: NVLink joins a rack's devices, and not those of a tray alone. Jobs over several racks take 64 of each where
# that divides them evenly.
_NVLINK_RACK, _TAKEN_OF_A_RACK = {"GB200": 72, "GB300": 72}, 64
# What copies reach of PCIe 3 (V100), 4 and 5 (the slower direction, see below), and of NVLink-C2C's 450 GB/s in a
# direction, which two share in a GB200.
_HOST = {
    "V100": 12e9, "A100": 25e9, "A800": 25e9, "MI250X": 25e9, "A10G": 25e9, "A10": 25e9, "L40S": 25e9, "L40": 25e9,
    "L4": 25e9, "RTX": 25e9, "RTX-5090": 45e9, "RTX-PRO-6000": 45e9, "GH200": 350e9, "GB200": 175e9, "GB300": 175e9,
    "CPU": 10e9,
}  # fmt: skip
# Behind a PCIe switch with one link to the CPU: pairs in DGX-1 and in DGX and HGX A100 (NVIDIA's block diagrams;
# ``nvidia-smi topo`` calls them PIX and PXB). Of 8 A100 that copy at once each has a fraction (nvbandwidth's issue 11).
# With PCIe 5 each has its own: nvbandwidth on 8 H800 that copy at once shows 55 GB/s each to devices, 45 to the host,
# and 455 GB/s of both directions together, which are the node's memory channels below. Servers with PCIe boards
# differ, from a link each to four devices on one.
_PER_HOST_LINK = {"V100": 2, "V100-PCIe": 1, "V100S": 1, "A100": 2, "A100-PCIe": 1, "A800": 2, "A800-PCIe": 1}
# What a device's share of its node's memory channels reaches in copies: three quarters of 2 x 6 channels of DDR4-2666
# over 8 devices (V100), of 2 x 8 of DDR4-3200 (A100 and servers of its time), of 8 of these (Frontier), of 2 x 8 of
# DDR5-4800 and later, of a Grace's 512 GB/s for one device or for two. Disks: eight NVMe drives a node.
_HOST_MEMORY = {
    "V100": 24e9, "A100": 38e9, "A800": 38e9, "MI250X": 19e9, "A10G": 38e9, "A10": 38e9, "L40S": 38e9, "L40": 38e9,
    "L4": 38e9, "RTX": 38e9, "RTX-PRO-6000": 57e9, "GH200": 380e9, "GB200": 190e9, "GB300": 190e9, "CPU": 10e9,
}  # fmt: skip
# GiB of a node's memory for one of its devices: an eighth of 512 (DGX-1, Frontier's nodes of 8 dies), 1,024 and 2,048
# (DGX A100 with 40 GB and with 80), 2,048 (DGX H100 and later), 2,304 (MI300X), a Grace's 480 for one device or for
# two, and what is usual in servers with PCIe boards.
_HOST_MEMORY_GIB = {
    "V100": 64, "A100": 256, "A100-40": 128, "A100-PCIe-40": 128, "A800": 256, "H100": 256, "H800": 256, "H200": 256,
    "H20": 256, "B200": 256, "B300": 256, "GH200": 480, "GB200": 240, "GB300": 240, "MI300X": 288, "MI325X": 288,
    "MI250X": 64, "A10G": 64, "A10": 64, "L40S": 64, "L40": 64, "L4": 48,
    "RTX": 64, "RTX-PRO-6000": 128,
}  # fmt: skip
MOST_DEVICES = 2**24
"""More than anybody has; a number from a file that is larger is a mistake, and would take for ever to simulate."""


def _of_family(table: Mapping[str, float], device: Device, default: float) -> float:
    names = [name for name in table if device.name.startswith(name)]
    return table[max(names, key=len)] if names else default


def make_cluster(
    device: Device | str,
    num_devices: int,
    devices_per_node: int | None = None,
    node_gbps: float | None = None,
    latency_s: float = 1.2e-5,
) -> Cluster:
    """A cluster of a known device with the links that are usual for it.

    Args:
        device: A device, or its name.
        num_devices: All of them.
        devices_per_node: That their fast links join; None: 8, or the 72 of an NVL72, or all of fewer.
        node_gbps: Network of one node in Gbit/s; None: what is usual.
        latency_s: From node to node.

    Raises:
        ConfigError: For an unknown device, or numbers that do not fit together.
    """
    device = find_device(device) if isinstance(device, str) else device
    per_node = devices_per_node or _usual_node(device, num_devices)
    if not 1 <= num_devices <= MOST_DEVICES or not 1 <= per_node <= MOST_DEVICES:
        raise ConfigError(
            "A cluster needs devices",
            expected=f"one device to {MOST_DEVICES:,}, and at least one in a node",
            got=f"{num_devices} devices, {per_node} in a node",
            fix="correct the numbers",
        )
    gbps = node_gbps or _of_family(_NODE_GBPS, device, 1600)
    return Cluster(
        device=device,
        num_devices=num_devices,
        devices_per_node=per_node,
        intra=Link(_of_family(_INTRA, device, 64e9), 2e-6),
        inter=Link(gbps * 1e9 / 8 / 8, latency_s),  # a node's network serves 8 devices, however many a job has of them
        host_link=Link(_of_family(_HOST, device, 45e9), 1e-5),
        host_memory=Link(_of_family(_HOST_MEMORY, device, 57e9), 1e-7),
        host_memory_bytes=round(_of_family(_HOST_MEMORY_GIB, device, 0) * 2**30) or None,
        devices_per_host_link=round(_of_family(_PER_HOST_LINK, device, 1)),
    )


def most_joined(device: Device) -> int:
    """Devices that fast links join where their makers join most: a rack's in an NVL72, else the eight of a node."""
    return _NVLINK_RACK.get(device.name, 8)


def _usual_node(device: Device, num_devices: int) -> int:
    most = most_joined(device)
    if num_devices > most > _TAKEN_OF_A_RACK and num_devices % most and num_devices % _TAKEN_OF_A_RACK == 0:
        return _TAKEN_OF_A_RACK
    return min(most, num_devices)
