"""Processes: start, identify and shut down the ranks of a job, with process groups for background threads."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.errors import LaunchError
from meshwright.runtime.device import choose_device, seed_everything, synchronize_device
from meshwright.runtime.rendezvous import (
    absent_ranks,
    forget_meshes,
    launchers_store,
    meet,
    named_ranks,
    number_from,
    separate_tasks_warning,
    unreachable_warning,
)
from meshwright.runtime.torch_internals.c10d import BarrierOptions, HashStore, default_store, set_timeout, timeout_of

_own = threading.local()
_background: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None  # the world, and its background group
_SAVE_TIMEOUT = timedelta(minutes=30)  # ranks wait for each other's files in it, longer than a collective takes
_before_leaving: list[Callable[[], None]] = []

# --- [Note: gloo connects on use]
#
# When a group of n ranks is made, gloo connects every two of them: n sockets, and n (8 n + 154) bytes of the store, on
# each rank. Groups of many ranks that are made here connect on use instead. Then a rank may wait forever, whatever the
# time limit, for one that has died before the two were connected (pytorch/gloo#520, in torch up to 2.13). So a group
# opens at once what its collectives use, in a barrier whose wait has a limit: a barrier is a dissemination, which
# connects ranks at distances of 1, 2, 4, …, and rings and broadcasts use no others. Only gathers to one rank,
# all-to-alls, and sends between other pairs connect later. Python's exit may hang, too: a group that is freed after
# another rank has died waits for a thread that goes on (the loop of gloo's tcp device). A process that has failed
# therefore leaves without freeing its groups. Groups of few ranks are better off with torch's own way.

_LAZY = "TORCH_GLOO_LAZY_INIT"
_FEW_RANKS = 32  # 13 kB of the store, 31 sockets
_LATECOMERS_S = 1.0  # the first connection that fails is no news of ranks that are about to come
_on_use = False  # whether this process has made a group that connects on use


def _connects_on_use(num_ranks: int) -> bool:
    chosen = os.environ.get(_LAZY)
    return num_ranks > _FEW_RANKS if chosen is None else chosen.lower() in ("1", "y", "yes", "t", "true")


@contextlib.contextmanager
def connecting_on_use(num_ranks: int) -> Iterator[bool]:
    """Let gloo groups that are made inside connect on use, if they may have many ranks or torch's variable says so.

    See [Note: gloo connects on use].

    Yields:
        Whether they do: then call :func:`connect` for each of them.
    """
    global _on_use
    before, lazy = os.environ.get(_LAZY), _connects_on_use(num_ranks)
    os.environ[_LAZY] = "1" if lazy else "0"
    _on_use = _on_use or lazy
    try:
        yield lazy
    finally:
        os.environ.pop(_LAZY)
        if before is not None:
            os.environ[_LAZY] = before


def _host_barrier(group: dist.ProcessGroup) -> dist.Work:
    """Begin a barrier of a group's ranks by its gloo part."""
    options = BarrierOptions()
    options.device = torch.device("cpu")
    return group.barrier(options)


def connect(group: dist.ProcessGroup) -> None:
    """Open the connections that the collectives of a gloo group use; collective over its ranks.

    Raises:
        LaunchError: Naming the ranks that have not come within the time limit of the world.
    """
    store, key, number = default_store(), f"meshwright/connect/{group.group_name}", dist.get_rank(group)
    store.add(f"{key}/{number}", 1)
    limit = store.timeout  # type: ignore[attr-defined]
    try:
        _host_barrier(group).wait(limit)
    except RuntimeError as error:
        time.sleep(min(_LATECOMERS_S, limit.total_seconds()))
        absent = [dist.get_global_rank(group, each) for each in absent_ranks(store, key, 1, group.size())]
        if dist.get_rank() == 0:  # it may keep the store, which the others read a little later
            time.sleep(2 * _LATECOMERS_S)
        raise LaunchError(
            "The ranks have not connected",
            expected=f"all {group.size()} of a process group within {limit.total_seconds():g} s",
            got=f"no word of {named_ranks(absent)}" if absent else str(error).splitlines()[0],
            fix="see whether they were started, and what they have printed; timeout_s is the limit",
        ) from error


