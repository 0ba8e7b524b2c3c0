"""Watch the ranks of a job: name the rank that hangs, and the one that slows the others down."""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import PurePath
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Self

import torch.distributed as dist

from meshwright.errors import ConfigError, LaunchError
from meshwright.runtime.agreement import first_over_store, wait_for_all_ranks
from meshwright.runtime.processes import rank, world_size
from meshwright.runtime.rendezvous import named_ranks
from meshwright.runtime.torch_internals.c10d import default_store

_COLLECTIVES = ("/torch/distributed/",)
# They wait for other ranks in the store; all else in their file computes.
_STORE_WAITS = frozenset({wait_for_all_ranks.__code__, first_over_store.__code__})
_LIBRARIES = ("/torch/", "/meshwright/runtime/", "/meshwright/comm/")
_WRAPPERS = frozenset({"wrapper", "inner", "_wrapped_call_impl", "_call_impl", "decorate_context"})


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
    shows it then.
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
    while frame is not None and (frame.f_code in _STORE_WAITS or _is_of(frame, _COLLECTIVES)):
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


# --- The verdict: which rank holds up the others, decided on plain data from every rank's report.

_WAITING_SHARE = 0.3  # others that wait less than this are not held up by anybody
_SLOW_SHARE = 0.5  # a rank that waits less than half as much as the others do is who they wait for

_KINDS: dict[str, Any] = {"number": int, "step": int, "operation": str, "caller": str, "wait_share": (int, float)}


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
    """The ranks that cause a hang."""

    guilty: list[int]
    """Empty when nothing tells them apart."""
    reason: str
    reports: Mapping[int, Report] = field(repr=False)

    def __str__(self) -> str:
        ranks_at: dict[str, list[int]] = {}
        for number, report in sorted(self.reports.items()):
            ranks_at.setdefault(str(report), []).append(number)
        places = "; ".join(f"{named_ranks(ranks)}: {place}" for place, ranks in ranks_at.items())
        who = named_ranks(self.guilty) if self.guilty else "no one rank"
        return f"{who}: {self.reason}. {places}"


