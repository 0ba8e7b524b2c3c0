"""Launch local ranks through torchrun's own machinery, over a store that only this machine can reach."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Sequence
from datetime import timedelta

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
    check_room(nproc)
    prepare_environment(nproc)
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


def prepare_environment(nproc: int) -> None:
    """Set the variables that all ranks of this machine inherit, and warn of processes that would train alone."""
    if warning := separate_tasks_warning(os.environ):
        print(f"meshwright: {warning}", file=sys.stderr, flush=True)
    # Without a limit every rank starts a thread per core and they fight over the cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // nproc, 1)))
    stay_on_this_machine()


def check_room(nproc: int) -> None:
    """Refuse more processes than fit into memory, before any is started."""
    most = host_share_bytes(1) // _RANK_BYTES
    if nproc > max(most, 1):
        raise LaunchError(
            "There are more processes than this machine has memory for",
            expected=f"at most {most}: each takes {_RANK_BYTES // 2**20} MiB before it trains anything",
            got=str(nproc),
            fix="start fewer processes",
        )
