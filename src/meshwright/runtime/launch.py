"""Launch local ranks over a store that only this machine can reach. A server imports everything once, and forks them.

[Note: forked ranks]

A server that has imported torch and the program forks the ranks, each in milliseconds: eight ranks import once, not
eight times, what a compiled model needs included. It forks before anything has started a thread or touched a GPU. Where
forking is not safe (other systems than Linux), every rank is a new interpreter.

After a failure no process of the attempt goes on: process groups, and what a sharded model keeps of them, cannot be
taken over into a new world. The server forks the ranks of the next attempt, and these take their state from the
snapshots in their host's memory. The server ends with the launcher, however that ends, and the ranks with the server.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from meshwright.errors import LaunchError
from meshwright.runtime.torch_internals.interpreter import run_exit_functions

if TYPE_CHECKING:
    from meshwright.runtime.torch_internals.c10d import Store

_ADDRESS = "127.0.0.1"
_STORE_TIMEOUT = timedelta(minutes=5)


def loopback_store() -> tuple[Store, int]:
    """Return a TCPStore that listens on 127.0.0.1 only, and its port.

    torch's own store listens on every interface, and whoever reaches it can write there what ranks then unpickle.
    """
    from meshwright.runtime.torch_internals.c10d import TCPStore

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


# --- Launching: when one rank dies, all end, and the caller learns why.

_RANK_BYTES = 2**28  # of memory: an interpreter with torch, before it holds anything
_START_METHOD = "forkserver" if sys.platform == "linux" else "spawn"


def inside_launcher() -> bool:
    """Return whether a launcher (torchrun, torch.distributed.launch) has already made this process a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def restart_count() -> int:
    """Return the number of restarts by the launcher after failures; 0 in the first attempt."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def restarts_left(share: float = 1.0) -> bool:
    """Return whether the launcher would start the ranks again if one failed now.

    Args:
        share: Of the restarts, those that may be used up.
    """
    return restart_count() < share * int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


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


def launch(
    arguments: Sequence[str],
    nproc: int,
    *,
    max_restarts: int = 0,
    tell: Callable[[Failure], None] | None = None,
    again: Callable[[Failure], Attempt | None] | None = None,
    preload: Sequence[str] = (),
) -> int:
    """Run ``python ARGUMENTS…`` as ``nproc`` local ranks and wait for them; all of them again when one fails.

    The ranks write to this terminal. When one fails, the others are ended within seconds. They meet over the loopback
    interface only: other machines cannot reach them. On Linux they are forked: see [Note: forked ranks].

    Args:
        arguments: Command line after the interpreter: ``["-m", "package", …]`` or ``["script.py", …]``.
        nproc: Number of processes.
        max_restarts: Number of times that all ranks are started again.
        tell: Called with each failure, while the ranks end; by default a line names the signal that has ended a rank.
        again: Called with each failure that a restart follows, once the ranks have ended; returns what is started
            then, such as fewer ranks. None, or returning None: the same again.
        preload: Modules that ranks need, imported once.

    Returns:
        0, or the exit status of the rank that failed first in the last attempt (1 where a signal ended it, 130 on
        Ctrl-C).

    Raises:
        LaunchError: Where so many interpreters would not fit into this machine's memory.
    """
    start_server(nproc, preload)
    process = multiprocessing.get_context(_START_METHOD).Process  # type: ignore[attr-defined]
    launch_id, status, now = f"meshwright-{uuid.uuid4()}", 0, Attempt(arguments, nproc)
    with _StopRequests() as stops:
        for attempt in range(max_restarts + 1):
            store, port = loopback_store()
            given = _environment(now, port, attempt, max_restarts, launch_id)
            ranks = [process(target=_be_rank, args=(given(rank), list(now.arguments))) for rank in range(now.nproc)]
            memory_kills = _memory_kills()
            try:
                for each in ranks:
                    each.start()
                failed = _first_failure(ranks, stops)
                if failed is None:
                    return stops.status(max((each.exitcode or 0 for each in ranks), default=0))
                status = ranks[failed].exitcode or 0
                failure = Failure(attempt, failed, status, time.time(), _memory_kills() > memory_kills)
                (tell or _tell_signal)(failure)
                _farewell(ranks, stops, failure, is_last=attempt == max_restarts)
            except EOFError:  # a stop signal to all processes has ended the server, which was still starting
                if not stops.received:
                    raise
            finally:
                _end(ranks)
            del store
            if stops.received or status in (128 + each for each in _STOPS):
                break
            if again is not None and attempt < max_restarts:
                now = again(failure) or now
    return stops.status(max(status, 1))


def start_server(nproc: int, preload: Sequence[str] = ()) -> None:
    """Start what forks the ranks of :func:`launch`; it imports while this process goes on.

    Args:
        nproc: Number of ranks to come.
        preload: Modules that ranks need, the same ones as :func:`launch` gets.

    Raises:
        LaunchError: Where so many interpreters would not fit into this machine's memory.
    """
    _check_room(nproc)
    _prepare_environment(nproc)
    if _START_METHOD == "forkserver":
        # The first one lets the server end with this process, before the others take seconds.
        multiprocessing.get_context(_START_METHOD).set_forkserver_preload([__name__, "torch", *preload])
        forkserver.ensure_running()


@functools.cache
def _prepare_environment(nproc: int) -> None:
    """Set the variables that all ranks of this machine inherit, and warn once of processes that would train alone."""
    from meshwright.runtime.rendezvous import separate_tasks_warning

    if warning := separate_tasks_warning(os.environ):
        print(f"meshwright: {warning}", file=sys.stderr, flush=True)
    # Without a limit every rank starts a thread per core and they fight over the cores.
    # What the server imports may ask whether there are GPUs; an answer from CUDA itself would not let it fork.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // nproc, 1)))
    stay_on_this_machine()


def _check_room(nproc: int) -> None:
    """Refuse more processes than fit into memory, before any is started."""
    from meshwright.runtime.device import host_share_bytes

    most = host_share_bytes(1) // _RANK_BYTES
    if nproc > max(most, 1):
        raise LaunchError(
            "There are more processes than this machine has memory for",
            expected=f"at most {most}: each takes {_RANK_BYTES // 2**20} MiB before it trains anything",
            got=str(nproc),
            fix="start fewer processes",
        )


# --- One attempt: its failure, its ranks, and their end.

HUNG, NOT_FINITE = 75, 76
"""Statuses with which ranks end that have told already why: a rank hangs; a step is not finite."""

_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
_FAREWELL_S = 0.3  # the ranks that lost a peer say so, and end
_POLL_S = 0.5
_GRACE_S = 30.0  # to save a checkpoint after a stop signal, as torchrun gives it
_STOPS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class Attempt:
    """The command line and the number of the ranks of one attempt."""

    arguments: Sequence[str]
    nproc: int
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables beside those that make a process a rank."""


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