@atexit.register
def _leave_failed() -> None:
    """End a process that has failed here, if its gloo groups connect on use: Python's exit could wait forever."""
    if _on_use and getattr(sys, "last_value", None) is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


# --- [Note: groups by split]
#
# On GPUs the device is bound to the process group of the world. NCCL then connects all ranks once, at the start, and
# makes every further group by splitting that communicator: one call for all the disjoint groups along a mesh axis,
# where thousands would each exchange an id over the store. A split is collective over all ranks, members or not, so
# all ranks must make all groups in one order: one that stays away leaves the others waiting (pytorch#145376). torch
# names the new groups by how many a rank has, so that all ranks must have equally many. Hence groups are made in whole
# partitions of the world: along the axes of a mesh, or by :func:`make_groups`. A group that its members make alone is
# not split, but connects by itself. Only the first world of a process is bound: in later ones torch's split reads
# what it has left empty (pytorch#192109, in torch up to 2.13).

_BIND = "MESHWRIGHT_BIND_DEVICE"
_has_begun = False  # whether this process has begun a world


def _bound_device(device: torch.device, backend: str, size: int) -> torch.device | None:
    """Return the device to bind to the process group; None leaves communicators to the first collective of each."""
    wanted = os.environ.get(_BIND, "1") != "0"
    return device if wanted and "nccl" in backend and size > 1 and not _has_begun else None


def limit_as_the_world(group: dist.ProcessGroup) -> None:
    """Let collectives of a group take as long as those of the world: ``timeout_s`` of ``init_distributed``.

    torch makes groups with its own limits, of 10 minutes with NCCL and 30 with gloo.
    """
    limit = timeout_of(dist.group.WORLD) if dist.group.WORLD is not None else None
    if limit is not None and isinstance(group, dist.ProcessGroup):  # else this rank is not in the group
        set_timeout(limit, group)


def make_group(ranks: Sequence[int] | None = None, **options: Any) -> dist.ProcessGroup:
    """Make a process group as ``torch.distributed.new_group`` does, whose gloo part connects on use.

    Args:
        ranks: Its ranks; None means all of them. Other ranks call it, too, unless ``use_local_synchronization``.
        options: Further arguments of ``new_group``; without ``timeout`` the group gets the world's.
    """
    alone = options.get("use_local_synchronization", False)
    size = dist.get_world_size() if ranks is None else len(ranks)
    with connecting_on_use(size) as on_use, _without_split() if alone else contextlib.nullcontext():
        group = dist.new_group(ranks if ranks is None else list(ranks), **options)
    if "timeout" not in options:
        limit_as_the_world(group)
    if on_use and isinstance(group, dist.ProcessGroup) and dist.get_backend(group) == "gloo" and group.size() > 1:
        connect(group)
    return group


