"""Decide from the ranks' reports of themselves which of them hangs, and which slows the others down."""

from __future__ import annotations

import json
import statistics
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePath
from types import FrameType
from typing import Any, NamedTuple, TypeVar

from meshwright.errors import LaunchError
from meshwright.runtime.agreement import first_over_store, wait_for_all_ranks
from meshwright.runtime.rendezvous import named_ranks

_COLLECTIVES = ("/torch/distributed/",)
# They wait for other ranks in the store, or in what :func:`waits_for_others` marks; all else in their file computes.
_WAITS = {wait_for_all_ranks.__code__, first_over_store.__code__}
_LIBRARIES = ("/torch/", "/meshwright/runtime/", "/meshwright/comm/")
_WRAPPERS = frozenset({"wrapper", "inner", "_wrapped_call_impl", "_call_impl", "decorate_context"})


Function = TypeVar("Function", bound=Callable[..., Any])


def waits_for_others(function: Function) -> Function:
    """Mark a function whose time is spent in waiting for other ranks: at a hang its rank is not the one at fault."""
    _WAITS.add(function.__code__)  # type: ignore[attr-defined]
    return function


class Place(NamedTuple):
    """The activity of a thread at one moment."""

    operation: str
    """The collective it waits in; empty when it does something else."""
    caller: str
    """File, line and function outside of torch: the user's, as a rule."""


def place_of(thread_id: int) -> Place:
    """Return the place of a thread of this process; costs some microseconds.

    A thread counts as waiting when its innermost Python frame belongs to torch.distributed, or to a function that waits
    in the store. With NCCL the host runs ahead of the device and waits where it next needs a number: only the caller
    shows it then, and the collectives themselves, which :mod:`meshwright.runtime.flight_recorder` reads.
    """
    frame = sys._current_frames().get(thread_id)
    if frame is None:
        return Place("", "no such thread")
    return Place(_operation(frame), _caller(frame))


def stack_of(thread_id: int) -> str:
    """Return the stack of a thread of this process, as a traceback shows it."""
    frame = sys._current_frames().get(thread_id)
    return "".join(traceback.format_stack(frame)).rstrip() if frame is not None else "no such thread"


def _operation(frame: FrameType | None) -> str:
    """Return the collective that the caller has called: the outermost one at the inner end of the stack."""
    found = ""
    while frame is not None and (frame.f_code in _WAITS or _is_of(frame, _COLLECTIVES)):
        name = frame.f_code.co_name
        found = name if name not in _WRAPPERS else found or name
        frame = frame.f_back
    return found


def _caller(frame: FrameType | None) -> str:
    innermost = frame
    while frame is not None and _is_of(frame, _LIBRARIES):
        frame = frame.f_back
    frame = frame or innermost
    assert frame is not None
    return f"{PurePath(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_of(frame: FrameType, folders: tuple[str, ...]) -> bool:
    name = frame.f_code.co_filename.replace("\\", "/")
    return any(folder in name for folder in folders)


# --- A rank's report of itself.

_KINDS: dict[str, Any] = {
    "number": int,
    "step": int,
    "operation": str,
    "caller": str,
    "wait_share": (int, float),
    "called": dict,
    "pending": str,
    "busy": bool,
}


