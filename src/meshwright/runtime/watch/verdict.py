"""Who holds up the others: decided from what each rank has told of itself. Plain data, no ranks in here."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from meshwright.errors import LaunchError
from meshwright.runtime.agreement import named_ranks

_WAITING_SHARE = 0.3  # others that wait less than this are not held up by anybody
_SLOW_SHARE = 0.5  # a rank that waits less than half as much as the others do is who they wait for

_KINDS: dict[str, Any] = {"number": int, "step": int, "operation": str, "caller": str, "wait_share": (int, float)}


@dataclass(frozen=True)
class Report:
    """What one rank tells of itself every so often."""

    number: int
    """Counts reports: one that has not grown comes from a process that is gone or stopped."""
    step: int
    """Steps that it has begun."""
    operation: str
    """The collective that it waits in; empty when it does something else."""
    caller: str
    wait_share: float = 0.0
    """Of its time in the latest steps, the share in which it waited in collectives."""

    def to_json(self) -> str:
        """JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Report:
        """The report of what :meth:`to_json` gave.

        Raises:
            LaunchError: When it is something else.
        """
        try:
            report = cls(**json.loads(text))
            for name, kinds in _KINDS.items():
                if not isinstance(getattr(report, name), kinds):
                    raise TypeError(f"{name} is {getattr(report, name)!r}")
        except (TypeError, ValueError, RecursionError) as error:
            raise LaunchError(
                "A rank's report of itself cannot be read",
                expected="the same Meshwright on every rank",
                got=f"{type(error).__name__}: {error}",
                fix="install one version everywhere",
            ) from error
        return report

    def __str__(self) -> str:
        return f"step {self.step}, {'in ' + self.operation + ', ' if self.operation else ''}{self.caller}"


@dataclass(frozen=True)
class Verdict:
    """Which ranks a hang is due to."""

    guilty: list[int]
    """Empty when nothing tells them apart."""
    reason: str
    reports: Mapping[int, Report] = field(repr=False)

    def __str__(self) -> str:
        ranks_at: dict[str, list[int]] = {}
        for rank, report in sorted(self.reports.items()):
            ranks_at.setdefault(str(report), []).append(rank)
        told = "; ".join(f"{named_ranks(ranks)}: {place}" for place, ranks in ranks_at.items())
        who = named_ranks(self.guilty) if self.guilty else "no one rank"
        return f"{who}: {self.reason}. {told}"


def verdict(reports: Mapping[int, Report], silent: list[int]) -> Verdict:
    """Finds who a hang is due to.

    Args:
        reports: The latest of every rank that has sent any.
        silent: Ranks that have not sent any lately, or never.
    """
    if silent:
        return Verdict(silent, "no sign of life: the process is gone, stopped, or its machine unreachable", reports)
    last = min(report.step for report in reports.values())
    behind = [rank for rank, report in reports.items() if report.step == last]
    busy = [rank for rank in behind if not reports[rank].operation]
    if busy and len(busy) < len(reports):
        return Verdict(busy, "not in a collective, while others wait in one", reports)
    if len(behind) < len(reports):
        return Verdict(behind, "behind the others", reports)
    odd = _minority({rank: f"{report.operation} {report.caller}" for rank, report in reports.items()})
    if odd:
        return Verdict(odd, "in another place than most: the ranks do not call the same collectives", reports)
    return Verdict([], "all are in the same place: a network, a device, or something all of them wait for", reports)


def _minority(places: Mapping[int, str]) -> list[int]:
    """Ranks in another place than most; all of them where there is no majority."""
    counted = Counter(places.values()).most_common()
    if len(counted) == 1:
        return []
    most = counted[0][0] if counted[0][1] > counted[1][1] else None
    return [rank for rank, place in places.items() if place != most]


def slow_ranks(wait_shares: Mapping[int, float]) -> list[int]:
    """Ranks for which the others wait: those wait in collectives, and these hardly do.

    Args:
        wait_shares: Of every rank, the share of its time that it waits in collectives.
    """
    typical = statistics.median_high(wait_shares.values())
    if typical < _WAITING_SHARE:
        return []
    return [rank for rank, share in wait_shares.items() if share < _SLOW_SHARE * typical]