def _tell_signal(failure: Failure) -> None:
    """Name a signal that has ended a rank, most likely out of memory: no rank has said why."""
    if failure.signal_name:
        text = f"rank {failure.rank} was ended by {failure.signal_name}"
        print(f"meshwright: {text}", file=sys.stderr, flush=True)


def _environment(
    now: Attempt, port: int, attempt: int, max_restarts: int, launch_id: str
) -> Callable[[int], dict[str, str]]:
    """Return the variables of a rank, as torchrun sets them."""
    everywhere = {
        **now.environment,
        "WORLD_SIZE": str(now.nproc), "LOCAL_WORLD_SIZE": str(now.nproc), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(attempt), "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RUN_ID": launch_id,
    }  # fmt: skip
    return lambda rank: {**everywhere, "RANK": str(rank), "LOCAL_RANK": str(rank)}


def _be_rank(environment: Mapping[str, str], arguments: list[str]) -> None:
    """Run the program as one rank; in a new process."""
    end_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which the server ignores
    if sys.platform != "linux":
        threading.Thread(target=_end_when_orphaned, args=(os.getppid(),), daemon=True).start()
    os.environ.update(environment)
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:
        run_exit_functions()  # of trackers and users; processes of multiprocessing skip them


def _end_when_orphaned(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_POLL_S)
    os._exit(1)


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


def _farewell(ranks: Sequence[BaseProcess], stops: _StopRequests, failure: Failure, *, is_last: bool) -> None:
    """Give the ranks that are left time to end: to close files and trackers where no attempt follows."""
    if failure.status in (HUNG, NOT_FINITE):
        return
    if is_last:
        _signal([each for each in ranks if each.exitcode is None], signal.SIGTERM)
    _first_failure(ranks, stops, patience_s=_GRACE_S if is_last else _FAREWELL_S)


def _signal(ranks: Sequence[BaseProcess], number: int) -> None:
    for each in ranks:
        with contextlib.suppress(OSError):
            if each.pid is not None:
                os.kill(each.pid, number)


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
        _signal(running, self.received)
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
    # This is the server, which nobody needs any more when its launcher is gone. Until then ranks end with it, and a
    # signal to all processes of a job, such as Slurm's, asks them to save.
    end_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
