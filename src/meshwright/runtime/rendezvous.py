"""Rendezvous: how ranks find each other in a launcher's store, attempt by attempt."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
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
# the attempt, and every rank goes on only when rank 0, or one that it has answered, has answered to that very process.
# Ranks of two runs that share an address keep apart for the same reason.

_ROOM, _ATTEMPT, _CAME, _HERE, _ANSWER = "meshwright/meeting", "attempt", "came", "here", "answer"
_ODD, _REFUSED = "odd", "refused"  # a number of ranks that differs from rank 0's, and rank 0's word that it does
_FAN_OUT = 16  # ranks below each in the tree: four levels for 16,384
_ANSWER_WAIT = timedelta(seconds=30)
_STORE_WAIT = timedelta(seconds=60)  # the launcher makes its store before any rank starts
_served: Store | None = None  # by this process as rank 0: ranks that begin another world find it at once
_PROMPT_S = 2.0  # who has not met by then asks whether all count alike
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 1.0  # thousands of ranks must not keep the store busy


def number_from(name: str, default: int | None = None, environment: Mapping[str, str] = os.environ) -> int:
    """Return a number that a launcher has put into the environment.

    Args:
        name: Of the variable.
        default: Where it is not set; None: it must be.
        environment: Where it is looked for.

    Raises:
        LaunchError: When what is there is no number.
    """
    text = environment.get(name, "" if default is None else str(default))
    try:
        return int(text)
    except ValueError:
        raise LaunchError(
            f"The environment variable {name} is no number",
            expected="a whole number, as torchrun sets it",
            got=repr(text),
            fix="correct it, or start the program with torchrun; for one process unset RANK, WORLD_SIZE and LOCAL_RANK",
        ) from None


def launchers_store(environment: Mapping[str, str], timeout: timedelta) -> Store:
    """Return the store at ``MASTER_ADDR`` and ``MASTER_PORT``: the launcher's, for all attempts, or rank 0's own.

    Raises:
        LaunchError: When it is not where the environment says, or its port is taken.
    """
    address, port = environment["MASTER_ADDR"], number_from("MASTER_PORT", None, environment)
    is_launchers = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = not is_launchers and environment["RANK"] == "0"
    patience = min(timeout, _STORE_WAIT) if is_launchers else timeout
    try:
        store = TCPStore(address, port, None, serves, patience, wait_for_workers=False, multi_tenant=True)
    except RuntimeError as error:
        if serves:
            raise _not_served(address, port, error) from None
        raise _no_answer(address, port, error, is_launchers=is_launchers) from None
    if serves:
        global _served
        _served = store
    store.set_timeout(timeout)
    return store


def _not_served(address: str, port: int, error: RuntimeError) -> LaunchError:
    return LaunchError(
        "Rank 0 cannot open the store of the ranks",
        expected=f"a free port at MASTER_ADDR and MASTER_PORT, {address}:{port}, on its own machine",
        got=str(error).splitlines()[0],
        fix="end the run that uses the port, or set another MASTER_PORT on all ranks",
    )


def _no_answer(address: str, port: int, error: RuntimeError, *, is_launchers: bool) -> LaunchError:
    got = str(error).splitlines()[0]
    try:
        socket.getaddrinfo(address, port)
    except OSError as unknown:
        got = f"{address} does not resolve on {socket.gethostname()}: {unknown}"
    if is_launchers:
        return LaunchError(
            "The launcher's store does not answer",
            expected=f"torchrun's store at MASTER_ADDR and MASTER_PORT, {address}:{port}",
            got=got,
            fix="leave MASTER_PORT as torchrun has set it: a program that changes it looks where nobody listens",
        )
    return LaunchError(
        "Rank 0 does not answer",
        expected=f"its store at MASTER_ADDR and MASTER_PORT, {address}:{port}",
        got=got,
        fix="see whether rank 0 was started there, and set MASTER_ADDR to a name or an address that leads to it from "
        "every machine; timeout_s is the limit",
    )


def unreachable_warning(environment: Mapping[str, str]) -> str | None:
    """Return a warning if other machines will not reach gloo on this one, else None; from one rank per machine.

    gloo listens where the machine's name leads to, and on the loopback interface alone when that is nowhere.
    """
    is_one_machine = environment.get("LOCAL_WORLD_SIZE", "1") == environment.get("WORLD_SIZE", "1")
    if is_one_machine or environment.get("LOCAL_RANK", "0") != "0" or "GLOO_SOCKET_IFNAME" in environment:
        return None
    if _is_loopback(environment.get("MASTER_ADDR", "")):  # all ranks are here
        return None
    name = socket.gethostname()
    try:
        found = socket.getaddrinfo(name, None)[0][4][0]
    except OSError as error:
        where = f"does not resolve ({error})"
    else:
        if not _is_loopback(str(found)):
            return None
        where = f"leads to {found}"
    return (
        f"the name of this machine, {name}, {where}, and gloo listens there: other machines will not reach it. Set "
        "GLOO_SOCKET_IFNAME to the interface of the network, such as eth0, on all machines"
    )


def _is_loopback(address: str) -> bool:
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name
        return False


def meet(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return a store that only the ranks of this attempt use. Collective.

    The ranks form a tree, so that none reads more than a few names: a rank joins when those below it have joined, and
    answers them once it has its own answer.

    Args:
        store: The one that they share with ranks of earlier attempts, which have ended.
        rank: Rank of this process.
        world_size: Ranks of this attempt.
        timeout: Time in which the others must come.

    Raises:
        LaunchError: When they do not, or count differently many.
    """
    room, me = PrefixStore(_ROOM, store), f"{os.getpid()}-{uuid.uuid4().hex}-{world_size}"
    below = range(rank * _FAN_OUT + 1, min(rank * _FAN_OUT + _FAN_OUT, world_size - 1) + 1)
    if rank == 0:
        room.set(_ATTEMPT, me)
    attempt, has_joined, is_old, began_s = "", False, False, time.monotonic()
    for _ in _tries(time.monotonic() + timeout.total_seconds()):
        named = room.get(_ATTEMPT).decode() if room.check([_ATTEMPT]) else ""
        if named != attempt:
            attempt, has_joined = named, False
            is_old = bool(_value(room, f"{attempt}/{_REFUSED}"))  # an attempt that had failed before this rank came
            room.add(f"{attempt}/{_CAME}/{rank}", 1)
        if not attempt:
            continue
        if not is_old and time.monotonic() - began_s > _PROMPT_S:
            _check_sizes(room, attempt, rank, world_size)
        if _size_of(attempt) != world_size:  # of this attempt, or of one before it that had other ranks
            continue
        here = [f"{attempt}/{_HERE}/{each}" for each in below]
        if not has_joined and (not here or room.check(here)):
            room.set(f"{attempt}/{_HERE}/{rank}", me)
            has_joined = True
        if has_joined and (rank == 0 or _value(room, f"{attempt}/{_ANSWER}/{rank}") == me):
            for each, key in zip(below, here, strict=True):
                room.set(f"{attempt}/{_ANSWER}/{each}", room.get(key).decode())
            return PrefixStore(f"meshwright/attempt-{attempt}", store)
    if rank > 0:
        raise _too_late("no answer of rank 0" + _other_count(attempt, world_size))
    raise _too_late(f"no word of {named_ranks(absent_ranks(room, f'{me}/{_CAME}', 1, world_size))}")


