"""Writes a cluster with what was measured on it as the file that ``read_cluster`` reads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from meshwright.cost.cluster import FORMAT, VERSION, Cluster
from meshwright.cost.efficiency import calibration_tables


def write_cluster(cluster: Cluster, measured: Mapping[str, Any] | None = None) -> str:
    """The JSON of a cluster; ``measured`` says where its numbers come from and how far off they are."""
    device = {key: value for key, value in dataclasses.asdict(cluster.device).items() if key != "aliases"}
    whole: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    if measured:
        whole["measured"] = dict(measured)
    whole |= {"num_devices": cluster.num_devices, "devices_per_node": cluster.devices_per_node, "device": device}
    for name in ("intra", "inter", "host_link", "host_memory", "disk"):
        whole[name] = dataclasses.asdict(getattr(cluster, name))
    if cluster.calibration is not None:
        whole["calibration"] = calibration_tables(cluster.calibration)
    return json.dumps(whole, indent=2) + "\n"
