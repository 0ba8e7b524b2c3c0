"""Devices by name, as their vendors state them; and clusters: nodes of equal devices, and the links between them."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.cost.calibration import (
    Calibration,
    calibration_from,
    calibration_tables,
    count_of,
    positive_number,
    refuse_unknown,
)
from meshwright.errors import ConfigError, MeshwrightError, did_you_mean, join_names

_MIB, _GIB = 2**20, 2**30


@dataclass(frozen=True)
class Device:
    """An accelerator.

    Args:
        name: Name in presets and messages.
        memory_bytes: Total memory as the driver reports it.
        half_flops_per_s: Peak of dense fp16 and bf16 matrix products with fp32 accumulation.
        fp32_flops_per_s: Peak of fp32 matrix products (without TF32).
        fp8_flops_per_s: Peak of dense fp8 products; None where the device has none.
        fp4_flops_per_s: Peak of dense 4-bit products; None where the device has none.
        bandwidth_bytes_per_s: Bandwidth of its memory.
        efficiency: Family whose fitted efficiencies it takes (a key of ``efficiencies.json``).
        power_fraction: Sustained power for each FLOP/s of the peak, over that of the device which its family's
            efficiencies are stated for: boards of one chip that may draw less keep lower clocks.
        cache_bytes: Bytes of a kernel that move through the cache, at ``Efficiency.cached``; 0: the cache is ignored.
        price_per_hour: Price in US dollars; None: unknown. Prices differ by vendor and month: set your own.
        bf16: Whether it multiplies in bf16; without, half precision is fp16.
        is_host: Whether its memory is the host's.
    """

    name: str
    memory_bytes: int
    half_flops_per_s: float
    fp32_flops_per_s: float
    bandwidth_bytes_per_s: float
    fp8_flops_per_s: float | None = None
    efficiency: str = "default"
    power_fraction: float = 1.0
    price_per_hour: float | None = None
    bf16: bool = True
    is_host: bool = False
    cache_bytes: int = 0
    aliases: tuple[str, ...] = field(default=(), compare=False)
    fp4_flops_per_s: float | None = None

    @property
    def half_dtype(self) -> str:
        """Half precision of the device: ``bf16`` where it has it, else ``fp16``."""
        return "bf16" if self.bf16 else "fp16"

    def peak_flops_per_s(self, dtype: str) -> float:
        """Return the peak of matrix products in ``fp32``, ``half``, ``fp8`` or ``fp4`` (or of the next wider type)."""
        if dtype == "fp32":
            return self.fp32_flops_per_s
        if dtype == "fp4" and self.fp4_flops_per_s:
            return self.fp4_flops_per_s
        return self.fp8_flops_per_s or self.half_flops_per_s if dtype in ("fp8", "fp4") else self.half_flops_per_s


def _pcie(like: Device, name: str, bandwidth_bytes_per_s: float, power_fraction: float, *aliases: str) -> Device:
    """Return a board with the same chip but other memory and power."""
    changes = {"bandwidth_bytes_per_s": bandwidth_bytes_per_s, "power_fraction": power_fraction, "aliases": aliases}
    return dataclasses.replace(like, name=name, **changes)  # type: ignore[arg-type]


# Vendors' datasheets, dense figures; memory as the driver reports it (with ECC on: 1.5 GiB less than the nominal 24 on
# A10 and L4). H800 and A800 have fewer links, PCIe boards none; A100's state the peak of 400 W, and have 300 and 250.
# GeForce boards multiply at half speed where sums are in fp32, as in training: that counts. All RTX boards use the
# matrix instructions of Ampere, and take what A100 reaches of its peak (white papers on GA102, Ada, RTX Blackwell).
# ``aliases`` are what drivers call a device; the longest that matches counts.
_A100_80 = Device("A100-80", 81_920 * _MIB, 312e12, 19.5e12, 2.039e12, None, "A100", aliases=("A100-80", "A100"))
_A100_40 = Device("A100-40", 40_536 * _MIB, 312e12, 19.5e12, 1.555e12, None, "A100", aliases=("A100-40",))
_BARE = (
    Device("GB300", 284_208 * _MIB, 2.5e15, 80e12, 8.0e12, 5e15, "B200", aliases=("GB300",), fp4_flops_per_s=15e15),
    Device("GB200", 189_471 * _MIB, 2.5e15, 80e12, 8.0e12, 5e15, "B200", aliases=("GB200",), fp4_flops_per_s=10e15),
    Device("B300", 275_040 * _MIB, 2.25e15, 75e12, 8.0e12, 4.5e15, "B200", aliases=("B300",), fp4_flops_per_s=13.5e15),
    Device("B200", 183_359 * _MIB, 2.25e15, 75e12, 8.0e12, 4.5e15, "B200", aliases=("B200",), fp4_flops_per_s=9e15),
    Device("H200", 143_771 * _MIB, 989.4e12, 67e12, 4.8e12, 1978.9e12, "H100", aliases=("H200", "GH200-144")),
    Device("H100-NVL", 95_830 * _MIB, 835.5e12, 60e12, 3.9e12, 1671e12, "H100", aliases=("H100 NVL", "H100-NVL")),
    Device("H100-PCIe", 81_559 * _MIB, 756e12, 51e12, 2.0e12, 1513e12, "H100", aliases=("H100 PCIe", "H100-PCIe")),
    Device("GH200", 97_871 * _MIB, 989.4e12, 67e12, 4.0e12, 1978.9e12, "H100", aliases=("GH200",)),
    Device("H20", 97_871 * _MIB, 148e12, 44e12, 4.0e12, 296e12, "H100", aliases=("H20",)),
    Device("H100-SXM", 81_559 * _MIB, 989.4e12, 67e12, 3.35e12, 1978.9e12, "H100", aliases=("H100",)),
    Device("H800-PCIe", 81_559 * _MIB, 756e12, 51e12, 2.0e12, 1513e12, "H100", aliases=("H800 PCIe", "H800-PCIe")),
    Device("H800", 81_559 * _MIB, 989.4e12, 67e12, 3.35e12, 1978.9e12, "H100", aliases=("H800",)),
    _pcie(_A100_80, "A100-PCIe-80", 1.935e12, 0.75, "A100-80GB-PCIe", "A100-PCIe-80", "A100-PCIe"),
    _pcie(_A100_40, "A100-PCIe-40", 1.555e12, 0.625, "A100-40GB-PCIe", "A100-PCIe-40"),
    _A100_80,
    _A100_40,
    _pcie(_A100_80, "A800-PCIe", 1.935e12, 0.75, "A800-80GB-PCIe", "A800-PCIe"),
    dataclasses.replace(_A100_80, name="A800", aliases=("A800",)),
    Device("MI355X", 288 * _GIB, 2516.6e12, 157.3e12, 8.0e12, 5033.2e12, "MI300X", aliases=("MI355X",)),
    Device("MI350X", 288 * _GIB, 2307e12, 144.2e12, 8.0e12, 4614e12, "MI300X", aliases=("MI350X",)),
    Device("MI325X", 256 * _GIB, 1307.4e12, 163.4e12, 6.0e12, 2614.9e12, "MI300X", aliases=("MI325X", "MI325")),
    Device("MI300X", 192 * _GIB, 1307.4e12, 163.4e12, 5.3e12, 2614.9e12, "MI300X", aliases=("MI300X", "MI300")),
    Device("MI250X", 64 * _GIB, 191.5e12, 47.9e12, 1.6e12, None, "MI300X", aliases=("MI250X", "MI250")),  # one die
    Device("A10G", 23_028 * _MIB, 70e12, 35e12, 600e9, None, "A100", aliases=("A10G",)),
    Device("A10", 23_028 * _MIB, 125e12, 31.2e12, 600e9, None, "A100", aliases=("A10",)),
    Device("L40S", 46_068 * _MIB, 362e12, 91.6e12, 864e9, 733e12, "A100", aliases=("L40S",)),
    Device("L40", 46_068 * _MIB, 181e12, 90.5e12, 864e9, 362e12, "A100", aliases=("L40",)),
    Device("L4", 23_034 * _MIB, 121e12, 30.3e12, 300e9, 242e12, "A100", aliases=("L4",)),
    Device("RTX-PRO-6000", 97_887 * _MIB, 504e12, 126e12, 1.792e12, 1008e12, "A100", aliases=("RTX PRO 6000",)),
    Device("RTX-5090", 32_607 * _MIB, 209.5e12, 104.8e12, 1.792e12, 419e12, "A100", aliases=("RTX 5090", "RTX5090")),
    Device("RTX-4090", 24_564 * _MIB, 165.2e12, 82.6e12, 1.008e12, 330.3e12, "A100", aliases=("RTX 4090", "RTX4090")),
    Device("RTX-3090", 24_576 * _MIB, 71e12, 35.6e12, 936e9, None, "A100", aliases=("RTX 3090", "RTX3090")),
    Device("RTX-6000-Ada", 49_140 * _MIB, 364.2e12, 91.1e12, 960e9, 728.5e12, "A100", aliases=("RTX 6000 Ada",)),
    Device("RTX-A6000", 49_140 * _MIB, 154.8e12, 38.7e12, 768e9, None, "A100", aliases=("RTX A6000", "A6000")),
    Device("V100S-PCIe", 32_510 * _MIB, 130e12, 16.4e12, 1.134e12, None, "V100", bf16=False, aliases=("V100S",)),
    Device("V100-PCIe-32", 32_510 * _MIB, 112e12, 14e12, 900e9, None, "V100", bf16=False, aliases=("V100-PCIe",)),
    Device("V100-PCIe-16", 16_160 * _MIB, 112e12, 14e12, 900e9, None, "V100", bf16=False, aliases=("V100-PCIe-16",)),
    Device("V100-32", 32_510 * _MIB, 125e12, 15.7e12, 900e9, None, "V100", bf16=False, aliases=("V100-32", "V100")),
    Device("V100-16", 16_160 * _MIB, 125e12, 15.7e12, 900e9, None, "V100", bf16=False, aliases=("V100-16",)),
    Device("T4", 15_360 * _MIB, 65e12, 8.1e12, 320e9, None, "V100", bf16=False, aliases=("T4",)),
    # One core of a server at 2.8 GHz with AVX-512: a placeholder until ``calibrate`` has measured the machine.
    Device("CPU", 16 * _GIB, 200e9, 100e9, 20e9, None, "CPU", is_host=True, aliases=("CPU", "gloo")),
)
# US dollars per device and hour on demand, as listed early in 2026 by RunPod (secure cloud), else by Lambda (A10,
# A100-40, V100-16) or AWS (A10G: g5.xlarge, T4: g4dn.xlarge, V100-32: an eighth of p3dn.24xlarge, CPU: a vCPU);
# GeForce: RunPod's community cloud. Large clouds ask for two to four times as much; one who owns devices pays less.
_PRICES = {
    "B200": 5.98, "H200": 3.59, "H100-NVL": 2.59, "H100-PCIe": 1.99, "H100-SXM": 2.69, "A100-80": 1.39, "A100-40": 1.29,
    "MI300X": 2.49, "A10G": 1.01, "A10": 0.75, "L40S": 0.79, "L40": 0.69, "L4": 0.44, "T4": 0.53, "V100-32": 3.90,
    "V100-16": 0.55, "RTX-3090": 0.22, "RTX-4090": 0.34, "RTX-5090": 0.69, "CPU": 0.05,
}  # fmt: skip
# What boards of one chip may draw (datasheets), and the board whose power its family's efficiencies are stated for.
_TDP_WATTS = {
    "B200": 1000, "GB200": 1200, "B300": 1100, "GB300": 1400, "H100-SXM": 700, "H200": 700, "GH200": 700, "H800": 700,
    "H100-NVL": 400, "H100-PCIe": 350, "H800-PCIe": 350, "A100-80": 400, "A100-40": 400, "A800": 400,
}  # fmt: skip
_STATED_FOR = {"B200": "B200", "H100": "H100-SXM", "A100": "A100-80"}


def _preset(device: Device) -> Device:
    """Add the price, and the power per FLOP/s of its peak, to a device from a datasheet."""
    peaks = {each.name: each.half_flops_per_s for each in _BARE}
    fraction = device.power_fraction
    if device.name in _TDP_WATTS:
        stated = _STATED_FOR[device.efficiency]
        fraction = _TDP_WATTS[device.name] / device.half_flops_per_s / (_TDP_WATTS[stated] / peaks[stated])
    return dataclasses.replace(device, price_per_hour=_PRICES.get(device.name), power_fraction=fraction)


_TABLE = tuple(_preset(device) for device in _BARE)
DEVICES: Mapping[str, Device] = {device.name: device for device in _TABLE}
"""Presets by name."""

_MEMORY = re.compile(r"(?<![a-z\d])(\d+)\s*G(?:i?B)?(?![a-z])", re.IGNORECASE)  # no part of a name, as in A10G
_WATTS = re.compile(r"(?<!\d)([1-9]\d{2,3})\s*W(?![a-z])", re.IGNORECASE)
# "MIG 1c.3g.40gb": one of the three compute slices of an instance with 40 GB. A device has 7 of compute, 8 of memory.
_INSTANCE = re.compile(r"\s+MIG\s+(?:(\d)c\.)?(\d)g\.(\d+)gb.*$", re.IGNORECASE)
# A vendor's own words for a board that runs below its power, without saying how far: TorchAO's B200 run at 750 W.
_LIMITED_POWER = 0.75
# HBM2e boards of H100 (PCIe and the 96 GB variant) have 6 stacks at 2.4 TB/s at most; PCIe's datasheet: 5 at 2.0.
_HBM2E_BANDWIDTH = 2.4e12


def find_device(name: str) -> Device:
    """Return the preset that a name from a driver or a table means.

    Memory, power and kind of memory in the name count: ``"NVIDIA A100-SXM4-40GB"`` is an A100-40, ``"H100-SXM-96GB-
    HBM2e-500W"`` an H100 with its memory, power and memory bandwidth changed, and ``"… MIG 3g.40gb"`` part of a device.

    Raises:
        ConfigError: When no preset matches.
    """
    if name in DEVICES:
        return DEVICES[name]
    instance = _INSTANCE.search(name)
    if instance is not None:
        return _part(find_device(name[: instance.start()]), instance)
    # Laptop devices have the same names, but other chips.
    known = None if "LAPTOP" in name.upper() else _match(name)
    if known is None:
        raise ConfigError(
            f"Unknown device {name!r}{did_you_mean(name, DEVICES)}",
            expected=f"a name that contains one of {join_names(DEVICES, 20)}",
            got=repr(name),
            fix="correct the name, or describe the device in a cluster file",
        )
    return _as_named(known, name)


def half_peak_flops_per_s(device_name: str) -> float | None:
    """Return the dense half-precision peak in FLOP/s; None for an unknown device."""
    try:
        return find_device(device_name).half_flops_per_s
    except ConfigError:
        return None


def _part(device: Device, instance: re.Match[str]) -> Device:
    own, slices, gigabytes = instance.groups()
    compute, memory_bytes = int(own or slices) / 7, int(gigabytes) * _GIB
    memory = max(round(8 * memory_bytes / device.memory_bytes), 1) / 8
    return dataclasses.replace(
        device,
        memory_bytes=min(memory_bytes, device.memory_bytes),
        half_flops_per_s=device.half_flops_per_s * compute,
        fp32_flops_per_s=device.fp32_flops_per_s * compute,
        fp8_flops_per_s=device.fp8_flops_per_s and device.fp8_flops_per_s * compute,
        fp4_flops_per_s=device.fp4_flops_per_s and device.fp4_flops_per_s * compute,
        bandwidth_bytes_per_s=device.bandwidth_bytes_per_s * memory,
        cache_bytes=int(device.cache_bytes * memory),
        price_per_hour=None,
    )


def _match(name: str) -> Device | None:
    squeezed = re.sub(r"[\s_]+", "-", re.sub(r"^\s*\d+\s*[x×*]\s*", "", name)).upper()  # "8 x H100" is one of them
    matching = (
        (len(alias), device)
        for device in _TABLE
        for alias in device.aliases
        # A10 is not A100, L4 not L40: what follows a number must not go on with it.
        if re.search(rf"(?<![A-Z0-9]){re.escape(alias.replace(' ', '-').upper())}(?![0-9])", squeezed)
    )
    return max(matching, key=lambda each: each[0], default=(0, None))[1]


def _as_named(device: Device, name: str) -> Device:
    size = _MEMORY.search(name)
    gigabytes = int(size.group(1)) if size else None
    family = device.name.rpartition("-")[0]
    if gigabytes is not None and f"{family}-{gigabytes}" in DEVICES:
        return DEVICES[f"{family}-{gigabytes}"]
    changes: dict[str, object] = {}
    # What is printed is the nominal size; only one that differs from the preset's says something.
    if gigabytes is not None and 4 <= gigabytes < 400 and abs(gigabytes * _GIB / device.memory_bytes - 1) > 0.05:
        changes["memory_bytes"] = gigabytes * _GIB
    if "HBM2E" in name.upper() and device.name.startswith("H100"):
        changes["bandwidth_bytes_per_s"] = min(device.bandwidth_bytes_per_s, _HBM2E_BANDWIDTH)
    watts, tdp = _WATTS.search(name), _TDP_WATTS.get(device.name)
    if watts and tdp:
        changes["power_fraction"] = device.power_fraction * min(int(watts.group(1)) / tdp, 1.0)
    elif "LIMITED" in name.upper():
        changes["power_fraction"] = device.power_fraction * _LIMITED_POWER
    return dataclasses.replace(device, **changes) if changes else device  # type: ignore[arg-type]


# --- Clusters: nodes of one device, with the links that are usual for it.


@dataclass(frozen=True)
class Link:
    """One tier of links.

    Args:
        bytes_per_s: Per device, in one direction.
        latency_s: Latency of one hop.
        step_s: Seconds that each of a ring's steps takes beside that where some ranks send over such a link: what a
            network occupies its host with (AWS's EFA: some 6e-5), and not its latency, which steps share.
    """

    bytes_per_s: float
    latency_s: float
    step_s: float = 0.0


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal devices.

    Args:
        device: The accelerator of all nodes.
        num_devices: All of them.
        devices_per_node: Number of devices in one node.
        intra: Links inside a node.
        inter: Links between nodes, as each device's share of its node's.
        host_link: Link between a device and host memory, in one direction, while no other device copies.
        host_memory: Each device's share of the host's memory bandwidth.
        disk: Each device's share of its node's disks.
        host_memory_bytes: Each device's share of its node's memory, which offloading fills; None: unknown, or the
            device's own.
        calibration: Measured speed of its kernels and links; None: the fitted presets.
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
        """Return whether all devices are in one node."""
        return self.num_devices <= self.devices_per_node

    @property
    def price_per_hour(self) -> float | None:
        """Price of all devices in US dollars; None: unknown."""
        price = self.device.price_per_hour
        return None if price is None else price * self.num_devices

    def resized(self, num_devices: int) -> Cluster:
        """Return the cluster with another number of devices.

        A single node that is not full grows up to the usual size of a node.
        """
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
    "H100-PCIe": 64e9, "H100-NVL": 64e9, "H100": 450e9, "H800-PCIe": 64e9, "H800": 200e9, "H200": 450e9, "H20": 450e9,
    "B200": 900e9, "GB200": 900e9, "GB300": 900e9, "B300": 900e9, "GH200": 450e9,
    "MI355X": 538e9, "MI350X": 538e9, "MI300X": 448e9, "MI325X": 448e9, "MI250X": 200e9,
    "A10G": 25e9, "A10": 25e9, "L40S": 25e9, "L40": 25e9, "L4": 25e9, "T4": 12e9, "CPU": 4e9,
    "RTX-A6000": 25e9, "RTX-6000-Ada": 25e9, "RTX-PRO-6000": 50e9, "RTX-3090": 18e9, "RTX-4090": 18e9, "RTX-5090": 32e9,
}  # fmt: skip
# From rank to rank of a node: vTrain's tables of NCCL's all-reduces of 1 to 1024 MB over 2 to 8 V100 and A100 (trace/).
# Elsewhere, where no such table is known, an eight's takes 34 us with its call.
_INTRA_LATENCY_S = {"V100": 4e-6, "A100": 4e-6, "A800": 4e-6}
_NODE_GBPS = {
    "V100": 400, "A100": 1600, "A800": 1600, "H100": 3200, "H800": 3200, "H200": 3200, "B200": 3200, "GB200": 3200,
    "GB300": 6400, "B300": 6400, "GH200": 3200, "H20": 3200, "MI300X": 3200, "MI325X": 3200, "MI250X": 800,
    "MI350X": 3200, "MI355X": 3200,
    "A10G": 100, "A10": 100, "L40S": 400, "L40": 400, "L4": 100, "T4": 100, "CPU": 10, "RTX": 100, "RTX-PRO-6000": 400,
}  # fmt: skip
# NVL72: NVLink joins a rack's devices, not those of a tray. Jobs over several racks take 64 of each where that divides.
_NVLINK_RACK, _TAKEN_OF_A_RACK = {"GB200": 72, "GB300": 72}, 64
# What copies reach of PCIe 3 (V100), 4 and 5 (the slower direction, see below), and of NVLink-C2C's 450 GB/s in a
# direction, which two share in a GB200.
_HOST = {
    "V100": 12e9, "A100": 25e9, "A800": 25e9, "MI250X": 25e9, "A10G": 25e9, "A10": 25e9, "L40S": 25e9, "L40": 25e9,
    "L4": 25e9, "RTX": 25e9, "RTX-5090": 45e9, "RTX-PRO-6000": 45e9, "GH200": 350e9, "GB200": 175e9, "GB300": 175e9,
    "T4": 12e9, "CPU": 10e9,
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
    "V100": 24e9, "A100": 38e9, "A800": 38e9, "MI250X": 19e9, "A10": 38e9, "L40": 38e9, "L4": 38e9, "T4": 24e9,
    "RTX": 38e9, "RTX-PRO-6000": 57e9, "GH200": 380e9, "GB200": 190e9, "GB300": 190e9, "CPU": 10e9,
}  # fmt: skip
# GiB of a node's memory for one of its devices: an eighth of 512 (DGX-1, Frontier's nodes of 8 dies), 1,024 and 2,048
# (DGX A100 with 40 GB and with 80), 2,048 (DGX H100 and later), 2,304 (MI300X), a Grace's 480 for one device or for
# two, and what is usual in servers with PCIe boards.
_HOST_MEMORY_GIB = {
    "V100": 64, "A100": 256, "A100-40": 128, "A100-PCIe-40": 128, "A800": 256, "H100": 256, "H800": 256, "H200": 256,
    "H20": 256, "B200": 256, "B300": 256, "GH200": 480, "GB200": 240, "GB300": 240, "MI300X": 288, "MI325X": 288,
    "MI250X": 64, "A10G": 64, "A10": 64, "L40S": 64, "L40": 64, "L4": 48, "T4": 48, "RTX": 64, "RTX-PRO-6000": 128,
}  # fmt: skip
MOST_DEVICES = 2**24
"""The largest cluster that is accepted. A larger number in a file is a mistake, and would take forever to simulate."""


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
    """Build a cluster of a known device with the links that are usual for it.

    Args:
        device: A device, or its name.
        num_devices: All of them.
        devices_per_node: Devices that fast links join; None: 8, or the 72 of an NVL72, or all of fewer.
        node_gbps: Network of one node in Gbit/s; None: what is usual.
        latency_s: Latency from node to node.

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
        intra=Link(_of_family(_INTRA, device, 64e9), _of_family(_INTRA_LATENCY_S, device, 1e-6)),
        inter=Link(gbps * 1e9 / 8 / 8, latency_s),  # a node's network serves 8 devices, however many a job has of them
        host_link=Link(_of_family(_HOST, device, 45e9), 1e-5),
        host_memory=Link(_of_family(_HOST_MEMORY, device, 57e9), 1e-7),
        host_memory_bytes=round(_of_family(_HOST_MEMORY_GIB, device, 0) * 2**30) or None,
        devices_per_host_link=round(_of_family(_PER_HOST_LINK, device, 1)),
    )


