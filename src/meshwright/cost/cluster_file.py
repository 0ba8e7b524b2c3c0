"""Clusters by name, and as a file: what describes one of your own, and what ``calibrate`` has measured."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.cost.cluster import Cluster, Link, make_cluster
from meshwright.cost.device import DEVICES, Device, find_device, half_peak_flops_per_s
from meshwright.cost.efficiency import calibration_from, calibration_tables
from meshwright.errors import ConfigError, MeshwrightError, join_names

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
_LEAST = 1e-30  # what is further away from 1 is none of a device's or a link's figures
_LINK_KEYS = {"bytes_per_s", "gbps", "latency_s"}
_DEVICE_KINDS = {"name": str, "efficiency": str, "bf16": bool, "is_host": bool}  # the others are positive numbers
_MAY_BE_UNKNOWN = {"fp8_flops_per_s", "fp4_flops_per_s", "price_per_hour"}


def find_cluster(name: str) -> Cluster:
    """The cluster that a preset (``"h100x64"``, ``"a100-40x8"``, ``"cpu*2"``) or a file (TOML or JSON) describes.

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
    """``h100x8x8`` might be read as one number or as their product."""
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
    """Reads a cluster file.

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
    """Every field is of its kind: what is simulated divides by these numbers."""
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
    """The JSON of a cluster; ``measured`` says where its numbers come from and how far off they are."""
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
