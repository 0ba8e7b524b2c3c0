"""Read torch's flight recorder: the collectives that this process has called, and how long the device took for them.

Process groups of NCCL and gloo record their latest collectives (2,000 of each, or ``TORCH_FR_BUFFER_SIZE``), with
numbers that are equal on all ranks of a group. With NCCL nothing else shows where a rank waits: its host runs ahead.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from meshwright.runtime.rank_reports import group_key
from meshwright.runtime.torch_internals.c10d import enable_timings, flight_recorders, ranks_of_groups

Dump = Callable[[], bytes]
_STATES = ("enqueued", "completed")
_MOST_SKIPPED = 64


class Collectives(NamedTuple):
    """The collectives that this process has called."""

    called: dict[str, tuple[int, int]]
    """By process group: how many it has called, and how many of them have ended."""
    pending: str
    """The first that has not ended."""


class FlightRecorder:
    """The flight recorders of this process's groups.

    Args:
        dumps: Functions that return a recorder's content as JSON; None takes those that this torch has.
        ranks: Returns the global ranks of each living process group by its name; None asks torch.
    """

    def __init__(
        self, dumps: list[Dump] | None = None, ranks: Callable[[], Mapping[str, list[int]]] = ranks_of_groups
    ) -> None:
        self._dumps = flight_recorders() if dumps is None else dumps
        self._ranks = ranks
        self._reader: threading.Thread | None = None
        self._counted: set[tuple[str, int, int]] = set()  # collectives whose seconds are counted
        self._last_s = time.time()
        self._fruitless = self._skipped = 0  # reads in which nothing was timed, and calls since the last of them

    def collectives(self, patience_s: float) -> Collectives:
        """Return what the recorders hold; nothing if they take longer than ``patience_s``."""
        contents, ranks = self._contents(patience_s), self._ranks()
        called: dict[str, tuple[int, int]] = {}
        retired: dict[str, set[int]] = {}  # numbers of collectives whose own entries say that they have ended
        pending: list[tuple[int, str]] = []
        for content in contents:
            for entry in content["entries"]:
                name, description = entry["process_group"]
                if name not in ranks:
                    continue
                status = content["pg_status"].get(str(entry["pg_id"]), {})
                number, ended = (max(int(status.get(f"last_{each}_collective", 0)), 0) for each in _STATES)
                # A group may have a backend for each kind of device, which count on their own.
                backend = entry["profiling_name"].partition(":")[0]
                key = group_key(f"{backend}:{name}", ranks[name])
                called[key] = max(number, ended), ended
                if entry["retired"] and not entry.get("is_p2p"):
                    retired.setdefault(key, set()).add(entry["collective_seq_id"])
                elif not entry["retired"]:
                    where = name if description in ("", "undefined") else description
                    what = f"{entry['profiling_name']} {entry['collective_seq_id']} of group {where}"
                    pending.append((entry["time_created_ns"], what))
        known = {key: _with_retired(*counts, retired.get(key, set())) for key, counts in called.items()}
        return Collectives(known, min(pending)[1] if pending else "")

    def wait_share(self, patience_s: float) -> float | None:
        """Return the share of the time since the last call in which the device was in collectives.

        A collective takes as long as its ranks wait for the last of them. None where no device times any, as on a CPU.
        Sending and receiving, which in a pipeline depends on the stage, does not count.

        Reading holds up this process for a tenth of a second where recorders are full. While nothing is timed, only
        every second, fourth, … 64th call reads them.
        """
        self._skipped += 1
        if self._skipped < min(2**self._fruitless, _MOST_SKIPPED):
            return None
        self._skipped = 0
        enable_timings()
        seconds, counted, since_s = 0.0, set[tuple[str, int, int]](), time.time()
        for content in self._contents(patience_s):
            for entry in content["entries"]:
                if "duration_ms" not in entry or entry.get("is_p2p"):
                    continue
                # Some versions of torch show what NCCL has recorded in both recorders.
                key = entry["profiling_name"], entry["record_id"], entry["time_created_ns"]
                if key not in self._counted and key not in counted:
                    seconds += entry["duration_ms"] / 1000
                    since_s = min(since_s, entry["time_created_ns"] / 1e9)
                counted.add(key)
        # A full recorder has lost the collectives of the first part of this time.
        elapsed_s = time.time() - max(self._last_s, since_s)
        self._counted, self._last_s = counted, time.time()
        self._fruitless = 0 if counted else self._fruitless + 1
        return min(seconds / elapsed_s, 1.0) if counted and elapsed_s > 0 else None

    def _contents(self, patience_s: float) -> list[Mapping[str, Any]]:
        """Return the recorders' contents, read by another thread: a device that hangs may keep it."""
        if self._reader is not None and self._reader.is_alive():
            return []
        found: list[Mapping[str, Any]] = []
        self._reader = threading.Thread(target=lambda: found.extend(self._read()), daemon=True)
        self._reader.start()
        self._reader.join(patience_s)
        return [] if self._reader.is_alive() else found

    def _read(self) -> Iterator[Mapping[str, Any]]:
        for dump in self._dumps:
            content = json.loads(dump())
            yield {"entries": content.get("entries", []), "pg_status": content.get("pg_status", {})}


def _with_retired(called: int, ended: int, retired: set[int]) -> tuple[int, int]:
    """Count collectives that have ended by their entries: the status of a group may follow a moment later."""
    while ended < called and ended + 1 in retired:
        ended += 1
    return called, ended
