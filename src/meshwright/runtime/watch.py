"""Watch the ranks of a job: name the rank that hangs, and the one that slows the others down."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from meshwright.errors import ConfigError
from meshwright.runtime.flight_recorder import FlightRecorder
from meshwright.runtime.processes import rank, world_size
from meshwright.runtime.rank_reports import (
    Report,
    Verdict,
    joined_reports,
    place_of,
    read_joined,
    slow_ranks,
    stack_of,
    verdict,
)
from meshwright.runtime.torch_internals.c10d import Store, default_store

# [Note: watching thousands of ranks]
#
# The ranks keep one store, which one process serves, so what they do there must not grow faster than their number.
# Routine: a rank writes its report into a file in its host's memory. One rank of each host sends all of them on, as one
# value: the lowest whose own report is fresh, so that the next takes over when it stops. One rank of the first host
# reads them now and then, to find slow ranks. At a hang: every rank that is late takes a turn, by one addition. The
# first reads all hosts' reports, a few times, and publishes its verdict, which the others wait for. The second reads
# them if the first does not publish, and so on.

_LOOKS_PER_LIMIT = 10
_SILENT_LOOKS = 4  # so many pauses without a report are silence: a report passes through two threads that pause
_TURN_LOOKS = _SILENT_LOOKS + 2  # pauses in which whoever has the turn must have published a verdict
_SLOW_LOOKS = 5  # pauses between two searches for slow ranks
# [Note: hangs noticed early]
#
# A limit that no step may ever reach is long: minutes. Where going back costs seconds, waiting so long costs more than
# a false alarm. A step that is late by five usual ones, and by what a restart takes, is then looked into, and is a hang
# if the rank that the others wait for is silent, or has hardly used its processor meanwhile: one that compiles or
# computes is none. Whoever waits as long as a restart takes loses at most twice what the better choice would have cost.
# The usual time is that of many steps, so that the first steps of an attempt have the long limit: a step that takes
# long again after a restart is given the time.
_EARLY_STEPS = 5
_LEAST_EARLY_S = 0.5
_EARLY_PAUSE_S = 0.25
_USUAL_OF = 20  # steps
_BUSY_SHARE = 0.05  # of the time of one processor
_STACKS_S = 0.5  # for the ranks at fault to show where they are

_SAMPLE_S = 0.02
_SAMPLES = 100  # fewer say nothing of a share
_entered = itertools.count()  # watches of this process; all ranks enter theirs in the same order


class HostReports:
    """The reports of the ranks of one host, in files in its memory, of which one rank sends all on.

    Ranks that cannot share files, such as those of several containers, are hosts of their own.

    Args:
        name: Name of the watch, which no other on this host has.
        own: Rank of this process.
    """

    def __init__(self, name: str, own: int) -> None:
        self._own, self._text = own, ""
        self._seen: dict[int, tuple[str, int]] = {}  # by rank: its report, and how often it has been the same
        self._number = 0  # of the host, among those that send; 0 before
        memory = Path("/dev/shm")
        folder = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
        self._folder: Path | None = folder / f"meshwright-watch-{name}"
        self._lock = -1
        with self._alone_after_errors():
            self._lock = _entered_folder(self._folder)
            _remove_abandoned(folder)
            if self._folder.stat().st_uid != os.getuid():
                raise PermissionError(f"{self._folder} belongs to somebody else")

    @contextlib.contextmanager
    def _alone_after_errors(self) -> Iterator[None]:
        """Go on without the other ranks of the host when their folder cannot be used."""
        try:
            yield
        except OSError:
            self._folder, self._number, self._seen = None, 0, {}

    def write(self, text: str) -> None:
        """Replace this rank's report."""
        self._text = text
        if self._folder is not None:
            with self._alone_after_errors():
                self._replace(self._folder / str(self._own), text)

    def _replace(self, file: Path, text: str) -> None:
        fresh = file.with_name(f"new-{self._own}")
        fresh.write_text(text)
        fresh.replace(file)

    def is_sender(self) -> bool:
        """Return whether this rank is the lowest of the host whose report is fresh; asked once in each pause."""
        return not any(self._is_fresh(each) for each in self._ranks() if each < self._own)

    def _ranks(self) -> list[int]:
        if self._folder is None:
            return []
        names: list[str] = []
        with self._alone_after_errors():
            names = os.listdir(self._folder)
        return sorted(int(name) for name in names if name.isdecimal())

    def _is_fresh(self, other: int) -> bool:
        text = self._read(other)
        before, times = self._seen.get(other, ("", 0))
        self._seen[other] = text, times + 1 if text == before else 0
        return self._seen[other][1] <= _SILENT_LOOKS

    def _read(self, other: int) -> str:
        try:
            return (self._folder / str(other)).read_text() if self._folder is not None else ""
        except OSError:  # it has just left
            return ""

    def send(self, store: Store, keys: str) -> None:
        """Write the reports of all ranks of the host as one value into the store."""
        if self._number == 0:
            self._number = self._join(store, keys)
        others = {each: text for each in self._ranks() if each != self._own and (text := self._read(each))}
        store.set(f"{keys}/host/{self._number}", joined_reports({**others, self._own: self._text}))

    def _join(self, store: Store, keys: str) -> int:
        """Return the number of the host, from its first sender on."""
        number = int(store.add(f"{keys}/hosts", 1))
        if self._folder is not None:
            with self._alone_after_errors():
                file, own = self._folder / "host", self._folder / f"host-{self._own}"
                own.write_text(str(number))
                # Of two ranks that begin in the same moment the first one's number holds; the other's stays unused.
                with contextlib.suppress(FileExistsError):
                    os.link(own, file)
                own.unlink()
                return int(file.read_text())
        return number

    @property
    def is_first(self) -> bool:
        """Return whether this is the first host that has sent anything, as far as this rank knows."""
        return self._number == 1

    def leave(self) -> None:
        """Remove this rank's report, and the folder with the last one."""
        folder, self._folder = self._folder, None
        if folder is not None:
            with contextlib.suppress(OSError):
                (folder / str(self._own)).unlink(missing_ok=True)
                if os.listdir(folder) in ([], ["host"]):
                    (folder / "host").unlink(missing_ok=True)
                    folder.rmdir()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _entered_folder(folder: Path) -> int:
    """Make a folder, and share its lock with others inside; return the descriptor that holds it until it is closed."""
    import fcntl

    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if os.path.samestat(os.fstat(descriptor), folder.stat()):
                return descriptor
        except FileNotFoundError:
            pass  # removed as abandoned, between its making and its lock
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _remove_abandoned(folder: Path) -> None:
    """Remove the reports of jobs that were killed, whose locks the kernel has dropped."""
    import fcntl

    for each in folder.glob("meshwright-watch-*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(each, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(each)
            finally:
                os.close(descriptor)


def read_hosts(store: Store, keys: str) -> dict[int, Report]:
    """Return the latest report of every rank whose host has sent any."""
    names = [f"{keys}/host/{number}" for number in range(1, int(store.add(f"{keys}/hosts", 0)) + 1)]
    if not names or not store.check(names):
        names = [name for name in names if store.check([name])]
    return read_joined(store.multi_get(names)) if names else {}


def _intervals(numbers: Sequence[int]) -> list[list[int]]:
    """Return sorted numbers as closed intervals."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return found


@dataclass
class _Diagnosis:
    """The state of this rank's part in finding out about one hang."""

    number: int  # of the verdict that is looked for
    turn: int  # in reading the reports
    looks: int = 0
    before: dict[int, Report] | None = None
    num_reads: int = 0


# --- A thread on every rank that reports where its rank is.


def say(text: str) -> None:
    """Print one line on stderr."""
    print(f"meshwright: {text}", file=sys.stderr, flush=True)


class Watch:
    """A context that names the rank at fault when steps stop coming, and one that slows the others down.

    It needs no collectives: a thread on each rank reports where its training thread is, by way of its host and the
    ranks' store, and the reports are read when steps stop: see [Note: watching thousands of ranks]. One rank reports; a
    rank at fault shows its own stack too. Nothing is ended: that is for the backend's timeout, or for ``tell``, to
    decide.

    The thread that enters is the one watched. Watching begins at the second :meth:`beat`, or at :meth:`warm`, as the
    first step may compile.

    Args:
        limit_s: Seconds without a beat that make a hang. It is reported within 1.5 times as many.
        tell: Called with what was found, on one rank.
        hung: Called after that, on the same rank, with the text and the ranks at fault, where steps have stopped.
        restart_s: Seconds that going back would cost, where hangs are to be told before the limit, on all ranks; see
            [Note: hangs noticed early].

    Raises:
        ConfigError: When ``limit_s`` is not above 0.
    """

    def __init__(
        self,
        limit_s: float,
        tell: Callable[[str], None] = say,
        hung: Callable[[str, Sequence[int]], None] | None = None,
        *,
        restart_s: float | None = None,
    ) -> None:
        if limit_s <= 0:
            raise ConfigError(
                "limit_s is not a duration", expected="seconds above 0", got=repr(limit_s), fix="give the longest step"
            )
        self._limit_s, self._tell, self._hung = limit_s, tell, hung
        # Between two reports.
        self._pause_s = min(limit_s / _LOOKS_PER_LIMIT, 2.0 if restart_s is None else _EARLY_PAUSE_S)
        self._restart_s, self._latest_s, self._early_limit_s = restart_s, deque[float](maxlen=_USUAL_OF), limit_s
        self._used_s = 0.0, 0.0  # when the process had used how much of its processors
        self._over = threading.Event()
        self._rank, self._size, self._watched = 0, 1, 0
        self._store: Store | None = None
        self._host: HostReports | None = None
        self._step, self._beat_s, self._paused = 0, 0.0, False
        self._unwatched = 1  # steps at the beginning
        self._samples = self._waits = 0  # where the thread was, of late
        self._device_share = 0.0  # of the time in which the device was in collectives
        self._number = 0  # of reports
        self._diagnosis: _Diagnosis | None = None
        self._turn = "", 0
        self._reported_step = -1  # a hang is reported once
        self._reported_slow: set[int] = set()
        self._is_sender = True
        self._recorder = FlightRecorder()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._watched = threading.get_ident()
        # The thread may outlive the process group.
        self._rank, self._size = rank(), world_size()
        self._keys = f"meshwright/watch/{next(_entered)}"
        # A connection of its own: a read that waits would hold up everything else that uses the store.
        if self._size > 1:
            self._store = default_store().clone()  # type: ignore[attr-defined]
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
        now_s = time.monotonic()
        if self._restart_s is not None and self._step > 1:
            self._latest_s.append(now_s - self._beat_s)
            if len(self._latest_s) == _USUAL_OF:
                later_s = max(self._restart_s, _LEAST_EARLY_S)
                self._early_limit_s = min(later_s + _EARLY_STEPS * statistics.median(self._latest_s), self._limit_s)
        self._step += 1
        self._beat_s = now_s

    def warm(self) -> None:
        """Mark that the first step has been computed: what follows it within the step is watched."""
        self._unwatched, self._beat_s = 0, time.monotonic()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend watching, for a checkpoint or an evaluation, but for ranks that give no sign of life."""
        self._beat_s, self._paused = time.monotonic(), True
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
                self._report_lost_store(error)
                self._over.wait(self._pause_s)
        if self._host is not None:
            self._host.leave()

    def _report_lost_store(self, error: RuntimeError) -> None:
        """Tell, on one rank of each host, that a hang cannot be explained without the store."""
        if self._is_news() and not self._paused and not self._over.is_set():
            self._reported_step = self._step
            if self._is_sender:
                cause = f"which rank 0 or the launcher keeps: {str(error).splitlines()[0]}"
                self._tell(f"{self._hang_text()} rank {self._rank} cannot reach the store of the ranks, {cause}")
                if self._hung is not None:
                    self._hung(cause, ())

    def _sample_for(self, duration_s: float) -> None:
        end_s = time.monotonic() + duration_s
        while time.monotonic() < end_s and not self._over.wait(min(_SAMPLE_S, duration_s)):
            if self._step > self._unwatched and not self._paused:
                # Halve the count, so that older samples fade.
                if self._samples == 2 * _SAMPLES:
                    self._samples, self._waits = _SAMPLES, self._waits // 2
                self._samples += 1
                self._waits += bool(place_of(self._watched).operation)

    def _is_late(self, limits: float = 1.0) -> bool:
        limit_s = self._limit_s if self._paused else self._early_limit_s
        return self._step > self._unwatched and self._late_s > limits * limit_s

    @property
    def _late_s(self) -> float:
        return time.monotonic() - self._beat_s

    def _is_news(self) -> bool:
        return self._is_late() and self._reported_step != self._step

    def _look(self) -> None:
        self._publish()
        if self._is_news():
            self._diagnose()
        else:
            self._diagnosis = None
            if self._store is not None and self._number % _SLOW_LOOKS == 0:
                self._device_share = self._recorder.wait_share(self._pause_s) or 0.0
                if self._is_sender and self._host is not None and self._host.is_first and self._samples >= _SAMPLES:
                    self._find_slow(self._store)

    def _publish(self) -> None:
        self._number += 1
        place = place_of(self._watched)
        share = max(self._waits / max(self._samples, 1), self._device_share)
        # In time for the reports that are read when the limit has passed.
        known: Any = self._recorder.collectives(self._pause_s) if self._store is not None and self._is_late(0.5) else ()
        self._own = Report(self._number, self._step, *place, share, *known)
        before, used = self._used_s, (time.monotonic(), time.process_time())
        self._own = replace(self._own, busy=used[1] - before[1] > _BUSY_SHARE * (used[0] - before[0]))
        self._used_s = used
        if self._store is not None:
            if self._host is None:
                name = self._store.compare_set(f"{self._keys}/name", "", uuid.uuid4().hex).decode()
                self._host = HostReports(name, self._rank)
            self._host.write(self._own.to_json())
            self._is_sender = self._host.is_sender()
            if self._is_sender:
                self._host.send(self._store, self._keys)

    def _diagnose(self) -> None:
        """Go on finding out about a hang, by as much as one look allows; see [Note: watching thousands of ranks].

        This rank keeps reporting between two looks: others would take it for silent.
        """
        if self._store is None:
            if self._late_s > self._limit_s and not self._paused:
                self._conclude(str(found := verdict({self._rank: self._own}, [])), found.guilty)
            return
        state = self._diagnosis
        if state is None:
            latest = int(self._store.get(f"{self._keys}/latest")) if self._store.check([f"{self._keys}/latest"]) else 0
            if latest and self._follow(self._store, latest):
                return
            state = self._diagnosis = _Diagnosis(latest + 1, self._take_turn(self._store, latest + 1))
        if self._store.check([self._verdict_key(state.number)]):
            self._diagnosis = None  # another turn if the verdict is of another hang
            self._follow(self._store, state.number)
            return
        if state.looks >= (state.turn - 1) * _TURN_LOOKS:
            self._read_in_turn(self._store, state)
        state.looks += 1

    def _take_turn(self, store: Store, number: int) -> int:
        """Return this rank's place among those that are late in the same step; 1 comes first."""
        # Others may be in the next step. Turns of a step that has ended after all must not delay a later hang.
        key = f"{self._keys}/turn/{number}/{self._step}"
        if self._turn[0] != key:
            self._turn = key, int(store.add(key, 1))
        return self._turn[1]

    def _read_in_turn(self, store: Store, state: _Diagnosis) -> None:
        """Read all reports until each is new, or late enough to count as silent; then publish the verdict."""
        now = read_hosts(store, self._keys) | {self._rank: self._own}
        state.num_reads += 1
        if state.before is None:
            state.before = now
            return
        silent = [each for each in range(self._size) if each not in now or now[each] == state.before.get(each)]
        silent = [each for each in silent if each != self._rank]
        if silent and state.num_reads <= _SILENT_LOOKS:
            return
        if self._paused and not silent:  # a checkpoint may take as long as it likes
            self._beat_s, self._diagnosis = time.monotonic(), None
            return
        found = verdict(now, silent)
        if self._late_s <= self._limit_s:  # [Note: hangs noticed early]
            at_work = [each for each in found.guilty if each not in silent and now[each].busy]
            if not found.guilty or at_work:
                state.before, state.num_reads = None, 0
                return
        if self._is_news() and not self._over.is_set():
            self._publish_verdict(store, state.number, found)

    def _publish_verdict(self, store: Store, number: int, found: Verdict) -> None:
        ranks_at: dict[int, list[int]] = {}
        for each, report in sorted(found.reports.items()):
            ranks_at.setdefault(report.step, []).append(each)
        steps = {str(step): _intervals(ranks) for step, ranks in ranks_at.items()}
        store.set(self._verdict_key(number), json.dumps({"guilty": found.guilty, "steps": steps}))
        store.set(f"{self._keys}/latest", str(number))
        # Whoever took over from this rank may have told it; the step of the last rank tells hangs apart.
        is_first = store.add(f"{self._keys}/told/{min(ranks_at)}", 1) == 1
        self._conclude(str(found) if is_first else "", found.guilty, self._stacks_key(number))

    def _verdict_key(self, number: int) -> str:
        return f"{self._keys}/verdict/{number}"

    def _follow(self, store: Store, number: int) -> bool:
        """Take over a verdict of another rank if it is of this hang: this rank was in the same step then."""
        found = json.loads(store.get(self._verdict_key(number)))
        intervals = found["steps"].get(str(self._step), [])
        if not any(first <= self._rank <= last for first, last in intervals):
            return False
        self._conclude("", found["guilty"], self._stacks_key(number))
        return True

    def _stacks_key(self, number: int) -> str:
        return f"{self._keys}/stacks/{number}"

    def _conclude(self, text: str, guilty: Sequence[int], stacks: str = "") -> None:
        """Tell what was found, and where this rank is if it is at fault; ``stacks`` counts the ranks that have."""
        self._reported_step, self._diagnosis = self._step, None
        if self._rank in guilty and self._size > 1:
            self._tell(f"rank {self._rank} holds up the others; it is at\n{stack_of(self._watched)}")
            if self._store is not None:
                with contextlib.suppress(RuntimeError):  # what follows must be told without the store, too
                    self._store.add(stacks, 1)
        if text:
            self._tell(f"{self._hang_text()} {text}")
            if self._hung is not None:
                self._wait_for_stacks(stacks, len(guilty))
                self._hung(text, guilty)

    def _wait_for_stacks(self, key: str, num_guilty: int) -> None:
        """Wait a little until the ranks at fault have shown where they are; one that is gone never does."""
        end_s = time.monotonic() + _STACKS_S
        with contextlib.suppress(RuntimeError):
            while self._store is not None and time.monotonic() < end_s and self._store.add(key, 0) < num_guilty:
                time.sleep(_SAMPLE_S)

    def _hang_text(self) -> str:
        limit_s = self._limit_s if self._paused else min(self._early_limit_s, self._limit_s)
        return f"no step has ended for {limit_s:.3g} s:"

    def _find_slow(self, store: Store) -> None:
        shares = {each: report.wait_share for each, report in read_hosts(store, self._keys).items()}
        slow = set(slow_ranks(shares)) if len(shares) == self._size else set()
        for each in sorted(slow - self._reported_slow):
            others = statistics.median(share for other, share in shares.items() if other != each)
            waits = f"it waits {shares[each]:.0%} of its time in collectives, the others {others:.0%}"
            self._tell(f"rank {each} is slow, and the others wait for it: {waits}")
        self._reported_slow |= slow