def most_joined(device: Device) -> int:
    """Return the most devices that fast links join: a rack's in an NVL72, else the eight of a node."""
    return _NVLINK_RACK.get(device.name, 8)


def _usual_node(device: Device, num_devices: int) -> int:
    most = most_joined(device)
    if num_devices > most > _TAKEN_OF_A_RACK and num_devices % most and num_devices % _TAKEN_OF_A_RACK == 0:
        return _TAKEN_OF_A_RACK
    return min(most, num_devices)


# --- Clusters by name and as files, written by hand or by ``calibrate``.

_PRESET = re.compile(r"^(.+?)[xX*](\d{1,9})$")
FORMAT, VERSION = "meshwright.cluster", 1
_KEYS = {
    "device", "num_devices", "devices_per_node", "intra", "inter", "host_link", "host_memory", "disk",
    "host_memory_bytes", "devices_per_host_link", "price_per_hour",
}  # fmt: skip
_MEASURED_KEYS = {"format", "version", "calibration", "measured"}  # what ``calibrate`` writes beside them
_LINKS = ("intra", "inter", "host_link", "host_memory", "disk")
_LINK_KEYS = {"bytes_per_s", "gbps", "latency_s", "step_s"}
_DEVICE_KINDS = {"name": str, "efficiency": str, "bf16": bool, "is_host": bool}  # the others are positive numbers
_MAY_BE_UNKNOWN = {"fp8_flops_per_s", "fp4_flops_per_s", "price_per_hour"}