def make_groups(partition: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """Make disjoint groups that together are the world, and return this rank's; collective over the world.

    See [Note: groups by split].

    Args:
        partition: Ranks of each group; the same on every rank.
    """
    world = dist.group.WORLD
    assert world is not None
    own = next(number for number, ranks in enumerate(partition) if dist.get_rank() in ranks)
    if world.bound_device_id is None:
        return [make_group(ranks) for ranks in partition][own]
    with connecting_on_use(max(map(len, partition))):
        group = dist.split_group(split_ranks=[list(ranks) for ranks in partition])
    assert group is not None
    limit_as_the_world(group)
    return group


@contextlib.contextmanager
def _without_split() -> Iterator[None]:
    """Let the members of a group make it without the other ranks, which a split would wait for."""
    world = dist.group.WORLD
    assert world is not None
    device, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = device


def background_group() -> dist.ProcessGroup | None:
    """Return the gloo group of all ranks for the thread that saves in the background; None without other ranks.

    Collectives of two threads in one group would meet each other's. The first call is collective: make it where all
    ranks are in step, never from a background thread.
    """
    global _background
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None or world.size() == 1:
        return None
    if _background is None or _background[0] is not world:
        _background = (world, make_group(backend="gloo", timeout=_SAVE_TIMEOUT))
    return _background[1]


@contextlib.contextmanager
def agreeing_over(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Let this thread's ``gather_objects``, and all that builds on it, use ``group`` (None: the world)."""
    before = agreement_group()
    _own.group = group
    try:
        yield
    finally:
        _own.group = before


def agreement_group() -> dist.ProcessGroup | None:
    """Return the group over which this thread agrees; None is the world."""
    return getattr(_own, "group", None)


def before_leaving(function: Callable[[], None]) -> Callable[[], None]:
    """Call a function on every rank at the start of ``shutdown_distributed``, while ranks can still communicate."""
    _before_leaving.append(function)
    return function


def prepare_to_leave() -> None:
    """Call the functions given to :func:`before_leaving`, all of them, and raise the first error afterwards."""
    with contextlib.ExitStack() as stack:
        for function in _before_leaving:
            stack.callback(function)


# --- Joining and leaving the world.

_FAREWELL_S = 0.05  # many times what a waiting thread needs to take the interpreter's lock and drop a tensor
_ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Settings:
    """Arguments of ``init_distributed``, for the parts of Meshwright that need them later."""

    seed: int
    zero_level: int
    num_micro_batches: int | None
    device: torch.device
    local_world_size: int
    tp_size: int = 1
    pipe_size: int = 1


_settings: Settings | None = None


def init_distributed(
    init_method: str = "env://",
    seed: int = 0,
    *,
    zero_level: int = 3,
    pipe_size: int = 1,
    tp_size: int = 1,
    num_micro_batches: int | None = None,
    backend: str | None = None,
    timeout_s: float = 1800.0,
) -> None:
    """Make this process one rank of the world: from nothing (a world of one), torchrun or torch.distributed.launch.

    Seeds all generators alike on every rank, so that models made next are equal. cuDNN, thread counts and CPU
    affinity are left alone. A second call with the same arguments does nothing; a process group that already exists
    is adopted.

    Args:
        init_method: ``"env://"``, as in BMTrain: the ranks meet as the launcher's environment variables say.
        seed: Seed of the run.
        zero_level: ZeRO level (1, 2 or 3) of a ``zero`` mesh axis for which a strategy names no method.
        pipe_size: Stages of :class:`meshwright.nn.PipelineTransformerBlockList`. Ranks ``r, r + world / pipe_size, …``
            are one pipeline; every one of them feeds its own batch (with ``tp_size``, that of its tensor group).
            -1, BMTrain's default, is 1.
        tp_size: Ranks of a tensor group: neighbouring ones, that work on the same batch and split the layers of
            :mod:`meshwright.nn` among themselves. See :func:`meshwright.runtime.process_grid`. -1 is 1.
        num_micro_batches: Default of ``accelerate(num_micro_batches=)``; and into how many parts a pipeline of
            ``pipe_size`` stages cuts the batches of its ranks taken together, where None means pipe_size.
        backend: torch.distributed backend; None means NCCL with CUDA and gloo without. ``"gloo"`` trains on the CPU.
        timeout_s: Seconds a collective may take before its rank gives up.

    Raises:
        LaunchError: When arguments, environment and devices do not fit together.
    """
    global _settings
    pipe_size, tp_size = (1 if size == -1 else size for size in (pipe_size, tp_size))
    _check_init_method(init_method)
    _check_arguments(zero_level, pipe_size, tp_size, num_micro_batches, timeout_s)
    local_rank = number_from("LOCAL_RANK", 0)
    device = choose_device(backend, local_rank)
    local_world_size = number_from("LOCAL_WORLD_SIZE", 1)
    wanted = Settings(seed, zero_level, num_micro_batches, device, local_world_size, tp_size, pipe_size)
    if _settings is not None and dist.is_initialized():
        if _settings != wanted:
            raise LaunchError(
                "init_distributed was called twice with different arguments",
                expected=_differing(_settings, wanted),
                got=_differing(wanted, _settings),
                fix="call it once, at the start, or shutdown_distributed() before calling it again",
            )
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        _join_world(backend, device, timeout_s)
        atexit.register(_leave_at_exit, world_size())
    _settings = wanted
    seed_everything(seed)


def _differing(ours: Settings, theirs: Settings) -> str:
    """Return the fields of the first settings that differ in the second."""
    other = vars(theirs)
    return ", ".join(f"{name}={value!r}" for name, value in vars(ours).items() if value != other[name])


def _check_init_method(init_method: str) -> None:
    if init_method != "env://":
        meant = "seed" if isinstance(init_method, int) else "backend" if init_method in ("nccl", "gloo") else None
        raise LaunchError(
            "init_method is not known",
            expected="'env://': the environment variables of torchrun, or none of them for one process",
            got=repr(init_method),
            fix=f"write {meant}={init_method!r}" if meant else "leave it out, and start with torchrun",
        )


def _check_arguments(
    zero_level: int, pipe_size: int, tp_size: int, num_micro_batches: int | None, timeout_s: float
) -> None:
    if zero_level not in (1, 2, 3):
        raise LaunchError(
            "zero_level is not a ZeRO level",
            expected="1, 2 or 3",
            got=repr(zero_level),
            fix="use 3 to shard everything",
        )
    _check_groups("tp_size", "tensor groups", tp_size)
    _check_groups("pipe_size", "pipeline stages", pipe_size)
    _check_groups("pipe_size * tp_size", "stages of tensor groups", pipe_size * tp_size)
    if num_micro_batches is not None and num_micro_batches < 1:
        raise LaunchError(
            "num_micro_batches is not a count",
            expected="1 or more",
            got=repr(num_micro_batches),
            fix="use 1 to train on whole batches",
        )
    if timeout_s <= 0:
        raise LaunchError(
            "timeout_s is not a duration",
            expected="seconds above 0",
            got=repr(timeout_s),
            fix="leave it out for half an hour",
        )


def _check_groups(name: str, what: str, size: int) -> None:
    """Refuse sizes that do not divide the ranks, before any process group is made."""
    world = world_size() if dist.is_initialized() else number_from("WORLD_SIZE", 1)
    if size < 1 or world % size:
        raise LaunchError(
            f"{name} does not divide the ranks into {what}",
            expected=f"a divisor of {world}, the number of ranks",
            got=repr(size),
            fix=f"start a multiple of {max(size, 1)} processes, or choose another {name}",
        )


def _join_world(backend: str | None, device: torch.device, timeout_s: float) -> None:
    # Both kinds of tensor can be reduced on a CUDA machine: losses and error reports live on the host.
    backend = backend or ("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    global _has_begun
    options: dict[str, Any] = {"backend": backend, "timeout": timedelta(seconds=timeout_s)}
    present = [name for name in _ENVIRONMENT if name in os.environ]
    # MASTER_ADDR and MASTER_PORT alone are often left exported in a shell: they do not make a world.
    if "RANK" not in present and "WORLD_SIZE" not in present:
        if warning := separate_tasks_warning(os.environ):
            print(f"meshwright: {warning}", file=sys.stderr, flush=True)
        dist.init_process_group(store=HashStore(), rank=0, world_size=1, **options)
        _has_begun = True
        return
    missing = [name for name in _ENVIRONMENT if name not in present]
    if missing:
        raise LaunchError(
            "The environment describes only half of a distributed world",
            expected=f"all of {', '.join(_ENVIRONMENT)}, as torchrun sets them, or none of them for one process",
            got=f"{', '.join(present)} without {', '.join(missing)}",
            fix="start the program with torchrun, or unset these variables",
        )
    if warning := unreachable_warning(os.environ):
        print(f"meshwright: {warning}", file=sys.stderr, flush=True)
    store = launchers_store(os.environ, options["timeout"])
    number, size = number_from("RANK"), number_from("WORLD_SIZE")
    own = meet(store, number, size, options["timeout"])
    bound = _bound_device(device, backend, size)
    with connecting_on_use(size) as on_use:
        dist.init_process_group(store=own, rank=number, world_size=size, device_id=bound, **options)
    _has_begun = True
    if on_use and size > 1 and "gloo" in backend and dist.group.WORLD is not None:
        connect(dist.group.WORLD)


def _leave_at_exit(size: int) -> None:
    """Destroy the process group at exit if the program forgot to: gloo's threads would sometimes abort the process.

    They drop tensors of finished collectives, which fails once the interpreter is gone (pytorch#179291). Where a mesh
    or a wrapped model still holds their group, they get a moment to let go. Not after an error with NCCL, where
    destroying can wait for ranks that are gone.
    """
    failed = getattr(sys, "last_value", None) is not None
    may_wait = failed and (_on_use or (_settings is not None and _settings.device.type == "cuda"))
    if dist.is_initialized() and not may_wait:
        dist.destroy_process_group()
    if size > 1:
        time.sleep(_FAREWELL_S)


def settings() -> Settings:
    """Return the arguments of ``init_distributed``, which is called with its defaults if nobody has."""
    if _settings is None or not dist.is_initialized():
        init_distributed()
    assert _settings is not None
    return _settings


def require_distributed(what: str) -> None:
    """Refuse to go on without ``init_distributed``.

    Raises:
        LaunchError: Naming ``what`` needs it.
    """
    if not dist.is_initialized():
        raise LaunchError(
            f"{what} needs to know the other ranks",
            expected="init_distributed() before it",
            got="no process group",
            fix="call meshwright.init_distributed() at the start of the program",
        )


def shutdown_distributed() -> None:
    """Leave the world: wait for the other ranks, then destroy the process group. Harmless without one.

    During an error (in a ``finally``) the other ranks may be anywhere, waiting for this one. Then the end of the
    program leaves the world, as it does where nobody calls this.

    Raises:
        CheckpointError: On every rank, when a save in the background has failed.
    """
    global _settings
    error = sys.exc_info()[1]
    if error is not None and not getattr(error, "agreed", False) and world_size() > 1:
        return
    prepare_to_leave()
    if dist.is_initialized():
        synchronize()
        dist.destroy_process_group()
        forget_meshes()
    _settings = None


def rank() -> int:
    """Return this process's rank; 0 before ``init_distributed``."""
    # A thread beside training must not take itself for rank 0 when the world ends.
    group = agreement_group()
    return group.rank() if group is not None else dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of ranks; 1 before ``init_distributed``."""
    group = agreement_group()
    return group.size() if group is not None else dist.get_world_size() if dist.is_initialized() else 1


def is_pretended() -> bool:
    """Return whether the other ranks do not exist: on torch's fake process group a start is tried in one process."""
    return dist.is_initialized() and dist.get_backend() == "fake"


def print_rank(*values: Any, rank: int = 0, **print_options: Any) -> None:
    """Print on one rank only, with the arguments of ``print``."""
    if (dist.get_rank() if dist.is_initialized() else 0) == rank:
        print(*values, **print_options)


def synchronize() -> None:
    """Wait until every rank has arrived here and finished the work queued on its device."""
    if not dist.is_initialized():
        return
    device = _settings.device if _settings is not None else torch.device("cpu")
    synchronize_device(device)
    if dist.group.WORLD is not None and "gloo" in dist.get_backend_config():
        # Its work is done, so that hosts need only meet. NCCL would want memory, which a full device has none of.
        _host_barrier(dist.group.WORLD).wait()
        return
    dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)
    synchronize_device(device)


def sum_loss(loss: torch.Tensor, comm: dist.ProcessGroup | DeviceMesh | None = None) -> torch.Tensor:
    """Return the mean of a per-rank loss over ranks, for logs.

    The name is BMTrain's, and so is the meaning: BMTrain averages here too, whatever the name says.

    Args:
        loss: Tensor of any shape, the same on every rank.
        comm: Process group or DeviceMesh of one axis, such as ``config["tp_zero_comm"]``; None means all ranks.

    Returns:
        A new tensor of that shape without gradient, equal on every rank.
    """
    group = comm.get_group() if isinstance(comm, DeviceMesh) else comm
    mean, size = loss.detach().clone(), dist.get_world_size(group) if dist.is_initialized() else 1
    if size > 1:
        dist.all_reduce(mean, group=group)
        mean /= size
    return mean