@dataclass(frozen=True)
class Report:
    """A rank's periodic report of itself."""

    number: int
    """Counts reports: one that has not grown comes from a process that is gone or stopped."""
    step: int
    """Steps that it has begun."""
    operation: str
    """The collective that it waits in; empty when it does something else."""
    caller: str
    wait_share: float = 0.0
    """Share of its time in the latest steps in which it waited in collectives."""
    called: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """By process group: how many collectives it has called, and how many of them have ended."""
    pending: str = ""
    """The first collective that it has called and that has not ended."""
    busy: bool = False
    """True if the rank's process has used its processor since the report before this one."""

    @property
    def waits(self) -> dict[str, int]:
        """Return the process groups in which a collective has not ended, with how many have."""
        return {group: ended for group, (called, ended) in self.called.items() if called > ended}

    def lacks(self, waited: Mapping[str, int]) -> bool:
        """Return whether the rank has not called the collective of this number in one of its process groups."""
        return any(called < waited.get(group, 0) for group, (called, _) in self.called.items())

    def to_json(self) -> str:
        """Return the report as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Report:
        """Read a report that :meth:`to_json` wrote.

        Raises:
            LaunchError: When it is something else.
        """
        try:
            return cls._of(json.loads(text))
        except (TypeError, ValueError, RecursionError) as error:
            raise _unreadable(error) from error

    @classmethod
    def _of(cls, fields: Any) -> Report:
        report = cls(**fields)
        for name, kinds in _KINDS.items():
            if not isinstance(getattr(report, name), kinds):
                raise TypeError(f"{name} is {getattr(report, name)!r}")
        for counts in report.called.values():
            called, ended = counts
            if not isinstance(called, int) or not isinstance(ended, int):
                raise TypeError(f"called holds {counts!r}")
        return report

    def __str__(self) -> str:
        parts = [f"step {self.step}", *(f"in {each}" for each in (self.operation,) if each), self.caller]
        return ", ".join(parts) + (f", waiting for {self.pending}" if self.pending else "")


def _unreadable(error: Exception) -> LaunchError:
    return LaunchError(
        "A rank's report of itself cannot be read",
        expected="the same Meshwright on every rank",
        got=f"{type(error).__name__}: {error}",
        fix="install one version everywhere",
    )


def joined_reports(reports: Mapping[int, str]) -> str:
    """Return reports, each as JSON, as one text for :func:`read_joined`."""
    return "{" + ", ".join(f'"{number}": {text}' for number, text in reports.items()) + "}"


def read_joined(texts: list[bytes]) -> dict[int, Report]:
    """Return the latest report of every rank in texts of :func:`joined_reports`.

    Raises:
        LaunchError: When they are something else.
    """
    found: dict[int, Report] = {}
    try:
        for text in texts:
            for number, fields in json.loads(text).items():
                report = Report._of(fields)
                if int(number) not in found or found[int(number)].number < report.number:
                    found[int(number)] = report
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise _unreadable(error) from error
    return found


# --- The verdict: which rank holds up the others, decided on plain data from every rank's report.

_WAITING_SHARE = 0.3  # others that wait less than this are not held up by anybody
_SLOW_SHARE = 0.5  # a rank that waits less than half as much as the others do is who they wait for
_PLACES = 12  # of ranks at a hang that are told


@dataclass(frozen=True)
class Verdict:
    """The ranks that cause a hang."""

    guilty: list[int]
    """Empty when nothing tells them apart."""
    reason: str
    reports: Mapping[int, Report] = field(repr=False)

    def __str__(self) -> str:
        ranks_at: dict[str, list[int]] = {}
        for number, report in sorted(_with_known_pending(self.reports).items()):
            ranks_at.setdefault(str(report), []).append(number)
        # Where the guilty are comes first, should there be too many places to tell.
        order = sorted(ranks_at.items(), key=lambda each: (not set(self.guilty) & set(each[1]), each[1][0]))
        told = sorted(order[:_PLACES], key=lambda each: each[1][0])
        places = "; ".join(f"{named_ranks(ranks)}: {place}" for place, ranks in told)
        more = f"; {len(order) - len(told)} more places" if len(order) > len(told) else ""
        who = named_ranks(self.guilty) if self.guilty else "no one rank"
        return f"{who}: {self.reason}. {places}{more}"


def _with_known_pending(reports: Mapping[int, Report]) -> dict[int, Report]:
    """Return the reports with what others at the same place wait for, where a recorder answered too late to tell.

    Nothing is filled in where the others wait for different collectives.
    """
    pending_at: dict[tuple[int, str, str], set[str]] = {}
    for report in reports.values():
        pending_at.setdefault((report.step, report.operation, report.caller), set()).add(report.pending)
    found = dict(reports)
    for number, report in reports.items():
        known = pending_at[report.step, report.operation, report.caller] - {""}
        if report.operation and not report.pending and len(known) == 1:
            found[number] = replace(report, pending=next(iter(known)))
    return found


def verdict(reports: Mapping[int, Report], silent: list[int]) -> Verdict:
    """Find the ranks that cause a hang.

    Args:
        reports: The latest of every rank that has sent any.
        silent: Ranks that have not sent any lately, or never.
    """
    if silent:
        return Verdict(silent, "no sign of life: the process is gone, stopped, or its machine unreachable", reports)
    if found := _absent(reports):
        return found
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


def _absent(reports: Mapping[int, Report]) -> Verdict | None:
    """Find the ranks that have not called a collective in which others wait; None where nothing is known of such.

    Where the host runs ahead of the device this alone tells who waits for whom. The numbers are the flight recorder's.
    """
    waited: dict[str, int] = {}  # by process group: the first collective in which a rank waits
    for report in reports.values():
        waited |= {group: max(ended + 1, waited.get(group, 0)) for group, ended in report.waits.items()}
    absent = [rank for rank, report in reports.items() if report.lacks(waited)]
    # A rank that waits in another group may itself be waiting for the others.
    guilty = [rank for rank in absent if not reports[rank].waits]
    if guilty:
        return Verdict(guilty, "not in a collective, while others wait in one", reports)
    if absent:
        return Verdict(absent, "they wait in another collective: the ranks do not call the same collectives", reports)
    if waited and all(report.waits for report in reports.values()) and all(map(_is_complete(reports), waited)):
        return Verdict([], "all have called the collectives in which they wait: a network or a device", reports)
    return None


def _is_complete(reports: Mapping[int, Report]) -> Callable[[str], bool]:
    """Return whether all ranks of a process group tell what they have called in it."""
    present = Counter(group for report in reports.values() for group in report.called)
    return lambda group: present[group] == size_of_group(group)


def group_key(name: str, ranks: Sequence[int]) -> str:
    """Return a key for a process group: groups of other ranks may have the same name."""
    return f"{name}/{min(ranks)}/{len(ranks)}"


def size_of_group(key: str) -> int:
    """Return the number of ranks of a group with this :func:`group_key`; 0 if it is something else."""
    size = key.rpartition("/")[2]
    return int(size) if size.isdecimal() else 0


def _minority(places: Mapping[int, str]) -> list[int]:
    """Return the ranks in another place than most; all of them where there is no majority."""
    counted = Counter(places.values()).most_common()
    if len(counted) == 1:
        return []
    most = counted[0][0] if counted[0][1] > counted[1][1] else None
    return [rank for rank, place in places.items() if place != most]


def slow_ranks(wait_shares: Mapping[int, float]) -> list[int]:
    """Return the ranks for which the others wait: those wait in collectives, and these hardly do.

    Args:
        wait_shares: Share of every rank's time in which it waits in collectives.
    """
    typical = statistics.median_high(wait_shares.values())
    if typical < _WAITING_SHARE:
        return []
    return [rank for rank, share in wait_shares.items() if share < _SLOW_SHARE * typical]