def verdict(reports: Mapping[int, Report], silent: list[int]) -> Verdict:
    """Find the ranks that cause a hang.

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


# --- A thread on every rank that reports, over the rendezvous store, where its rank is.

_LOOKS_PER_LIMIT = 8
_SILENT_LOOKS = 3  # so many pauses without a report are silence; with the one before, half a limit
_SAMPLE_S = 0.02
_SAMPLES = 100  # fewer say nothing of a share
_entered = itertools.count()  # watches of this process; all ranks enter theirs in the same order


def say(text: str) -> None:
    """Print one line on stderr."""
    print(f"meshwright: {text}", file=sys.stderr, flush=True)


class Watch:
    """A context that names the rank at fault when steps stop coming, and one that slows the others down.

    It needs no collectives: a thread on each rank writes where its training thread is into the ranks' store, and reads
    the others' reports when its own steps stop. One rank reports; a rank at fault shows its own stack too. Nothing is
    ended: that is for the backend's timeout, or for ``tell``, to decide.

    The thread that enters is the one watched. Watching begins at the second :meth:`beat`, as the first step may
    compile.

    Args:
        limit_s: Seconds without a beat that make a hang. It is reported within 1.5 times as many.
        tell: Called with what was found, on one rank.

    Raises:
        ConfigError: When ``limit_s`` is not above 0.
    """

    def __init__(self, limit_s: float, tell: Callable[[str], None] = say) -> None:
        if limit_s <= 0:
            raise ConfigError(
                "limit_s is not a duration", expected="seconds above 0", got=repr(limit_s), fix="give the longest step"
            )
        self._limit_s, self._tell = limit_s, tell
        self._pause_s = min(limit_s / _LOOKS_PER_LIMIT, 2.0)  # between two reports
        self._over = threading.Event()
        self._step, self._beat_s, self._paused = 0, 0.0, False
        self._samples = self._waits = 0  # where the thread was, of late
        self._number = 0  # of reports
        self._reported_step = -1  # a hang is reported once
        self._reported_slow: set[int] = set()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._watched = threading.get_ident()
        self._keys = f"meshwright/watch/{next(_entered)}"
        # A connection of its own: a read that waits would hold up everything else that uses the store.
        self._store = default_store().clone() if dist.is_initialized() else None  # type: ignore[attr-defined]
        if self._store is not None:
            self._store.set_timeout(timedelta(seconds=max(self._limit_s / _LOOKS_PER_LIMIT, 0.5)))
        self._thread = threading.Thread(target=self._run, name="meshwright-watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        assert self._thread is not None
        self._thread.join(self._pause_s + 1.0)

    def beat(self) -> None:
        """Mark the beginning of a step."""
        self._step += 1
        self._beat_s = time.monotonic()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend watching, for a checkpoint or an evaluation."""
        self._paused = True
        try:
            yield
        finally:
            self._beat_s, self._paused = time.monotonic(), False

    def _run(self) -> None:
        while not self._over.is_set():
            self._sample_for(self._pause_s)
            try:
                self._look()
            except RuntimeError as error:  # torch's DistError is one
                if self._is_news() and not self._over.is_set():
                    self._reported_step = self._step
                    cause = f"which rank 0 or the launcher keeps: {str(error).splitlines()[0]}"
                    self._tell(f"{self._hang_text()} rank {rank()} cannot reach the store of the ranks, {cause}")
                self._over.wait(self._pause_s)

    def _sample_for(self, duration_s: float) -> None:
        end_s = time.monotonic() + duration_s
        while time.monotonic() < end_s and not self._over.wait(min(_SAMPLE_S, duration_s)):
            if self._step > 1 and not self._paused:
                # Halve the count, so that older samples fade.
                if self._samples == 2 * _SAMPLES:
                    self._samples, self._waits = _SAMPLES, self._waits // 2
                self._samples += 1
                self._waits += bool(place_of(self._watched).operation)

    def _is_late(self) -> bool:
        return self._step > 1 and not self._paused and time.monotonic() - self._beat_s > self._limit_s

    def _is_news(self) -> bool:
        return self._is_late() and self._reported_step != self._step

    def _look(self) -> None:
        self._publish()
        if self._is_news():
            self._diagnose()
        elif rank() == 0 and world_size() > 1 and self._samples >= _SAMPLES:
            self._find_slow()

    def _publish(self) -> None:
        self._number += 1
        place = place_of(self._watched)
        self._own = Report(self._number, self._step, *place, wait_share=self._waits / max(self._samples, 1))
        if self._store is not None:
            self._store.set(f"{self._keys}/{rank()}", self._own.to_json())

    def _diagnose(self) -> None:
        """Read the others' reports until each is new, or late enough to count as silent.

        This rank keeps reporting meanwhile: others diagnose in the same moments, and would take it for silent.
        """
        before, now = self._read(), dict[int, Report]()
        silent = list(range(world_size()))
        for _ in range(_SILENT_LOOKS):
            if not silent or self._over.wait(self._pause_s):
                break
            self._publish()
            now = self._read()
            silent = [each for each in range(world_size()) if each not in now or now[each] == before.get(each)]
        if self._over.is_set() or not self._is_news():
            return
        found = verdict(now, [each for each in silent if each != rank()])
        self._reported_step = self._step
        if rank() in found.guilty and world_size() > 1:
            self._tell(f"rank {rank()} holds up the others; it is at\n{stack_of(self._watched)}")
        if self._is_first(min(report.step for report in now.values())):
            self._tell(f"{self._hang_text()} {found}")

    def _hang_text(self) -> str:
        return f"no step has ended for {self._limit_s:g} s:"

    def _is_first(self, last: int) -> bool:
        """Return whether no other rank has reported this hang yet, keyed by the step of the last rank.

        Others may be in the next step.
        """
        return self._store is None or self._store.add(f"{self._keys}/told/{last}", 1) == 1

    def _read(self) -> dict[int, Report]:
        if self._store is None:
            return {0: self._own}
        names = [f"{self._keys}/{each}" for each in range(world_size())]
        if self._store.check(names):
            return {each: Report.from_json(text) for each, text in enumerate(self._store.multi_get(names))}
        present = [each for each, name in enumerate(names) if self._store.check([name])]
        return {each: Report.from_json(self._store.get(names[each])) for each in present}

    def _find_slow(self) -> None:
        shares = {each: report.wait_share for each, report in self._read().items()}
        slow = set(slow_ranks(shares)) if len(shares) == world_size() else set()
        for each in sorted(slow - self._reported_slow):
            others = statistics.median(share for other, share in shares.items() if other != each)
            waits = f"it waits {shares[each]:.0%} of its time in collectives, the others {others:.0%}"
            self._tell(f"rank {each} is slow, and the others wait for it: {waits}")
        self._reported_slow |= slow
