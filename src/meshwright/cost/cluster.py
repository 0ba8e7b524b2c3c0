"""Clusters: nodes of equal devices and the links between them, as presets and as files."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.cost.calibration import Calibration, calibration_from, calibration_tables
from meshwright.cost.device_specs import DEVICES, Device, find_device, half_peak_flops_per_s
from meshwright.errors import ConfigError, MeshwrightError, join_names


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
    """Return how many devices fast links join at most: a rack's in an NVL72, else the eight of a node."""
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
    "device",
    "num_devices",
    "devices_per_node",
    "intra",
    "inter",
    "host_link",
    "host_memory",
    "disk",
    "host_memory_bytes",
    "devices_per_host_link",
    "price_per_hour",
}
_MEASURED_KEYS = {"format", "version", "calibration", "measured"}  # what ``calibrate`` writes beside them
_LEAST = 1e-30  # bounds of all figures: from this to its inverse
_LINK_KEYS = {"bytes_per_s", "gbps", "latency_s"}
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
    device and ``latency_s``. A file that ``meshwright calibrate`` has written also carries ``calibration``,
    and in ``measured`` how it was made.

    Args:
        path: Of the file.
        learned: Whether its calibration is corrected by what dry runs have taught.

    Raises:
        ConfigError: Naming the file and the key.
    """
    try:
        text = path.read_text()
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
    _refuse_unknown(data, _KEYS | _MEASURED_KEYS, "cluster")
    if data.get("format", FORMAT) != FORMAT or data.get("version", VERSION) != VERSION:
        raise ValueError(
            f"format {data.get('format')!r}, version {data.get('version')!r}; known: {FORMAT!r}, {VERSION}"
        )
    described = data["device"]
    device = _device(described) if isinstance(described, Mapping) else find_device(str(described))
    if isinstance(data.get("measured"), Mapping) and data["measured"].get("device") == "cpu":
        device = dataclasses.replace(device, is_host=True)  # which calibrations have not always said
    if "price_per_hour" in data:
        device = dataclasses.replace(device, price_per_hour=_positive(data["price_per_hour"], "price_per_hour"))
    base = make_cluster(device, _count(data, "num_devices"), _count(data, "devices_per_node", None))

    host = data.get("host_memory_bytes", base.host_memory_bytes)
    sharing = 1 if "host_link" in data else base.devices_per_host_link

    def link(name: str, usual: Link) -> Link:
        return _link(data[name], usual, name) if name in data else usual

    return dataclasses.replace(
        base,
        intra=link("intra", base.intra),
        inter=link("inter", base.inter),
        host_link=link("host_link", base.host_link),
        host_memory=link("host_memory", base.host_memory),
        disk=link("disk", base.disk),
        host_memory_bytes=None if host is None else round(_positive(host, "host_memory_bytes")),
        calibration=calibration_from(data["calibration"]) if "calibration" in data else None,
        devices_per_host_link=_count(data, "devices_per_host_link", sharing),
    )


def _device(data: Mapping[str, Any]) -> Device:
    """Build a device after checking every field: the simulation divides by these numbers."""
    for name, value in data.items():
        if value is None and name in _MAY_BE_UNKNOWN:
            continue
        wanted = _DEVICE_KINDS.get(name, (int, float))
        right = isinstance(value, wanted) and (wanted in (str, bool) or not isinstance(value, bool))
        if not right or (name not in _DEVICE_KINDS and not (value == 0 and name == "cache_bytes")):
            _positive(value if right else repr(value), f"device.{name}")
    return Device(**data)


def _link(data: Any, usual: Link, name: str) -> Link:
    if not isinstance(data, Mapping):
        raise ValueError(f"{name} is not a table")
    _refuse_unknown(data, _LINK_KEYS, name)
    if {"gbps", "bytes_per_s"} <= set(data):
        raise ValueError(f"{name} has both gbps and bytes_per_s, which say the same: keep one")
    rate = data.get("bytes_per_s", data["gbps"] * 1e9 / 8 if "gbps" in data else usual.bytes_per_s)
    return Link(_positive(rate, f"{name}.bytes_per_s"), _positive(data.get("latency_s", usual.latency_s), name))


def _refuse_unknown(data: Mapping[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(set(data) - known)
    if unknown:
        raise ValueError(f"unknown keys in {where}: {', '.join(map(str, unknown))}; known: {', '.join(sorted(known))}")


def _count(data: Mapping[str, Any], key: str, default: int | None = 1) -> Any:
    value = data.get(key, default)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError(f"{key} must be a positive number, and is {value!r}")
    return value


def _positive(value: Any, name: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not _LEAST < value < 1 / _LEAST:
        raise ValueError(f"{name} must be a positive number, and is {value!r}")
    return float(value)


def write_cluster(cluster: Cluster, measured: Mapping[str, Any] | None = None) -> str:
    """Return a cluster as JSON; ``measured`` says where its numbers come from, and how far off they are."""
    device = {key: value for key, value in dataclasses.asdict(cluster.device).items() if key != "aliases"}
    whole: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    if measured:
        whole["measured"] = dict(measured)
    whole |= {"num_devices": cluster.num_devices, "devices_per_node": cluster.devices_per_node, "device": device}
    for name in ("intra", "inter", "host_link", "host_memory", "disk"):
        whole[name] = dataclasses.asdict(getattr(cluster, name))
    whole["devices_per_host_link"] = cluster.devices_per_host_link
    if cluster.host_memory_bytes is not None:
        whole["host_memory_bytes"] = cluster.host_memory_bytes
    if cluster.calibration is not None:
        whole["calibration"] = calibration_tables(cluster.calibration)
    return json.dumps(whole, indent=2) + "\n"
