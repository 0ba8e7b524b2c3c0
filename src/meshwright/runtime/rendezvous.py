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

# What srun and the launchers of MPI tell a process: its number, and how many there are. A shell within a job's
# allocation, or a batch script, has none of the second.
_TASKS = {
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE"),
}


def separate_tasks_warning(environment: Mapping[str, str]) -> str | None:
    """Return what to say where several processes were started together and each is about to train alone; None: nothing.

    One of them says it. It is no error: somebody may want so many runs of one process.

    Args:
        environment: Of a process that no launcher has made a rank.
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


# --- Where ranks that a launcher starts again meet: in its store, apart from what earlier attempts have left there.
#
# torchrun hands all attempts the same store. A rank of the second one that reads an address which a rank of the first
# has written there connects to a process that is gone, and hangs or fails (pytorch#135712). The number of the attempt
# does not tell them apart across machines, for every agent counts its own failures. So rank 0 chooses a name for the
# attempt, and every rank goes on only when rank 0 has answered to that very process.

_ROOM, _ATTEMPT, _HERE, _ANSWER = "meshwright/meeting", "attempt", "here", "answer"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 1.0  # thousands of ranks must not keep the store busy


def launchers_store(environment: Mapping[str, str], timeout: timedelta) -> Store | None:
    """Return the store that the launcher keeps for all attempts; None where it leaves that to rank 0 of each."""
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    return TCPStore(address, port, None, False, timeout, wait_for_workers=False)


def meet(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """A store that the ranks of this attempt have for themselves; every one of them calls it.

    Args:
        store: The one that they share with ranks of earlier attempts, which have ended.
        rank: Of this process.
        world_size: Ranks of this attempt.
        timeout: How long the others may take to come.

    Raises:
        LaunchError: When they do not.
    """
    room, me = PrefixStore(_ROOM, store), f"{os.getpid()}-{uuid.uuid4().hex}"
    deadline = time.monotonic() + timeout.total_seconds()
    attempt = _called_together(room, me, world_size, deadline) if rank == 0 else _found(room, me, rank, deadline)
    return PrefixStore(f"meshwright/attempt-{attempt}", store)


def _called_together(room: Store, name: str, world_size: int, deadline: float) -> str:
    """Rank 0: names the attempt, and answers those that have come to it."""
    room.set(_ATTEMPT, name)
    keys = [f"{name}/{_HERE}/{rank}" for rank in range(1, world_size)]
    for _ in _tries(deadline):
        if room.check(keys):
            room.set(f"{name}/{_ANSWER}", json.dumps([room.get(key).decode() for key in keys]))
            return name
    absent = [str(index + 1) for index, key in enumerate(keys) if not room.check([key])]
    raise _late(f"no word of ranks {join_names(absent)}")


def _found(room: Store, me: str, rank: int, deadline: float) -> str:
    """Return another rank: tries whatever attempt is named, until one answers to this process."""
    told = ""
    for _ in _tries(deadline):
        attempt = room.get(_ATTEMPT).decode() if room.check([_ATTEMPT]) else ""
        if attempt and attempt != told:
            room.set(f"{attempt}/{_HERE}/{rank}", me)
            told = attempt
        answer = f"{attempt}/{_ANSWER}"
        if attempt and room.check([answer]) and me in json.loads(room.get(answer)):
            return attempt
    raise _late("no answer of rank 0")


def _tries(deadline: float) -> Iterator[None]:
    """Again and again until the deadline, with longer and longer pauses."""
    pause_s = _FIRST_PAUSE_S
    while time.monotonic() < deadline:
        yield
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.3, _LONGEST_PAUSE_S)


def _late(got: str) -> LaunchError:
    return LaunchError(
        "The ranks have not met",
        expected="all of them within the time limit",
        got=got,
        fix="see whether they were started, and what they have printed; timeout_s is the limit",
    )


def forget_meshes() -> None:
    """Let torch forget how operations on DTensors went: it takes an equal mesh of the next world for one of this.

    Results would lie on that mesh, whose process groups are gone, or have the name of others by now.
    """
    if "torch.distributed.tensor" in sys.modules:  # slow to import
        from meshwright.runtime.torch_internals.dtensor import clear_sharding_cache

        clear_sharding_cache()
