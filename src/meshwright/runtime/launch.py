"""Starts local ranks through torchrun's own machinery: one dies, all end, and the caller learns why."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

_MONITOR_INTERVAL_S = 0.1


def inside_launcher() -> bool:
    """Whether a launcher (torchrun, torch.distributed.launch) has already made this process a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(arguments: Sequence[str], nproc: int) -> int:
    """Runs ``python ARGUMENTS…`` as ``nproc`` local ranks and waits for them.

    The ranks write to this terminal. When one fails the others are ended within seconds.

    Args:
        arguments: Command line after the interpreter, such as ``["-m", "package", …]``.
        nproc: Number of processes.

    Returns:
        0, or the exit status of the rank that failed first (1 where a signal ended it, 130 on Ctrl-C).
    """
    # Without a limit every rank starts a thread per core and they fight over the cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // nproc, 1)))
    # A store shared between restarts holds keys of dead ranks (pytorch#135712).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    # The rank that failed has said why; the launcher's own account of it would bury that.
    for module in ("multiprocessing.api", "agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic.{module}").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=f"meshwright-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=_MONITOR_INTERVAL_S,
    )
    try:
        elastic_launch(config, sys.executable)(*arguments)
    except ChildFailedError as failure:
        failed_rank, cause = failure.get_first_failure()
        if cause.exitcode < 0:  # ended by a signal, so nobody has said why: out of memory, most likely
            print(f"meshwright: rank {failed_rank} was ended by {cause.signal_name()}", file=sys.stderr, flush=True)
        return max(cause.exitcode, 1)
    except SignalException as stopped:
        return 130 if stopped.sigval == signal.SIGINT else 128 + stopped.sigval
    return 0