def _check_sizes(room: Store, attempt: str, rank: int, world_size: int) -> None:
    """Raise on every rank that waits, when one of them counts other ranks than rank 0; rank 0 decides.

    Another rank cannot know whether what it reads was left by an attempt before.
    """
    if _size_of(attempt) != world_size:
        room.set(f"{attempt}/{_ODD}", f"{world_size} on rank {rank}")
    odd = _value(room, f"{attempt}/{_ODD}") if rank == 0 else _value(room, f"{attempt}/{_REFUSED}")
    if not odd:
        return
    if rank == 0:
        time.sleep(2 * _LONGEST_PAUSE_S)  # for those that have not seen this attempt yet
        room.set(f"{attempt}/{_REFUSED}", odd)
    raise LaunchError(
        "WORLD_SIZE differs between ranks",
        expected=f"{_size_of(attempt)}, as on rank 0",
        got=odd,
        fix="start torchrun with the same --nnodes and --nproc-per-node on every machine",
    )


def _size_of(attempt: str) -> int:
    return int(attempt.rpartition("-")[2])


def _other_count(attempt: str, world_size: int) -> str:
    if not attempt or _size_of(attempt) == world_size:
        return ""
    return f", which has counted {_size_of(attempt)} ranks: WORLD_SIZE is {world_size} here"


def _value(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def absent_ranks(store: Store, key: str, number: int, size: int) -> list[int]:
    """Return the ranks that have added fewer than ``number`` to their ``key/rank``; empty if that cannot be known.

    The first rank that asks reads all of them, and the others read its answer.
    """
    answer = f"{key}/absent/{number}"
    if store.add(f"{answer}/asked", 1) == 1:
        absent = [rank for rank in range(size) if store.add(f"{key}/{rank}", 0) < number]
        store.set(answer, json.dumps(absent))
        return absent
    try:
        store.wait([answer], _ANSWER_WAIT)
    except RuntimeError:  # the rank that reads them has gone, or the store
        return []
    return list(json.loads(store.get(answer)))


def named_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text, such as "ranks 0, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {join_names(map(str, ranks))}"


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