def find_cluster(name: str) -> Cluster:
    """Return the cluster that a preset (``"h100x64"``, ``"a100-40x8"``, ``"cpu*2"``) or a TOML or JSON file describes.

    Raises:
        ConfigError: For a preset that is unknown, and a file that is not valid.
    """
    if Path(name).suffix.lower() in (".toml", ".json"):
        return read_cluster(Path(name))
    found = _PRESET.match(name.strip())
    if found is None or int(found.group(2)) < 1:
        raise ConfigError(
            f"{name!r} names no cluster",
            expected="DEVICExNUMBER, such as h100x64, or a .toml or .json file; devices: " + join_names(DEVICES, 20),
            got=repr(name),
            fix="correct the name",
        )
    _refuse_two_numbers(name, *found.groups())
    return make_cluster(found.group(1), int(found.group(2)))


def _refuse_two_numbers(name: str, device: str, number: str) -> None:
    """Refuse ``h100x8x8``, which might be read as one number or as a product."""
    found = _PRESET.match(device)
    if found is None or half_peak_flops_per_s(found.group(1)) is None:  # as of RTX4090
        return
    raise ConfigError(
        f"{name!r} has two numbers of devices",
        expected="DEVICExNUMBER with the number of all devices; those of a node are known, or stand in a cluster file",
        got=repr(name),
        fix=f"write {found.group(1)}x{int(found.group(2)) * int(number)} for {found.group(2)} x {number} devices",
    )


