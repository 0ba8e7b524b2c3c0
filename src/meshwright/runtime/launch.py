"""Launch local ranks over a store that only this machine can reach: through torchrun's machinery, or a fork server."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from meshwright.errors import LaunchError
from meshwright.runtime.device import host_share_bytes
from meshwright.runtime.rendezvous import separate_tasks_warning
from meshwright.runtime.torch_internals.c10d import Store, TCPStore

_LOOPBACK_BACKEND = "meshwright-loopback"
_ADDRESS = "127.0.0.1"
_STORE_TIMEOUT = timedelta(minutes=5)


def loopback_store() -> tuple[Store, int]:
    """Return a TCPStore that listens on 127.0.0.1 only, and its port.

    torch's own store listens on every interface, and whoever reaches it can write there what ranks then unpickle.
    """
    with socket.socket() as listening:
        listening.bind((_ADDRESS, 0))
        listening.listen(1024)
        port = listening.getsockname()[1]
        store = TCPStore(
            _ADDRESS,
            port,
            is_master=True,
            timeout=_STORE_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
    return store, port


class LoopbackRendezvous(RendezvousHandler):
    """torchrun's rendezvous for one machine.

    Every attempt gets its own store, so that ranks do not find keys of ranks that have died (pytorch#135712).
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._closed = False

    def get_backend(self) -> str:
        """Return the backend's name."""
        return _LOOPBACK_BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Return True: ranks use this store, too, instead of making one."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Make the store of the next attempt."""
        self._store, port = loopback_store()
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(_ADDRESS, port))

    def is_closed(self) -> bool:
        """Return whether no attempt will follow."""
        return self._closed

    def set_closed(self) -> None:
        """Announce that no attempt will follow."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Return 0: no other machine ever joins."""
        return 0

    def get_run_id(self) -> str:
        """Return the name of the run."""
        return self._run_id

    def shutdown(self) -> bool:
        """Return True: nothing but the store needs closing, which goes with the process."""
        return True


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return LoopbackRendezvous(parameters.run_id)


rendezvous_handler_registry.register(_LOOPBACK_BACKEND, _create)


# --- Launching: when one rank dies, all end, and the caller learns why.

_MONITOR_INTERVAL_S = 0.1
_RANK_BYTES = 2**28  # of memory: an interpreter with torch, before it holds anything


def inside_launcher() -> bool:
    """Return whether a launcher (torchrun, torch.distributed.launch) has already made this process a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def restart_count() -> int:
    """Return the number of restarts by the launcher after failures; 0 in the first attempt."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def restarts_left() -> bool:
    """Return whether the launcher would start the ranks again if one failed now."""
    return restart_count() < int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


def launch_id() -> str | None:
    """Return an id that all attempts of one launch share, and no other launch; None without one.

    It is torchrun's ``--rdzv-id``, which ``--standalone`` draws at random. :func:`restart_count` cannot tell a machine
    that has joined a run under way from one that begins it.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return None if name in ("", "none") else name


def stay_on_this_machine() -> None:
    """Let gloo listen on the loopback interface alone, in this process and those it starts.

    No other machine has to reach its ranks; by itself gloo listens where the host's name leads to.
    """
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def launch(arguments: Sequence[str], nproc: int) -> int:
    """Run ``python ARGUMENTS…`` as ``nproc`` local ranks and wait for them.

    The ranks write to this terminal. When one fails, the others are ended within seconds. They meet over the loopback
    interface only: other machines cannot reach them.

    Args:
        arguments: Command line after the interpreter, such as ``["-m", "package", …]``.
        nproc: Number of processes.

    Returns:
        0, or the exit status of the rank that failed first (1 where a signal ended it, 130 on Ctrl-C).

    Raises:
        LaunchError: Where so many interpreters would not fit into this machine's memory.
    """
    _check_room(nproc)
    _prepare_environment(nproc)
    # The rank that failed has said why; the launcher's own account of it would bury that.
    for module in ("multiprocessing.api", "agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic.{module}").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=f"meshwright-{uuid.uuid4()}",
        rdzv_backend=_LOOPBACK_BACKEND,
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=_MONITOR_INTERVAL_S,
    )
    try:
        elastic_launch(config, sys.executable)(*arguments)
    except ChildFailedError as failure:
        failed_rank, cause = failure.get_first_failure()
        # A signal ended it, most likely out of memory, so no rank has said why.
        if cause.exitcode < 0:
            print(f"meshwright: rank {failed_rank} was ended by {cause.signal_name()}", file=sys.stderr, flush=True)
        return max(cause.exitcode, 1)
    except SignalException as stopped:
        return 130 if stopped.sigval == signal.SIGINT else 128 + stopped.sigval
    return 0


def _prepare_environment(nproc: int) -> None:
    """Set the variables that all ranks of this machine inherit, and warn of processes that would train alone."""
    if warning := separate_tasks_warning(os.environ):
        print(f"meshwright: {warning}", file=sys.stderr, flush=True)
    # Without a limit every rank starts a thread per core and they fight over the cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // nproc, 1)))
    stay_on_this_machine()


def _check_room(nproc: int) -> None:
    """Refuse more processes than fit into memory, before any is started."""
    most = host_share_bytes(1) // _RANK_BYTES
    if nproc > max(most, 1):
        raise LaunchError(
            "There are more processes than this machine has memory for",
            expected=f"at most {most}: each takes {_RANK_BYTES // 2**20} MiB before it trains anything",
            got=str(nproc),
            fix="start fewer processes",
        )


# --- [Note: fast restarts]
#
# After a failure no process of the attempt goes on: process groups, and what a sharded model keeps
# of them, cannot be taken over into a new world. What would take long is done once instead: a server that has imported
# torch and the program forks the ranks of every attempt, each in milliseconds, and the ranks take their state from the
# snapshots in their host's memory. The server ends with the launcher, however that ends, and the ranks with the server.

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
    _check_room(nproc)
    _prepare_environment(nproc)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["meshwright.runtime.launch", *preload])
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


if "multiprocessing.forkserver" in " ".join(sys.orig_argv) and multiprocessing.parent_process() is None:
    end_with_parent()  # this is the server, which nobody needs any more when its launcher is gone
