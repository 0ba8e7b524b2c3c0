"""Run local ranks from a process that has imported everything, and start them anew within a second when one fails.

[Note: fast restarts] After a failure no process of the attempt goes on: process groups, and what a sharded model keeps
of them, cannot be taken over into a new world. What would take long is done once instead: a server that has imported
torch and the program forks the ranks of every attempt, each in milliseconds, and the ranks take their state from the
snapshots in their host's memory. The server ends with the launcher, however that ends, and the ranks with the server.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import runpy
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from meshwright.runtime.launch import check_room, loopback_store, prepare_environment

HUNG, NOT_FINITE = 75, 76
"""Statuses with which ranks end that have told already why: a rank hangs; a step is not finite."""

_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
_FAREWELL_S = 0.3  # the ranks that lost a peer say so, and end
_GRACE_S = 30.0  # to save a checkpoint after a stop signal, as torchrun gives it
_STOPS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class Failure:
    """The first rank that failed in an attempt."""

    attempt: int
    rank: int
    status: int
    """Exit status; negative: the signal that ended it."""
    time_s: float
    out_of_memory: bool
    """Whether the kernel has ended a process of this control group for its memory meanwhile."""

    @property
    def signal_name(self) -> str:
        """Return the name of the signal that ended it; empty for none."""
        if self.status >= 0:
            return ""
        with contextlib.suppress(ValueError):
            return signal.Signals(-self.status).name
        return f"signal {-self.status}"


def end_with_parent() -> None:
    """Let the kernel end this process when its parent ends, whatever ends that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def launch_restarting(
    arguments: Sequence[str],
    nproc: int,
    max_restarts: int,
    tell: Callable[[Failure], None],
    preload: Sequence[str] = (),
) -> int:
    """Run ``python -m PACKAGE …`` as ``nproc`` local ranks, and all of them again when one fails.

    Args:
        arguments: Name of the package, and its command line.
        nproc: Number of processes.
        max_restarts: Number of times that all ranks are started again.
        tell: Called with each failure, while the ranks end.
        preload: Modules that ranks need, imported once.

    Returns:
        0, or the exit status of the rank that failed first in the last attempt (1 where a signal ended it, 130 on
        Ctrl-C).

    Raises:
        LaunchError: Where so many interpreters would not fit into this machine's memory.
    """
    check_room(nproc)
    prepare_environment(nproc)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["meshwright.runtime.fork_server", *preload])
    launch_id, status = f"meshwright-{uuid.uuid4()}", 0
    with _StopRequests() as stops:
        for attempt in range(max_restarts + 1):
            store, port = loopback_store()
            given = _environment(nproc, port, attempt, max_restarts, launch_id)
            ranks = [context.Process(target=_be_rank, args=(given(rank), list(arguments))) for rank in range(nproc)]
            memory_kills = _memory_kills()
            try:
                for each in ranks:
                    each.start()
                failed = _first_failure(ranks, stops)
                if failed is None:
                    return stops.status(max((each.exitcode or 0 for each in ranks), default=0))
                status = ranks[failed].exitcode or 0
                tell(Failure(attempt, failed, status, time.time(), _memory_kills() > memory_kills))
                _first_failure(ranks, stops, patience_s=_FAREWELL_S if status not in (HUNG, NOT_FINITE) else 0.0)
            finally:
                _end(ranks)
            del store
            if stops.received or status in (128 + each for each in _STOPS):
                break
    return stops.status(max(status, 1))


def _environment(
    nproc: int, port: int, attempt: int, max_restarts: int, launch_id: str
) -> Callable[[int], dict[str, str]]:
    """Return the variables of a rank, as torchrun sets them."""
    everywhere = {
        "WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(attempt), "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RUN_ID": launch_id,
    }  # fmt: skip
    return lambda rank: {**everywhere, "RANK": str(rank), "LOCAL_RANK": str(rank)}


def _be_rank(environment: Mapping[str, str], arguments: list[str]) -> None:
    """Run the program as one rank; in a new process."""
    end_with_parent()
    os.environ.update(environment)
    sys.argv = list(arguments)
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


def _first_failure(ranks: Sequence[BaseProcess], stops: _StopRequests, patience_s: float | None = None) -> int | None:
    """Wait until all ranks have ended, or the first with an error; return it, None if there is none.

    Args:
        ranks: The processes.
        stops: A signal to this process is passed on; ranks that have not ended in time afterwards are left.
        patience_s: Seconds to wait for all of them whatever they end with; None: as long as it takes.
    """
    deadline_s = None if patience_s is None else time.monotonic() + patience_s
    while running := [each for each in ranks if each.exitcode is None]:
        if stops.pass_on(running):
            deadline_s = time.monotonic() + _GRACE_S
        if deadline_s is not None and time.monotonic() >= deadline_s:
            return None
        wait([each.sentinel for each in running], timeout=0.05 if deadline_s is not None or stops.received else 0.2)
        failed = [number for number, each in enumerate(ranks) if each.exitcode]
        if failed and patience_s is None and not stops.received:
            # Of several that have ended meanwhile, one that a signal ended is the cause, not a rank that lost its peer.
            return min(failed, key=lambda number: (ranks[number].exitcode or 0) > 0)
    return None


def _end(ranks: Sequence[BaseProcess]) -> None:
    for each in ranks:
        if each.pid is not None and each.exitcode is None:
            each.kill()
    for each in ranks:
        if each.pid is not None:
            each.join()


class _StopRequests:
    """Pass SIGTERM and Ctrl-C on to the ranks, which save and leave."""

    def __init__(self) -> None:
        self.received = 0
        self._passed_on = False

    def __enter__(self) -> _StopRequests:
        self._before = {each: signal.signal(each, self._receive) for each in _STOPS}
        return self

    def __exit__(self, *_: object) -> None:
        for each, before in self._before.items():
            signal.signal(each, before)

    def _receive(self, number: int, _: FrameType | None) -> None:
        self.received = self.received or number

    def pass_on(self, running: Sequence[BaseProcess]) -> bool:
        """Send a signal that came on to the ranks; return whether it did just now."""
        if not self.received or self._passed_on:
            return False
        self._passed_on = True
        for each in running:
            with contextlib.suppress(OSError):
                if each.pid is not None:
                    os.kill(each.pid, self.received)
        return True

    def status(self, otherwise: int) -> int:
        """Return the exit status: of the signal that came, or another."""
        return 128 + self.received if self.received else otherwise


def _memory_kills() -> int:
    """Return how many processes of this control group the kernel has ended for their memory; 0 where it is unknown."""
    for path in _memory_events():
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                name, _, number = line.partition(" ")
                if name == "oom_kill":
                    return int(number)
    return 0


def _memory_events() -> Iterator[Path]:
    root = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            yield root / line.rpartition(":")[2].lstrip("/") / "memory.events"
    yield root / "memory.events"