def read_cluster(path: Path, *, learned: bool = True) -> Cluster:
    """Read a cluster file.

    Keys: ``device`` (a preset's name, or a table with the fields of :class:`Device`), ``num_devices``, and optionally
    ``devices_per_node``, ``price_per_hour``, ``host_memory_bytes`` (of a device's share of its node),
    ``devices_per_host_link`` (1 beside a ``host_link``, which is then a device's share) and the links ``intra``,
    ``inter``, ``host_link``, ``host_memory`` and ``disk``, each with ``bytes_per_s`` or else ``gbps`` (in Gbit/s) per
    device, ``latency_s`` and ``step_s``. A file that ``meshwright calibrate`` has written also carries ``calibration``,
    and in ``measured`` how it was made.

    Args:
        path: Path of the file.
        learned: Whether its calibration is corrected by what dry runs have taught.

    Raises:
        ConfigError: Naming the file and the key.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        data = tomllib.loads(text) if path.suffix.lower() == ".toml" else json.loads(text)
        if not learned and isinstance(data, Mapping) and isinstance(data.get("calibration"), Mapping):
            data = {**data, "calibration": {k: v for k, v in data["calibration"].items() if k != "learned"}}
        return _cluster_from(data)
    except MeshwrightError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"The cluster file {path} cannot be used",
            expected=f"TOML or JSON with the keys {join_names(sorted(_KEYS))}",
            got=f"{type(error).__name__}: {error}",
            fix="correct the file, or write it with meshwright calibrate",
        ) from None


def _cluster_from(data: Any) -> Cluster:
    if not isinstance(data, Mapping) or not {"device", "num_devices"} <= set(data):
        raise ValueError("device and num_devices must be given")
    refuse_unknown(data, _KEYS | _MEASURED_KEYS, "cluster")
    if data.get("format", FORMAT) != FORMAT or data.get("version", VERSION) != VERSION:
        given = f"format {data.get('format')!r}, version {data.get('version')!r}"
        raise ValueError(f"{given}; known: {FORMAT!r}, {VERSION}")
    described = data["device"]
    device = _device(described) if isinstance(described, Mapping) else find_device(str(described))
    if isinstance(data.get("measured"), Mapping) and data["measured"].get("device") == "cpu":
        # Older calibration files do not say so.
        device = dataclasses.replace(device, is_host=True)
    if "price_per_hour" in data:
        device = dataclasses.replace(device, price_per_hour=positive_number(data["price_per_hour"], "price_per_hour"))
    base = make_cluster(device, count_of(data, "num_devices"), count_of(data, "devices_per_node", None))

    host = data.get("host_memory_bytes", base.host_memory_bytes)
    sharing = 1 if "host_link" in data else base.devices_per_host_link
    links: dict[str, Any] = {name: _link(data[name], getattr(base, name), name) for name in _LINKS if name in data}
    return dataclasses.replace(
        base,
        **links,
        host_memory_bytes=None if host is None else round(positive_number(host, "host_memory_bytes")),
        calibration=calibration_from(data["calibration"]) if "calibration" in data else None,
        devices_per_host_link=count_of(data, "devices_per_host_link", sharing),
    )


def _device(data: Mapping[str, Any]) -> Device:
    """Build a device after checking every field: the simulation divides by these numbers."""
    for name, value in data.items():
        if value is None and name in _MAY_BE_UNKNOWN:
            continue
        wanted = _DEVICE_KINDS.get(name, (int, float))
        right = isinstance(value, wanted) and (wanted in (str, bool) or not isinstance(value, bool))
        if not right or (name not in _DEVICE_KINDS and not (value == 0 and name == "cache_bytes")):
            positive_number(value if right else repr(value), f"device.{name}")
    return Device(**data)


def _link(data: Any, usual: Link, name: str) -> Link:
    if not isinstance(data, Mapping):
        raise ValueError(f"{name} is not a table")
    refuse_unknown(data, _LINK_KEYS, name)
    if {"gbps", "bytes_per_s"} <= set(data):
        raise ValueError(f"{name} has both gbps and bytes_per_s, which say the same: keep one")
    rate = data.get("bytes_per_s", data["gbps"] * 1e9 / 8 if "gbps" in data else usual.bytes_per_s)
    latency_s, step_s = data.get("latency_s", usual.latency_s), data.get("step_s", usual.step_s)
    return Link(
        positive_number(rate, f"{name}.bytes_per_s"),
        positive_number(latency_s, name),
        positive_number(step_s, name) if step_s else 0.0,
    )


def write_cluster(cluster: Cluster, measured: Mapping[str, Any] | None = None) -> str:
    """Return a cluster as JSON; ``measured`` says where its numbers come from, and how far off they are."""
    device = {key: value for key, value in dataclasses.asdict(cluster.device).items() if key != "aliases"}
    whole: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    if measured:
        whole["measured"] = dict(measured)
    whole |= {"num_devices": cluster.num_devices, "devices_per_node": cluster.devices_per_node, "device": device}
    for name in _LINKS:
        whole[name] = dataclasses.asdict(getattr(cluster, name))
    whole["devices_per_host_link"] = cluster.devices_per_host_link
    if cluster.host_memory_bytes is not None:
        whole["host_memory_bytes"] = cluster.host_memory_bytes
    if cluster.calibration is not None:
        whole["calibration"] = calibration_tables(cluster.calibration)
    return json.dumps(whole, indent=2) + "\n"
