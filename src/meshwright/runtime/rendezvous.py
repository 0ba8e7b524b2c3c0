"""Rendezvous: how ranks find each other in a launcher's store, attempt by attempt."""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from datetime import timedelta

from meshwright.errors import LaunchError, join_names
from meshwright.runtime.torch_internals.c10d import PrefixStore, Store, TCPStore

# Variables in which srun and MPI's launchers give a process its number and their count. A shell within a job's
# allocation, or a batch script, lacks the second.
_TASKS = {
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE"),
}


def separate_tasks_warning(environment: Mapping[str, str]) -> str | None:
    """Return a warning if several processes were started together and each is about to train alone, else None.

    Only the first of them warns. It is no error: somebody may want so many runs of one process.

    Args:
        environment: Environment of a process that no launcher has made a rank.
    """
    for launcher, (number, count) in _TASKS.items():
        tasks = environment.get(count, "")
        if tasks.isdecimal() and int(tasks) > 1 and environment.get(number) == "0":
            return (
                f"{launcher} has started {tasks} processes, and each of them trains alone: RANK and WORLD_SIZE are not "
                "set. To train together, let it start torchrun once per machine, or set torchrun's variables: see "
                "docs/clusters.md"
            )
    return None


# --- Restarted ranks meet in the launcher's store, apart from what earlier attempts have left there.
#
# torchrun hands all attempts the same store. If a rank of the second attempt reads an address that a rank of the first
# has written, it connects to a process that is gone, and hangs or fails (pytorch#135712). The number of the attempt
# does not tell attempts apart across machines, since every agent counts its own failures. So rank 0 chooses a name for
# the attempt, and every rank goes on only when rank 0 has answered to that very process.

_ROOM, _ATTEMPT, _HERE, _ANSWER = "meshwright/meeting", "attempt", "here", "answer"
_STORE_WAIT = timedelta(seconds=60)  # the launcher makes its store before any rank starts
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 1.0  # thousands of ranks must not keep the store busy


def launchers_store(environment: Mapping[str, str], timeout: timedelta) -> Store | None:
    """Return the store that the launcher keeps for all attempts; None if rank 0 makes one for each.

    Raises:
        LaunchError: When it is not where the environment says.
    """
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    try:
        store = TCPStore(address, port, None, False, min(timeout, _STORE_WAIT), wait_for_workers=False)
    except RuntimeError as error:
        raise LaunchError(
            "The launcher's store does not answer",
            expected=f"torchrun's store at MASTER_ADDR and MASTER_PORT, {address}:{port}",
            got=str(error),
            fix="leave MASTER_PORT as torchrun has set it: a program that changes it looks where nobody listens",
        ) from None
    store.set_timeout(timeout)
    return store


def meet(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return a store that only the ranks of this attempt use. Collective.

    Args:
        store: The one that they share with ranks of earlier attempts, which have ended.
        rank: Rank of this process.
        world_size: Ranks of this attempt.
        timeout: Time in which the others must come.

    Raises:
        LaunchError: When they do not.
    """
    room, me = PrefixStore(_ROOM, store), f"{os.getpid()}-{uuid.uuid4().hex}"
    deadline = time.monotonic() + timeout.total_seconds()
    attempt = _gather_ranks(room, me, world_size, deadline) if rank == 0 else _join(room, me, rank, deadline)
    return PrefixStore(f"meshwright/attempt-{attempt}", store)


def _gather_ranks(room: Store, name: str, world_size: int, deadline: float) -> str:
    """Name the attempt as rank 0, and answer the ranks that have joined it."""
    room.set(_ATTEMPT, name)
    keys = [f"{name}/{_HERE}/{rank}" for rank in range(1, world_size)]
    for _ in _tries(deadline):
        if room.check(keys):
            room.set(f"{name}/{_ANSWER}", json.dumps([room.get(key).decode() for key in keys]))
            return name
    absent = [str(index + 1) for index, key in enumerate(keys) if not room.check([key])]
    raise _too_late(f"no word of ranks {join_names(absent)}")


def _join(room: Store, me: str, rank: int, deadline: float) -> str:
    """Join the attempt as another rank: try whichever is named, until one answers to this very process."""
    joined = ""
    for _ in _tries(deadline):
        attempt = room.get(_ATTEMPT).decode() if room.check([_ATTEMPT]) else ""
        if attempt and attempt != joined:
            room.set(f"{attempt}/{_HERE}/{rank}", me)
            joined = attempt
        answer = f"{attempt}/{_ANSWER}"
        if attempt and room.check([answer]) and me in json.loads(room.get(answer)):
            return attempt
    raise _too_late("no answer of rank 0")


def _tries(deadline: float) -> Iterator[None]:
    """Yield until the deadline, with longer and longer pauses."""
    pause_s = _FIRST_PAUSE_S
    while time.monotonic() < deadline:
        yield
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.3, _LONGEST_PAUSE_S)


def _too_late(got: str) -> LaunchError:
    return LaunchError(
        "The ranks have not met",
        expected="all of them within the time limit",
        got=got,
        fix="see whether they were started, and what they have printed; timeout_s is the limit",
    )


def forget_meshes() -> None:
    """Clear DTensor's cache of operations, which takes an equal mesh of the next world for one of this world.

    Results would lie on a mesh whose process groups are gone, or whose names others have by now.
    """
    # It is slow to import: only where it is in use.
    if "torch.distributed.tensor" in sys.modules:
        from meshwright.runtime.torch_internals.dtensor import clear_sharding_cache

        clear_sharding_cache()
