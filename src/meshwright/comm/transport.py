"""Process groups, and the collectives on them without gradients, alike for gloo and NCCL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.errors import ConfigError, LaunchError
from meshwright.runtime import make_groups

Group = dist.ProcessGroup | DeviceMesh | None
"""A process group, a DeviceMesh of one axis, or None for the world."""


@dataclass(frozen=True)
class Members:
    """A process group, this process's rank in it, and its number of ranks."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def backend(self, device: torch.device) -> str | None:
        """Return the backend that carries tensors on ``device`` in this group, such as ``"nccl"``, or None."""
        pairs = dist.get_backend_config(self.group).split(",")  # "cpu:gloo,cuda:nccl"
        return dict(pair.split(":") for pair in pairs).get(device.type)

    @property
    def host_device(self) -> torch.device:
        """Device of small messages to the host: the CPU, or the CUDA device of a group with NCCL alone."""
        host = torch.device("cpu")
        return host if self.backend(host) else torch.device("cuda", torch.cuda.current_device())

    def check_place(self, name: str, place: int) -> None:
        """Refuse a root or peer that is not in the group.

        Raises:
            ConfigError: Naming the argument.
        """
        if not 0 <= place < self.size:
            raise ConfigError(
                f"{name} is not a rank of the group",
                expected=f"0..{self.size - 1}" if self.size > 1 else "0: the group has one rank",
                got=repr(place),
                fix="count ranks within the group (they are those of the world where group is None)",
            )


def members_of(group: Group, comm: Group = None) -> Members:
    """Find the group that a caller means, by either of its two names.

    Raises:
        LaunchError: Before ``init_distributed``, or when this rank is not in the group.
        ConfigError: When a mesh has more than one axis, or both names are given.
    """
    if group is not None and comm is not None:
        raise ConfigError(
            "A collective was given two groups",
            expected="group, or BMTrain's name for it, comm",
            got="both",
            fix="leave comm out",
        )
    group = comm if group is None else group
    if not dist.is_initialized():
        raise LaunchError(
            "A collective needs the ranks to have found each other",
            expected="init_distributed() before it",
            got="no process group",
            fix="call meshwright.init_distributed() at the start; one process alone needs it too",
        )
    if isinstance(group, DeviceMesh):
        group = _only_axis(group)
    process_group = dist.group.WORLD if group is None else group
    # new_group hands a sentinel to the ranks it leaves out.
    if not isinstance(process_group, dist.ProcessGroup) or dist.get_rank(process_group) < 0:
        raise LaunchError(
            "This rank is not in the group",
            expected="a group that it belongs to",
            got=f"rank {dist.get_rank()} of the world",
            fix="call the collective only on the ranks of the group",
        )
    return Members(process_group, dist.get_rank(process_group), dist.get_world_size(process_group))


def _only_axis(mesh: DeviceMesh) -> dist.ProcessGroup:
    if mesh.ndim != 1:
        raise ConfigError(
            "A collective goes along one mesh axis",
            expected="a DeviceMesh with one axis",
            got=f"{mesh.ndim} axes ({', '.join(mesh.mesh_dim_names or ())})",
            fix="slice one, such as mesh['data']",
        )
    return mesh.get_group()


# --- Process groups that all ranks make together.

_MADE: dict[tuple[tuple[int, ...], ...], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}
"""This rank's groups by the partition that they are part of, each with the world in which it was made."""


def group_of_partition(partition: Sequence[tuple[int, ...]]) -> dist.ProcessGroup:
    """Return this rank's group of a partition of the world, made once per world; collective over the world.

    Args:
        partition: Ascending ranks of each group; disjoint, together all ranks, and the same on every rank.
    """
    world, key = dist.group.WORLD, tuple(sorted(partition))
    assert world is not None
    if key not in _MADE or _MADE[key][0] is not world:
        _MADE[key] = (world, make_groups(key))
    return _MADE[key][1]


# --- Collectives without gradients: what gloo and NCCL each need to give the same answer.

# torch 2.13 has renamed them and warns about the old names; torch 2.11 knows only those.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}
HALF = (torch.float16, torch.bfloat16)


def reduced(x: torch.Tensor, op: str, members: Members) -> torch.Tensor:
    """All-reduce into a new contiguous tensor of the shape of ``x``."""
    total = _summand(x, op, members)
    if members.size > 1:
        dist.all_reduce(total, _reduce_op(op, x, members), group=members.group)
    return _finished(total, op, x, members)


def reduced_to_root(x: torch.Tensor, root: int, members: Members) -> torch.Tensor:
    """Return the sum on ``root``, zeros elsewhere; a new contiguous tensor."""
    total = _summand(x, "sum", members)
    if members.size > 1:
        dist.reduce(total, group_dst=root, group=members.group)
    # What reduce leaves on the other ranks is not defined.
    return _finished(total, "sum", x, members) if members.rank == root else torch.zeros_like(total, dtype=x.dtype)


def gathered(x: torch.Tensor, members: Members) -> torch.Tensor:
    """All-gather into a new tensor ``(ranks, *x.shape)``."""
    every = x.new_empty(members.size * x.numel())
    all_gather_flat(every, x.contiguous().view(-1), group=members.group)
    return every.view(members.size, *x.shape)


def reduce_scattered(x: torch.Tensor, op: str, members: Members) -> torch.Tensor:
    """Reduce-scatter along dim 0, whose size the ranks divide, into a new tensor ``(size / ranks, …)``."""
    parts = _summand(x, op, members)
    own = parts.new_empty(x.numel() // members.size)
    reduce_scatter_flat(own, parts.view(-1), op=_reduce_op(op, x, members), group=members.group)
    return _finished(own, op, x, members).view(x.shape[0] // members.size, *x.shape[1:])


def exchanged(x: torch.Tensor, members: Members) -> torch.Tensor:
    """Exchange entries of dim 0 all-to-all: the r-th goes to rank r, and rank r's arrives r-th."""
    arrived = _like(x)
    dist.all_to_all_single(arrived, x.contiguous(), group=members.group)
    return arrived


def broadcasted(x: torch.Tensor, root: int, members: Members) -> torch.Tensor:
    """Return the root's ``x``, as a new contiguous tensor on every rank."""
    copy = x.clone(memory_format=torch.contiguous_format) if members.rank == root else _like(x)
    dist.broadcast(copy, group_src=root, group=members.group)
    return copy


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _summand(x: torch.Tensor, op: str, members: Members) -> torch.Tensor:
    """Copy a tensor to reduce in: gloo adds halves in halves, where 40000 + 40000 overflows before it is averaged."""
    wide = x.dtype in HALF and op in ("sum", "avg", "prod") and members.backend(x.device) != "nccl"
    return x.to(torch.float32 if wide else x.dtype, copy=True, memory_format=torch.contiguous_format)


def _reduce_op(op: str, x: torch.Tensor, members: Members) -> dist.ReduceOp.RedOpType:
    # Only NCCL knows a mean of every dtype in every version of torch.
    return dist.ReduceOp.AVG if op == "avg" and members.backend(x.device) == "nccl" else _REDUCE_OPS[op]


def _finished(total: torch.Tensor, op: str, x: torch.Tensor, members: Members) -> torch.Tensor:
    if op == "avg" and members.backend(x.device) != "nccl":
        total /= members.size
    return total.to(x.dtype)


class Pending:
    """A collective under way; torch keeps its inputs alive.

    Args:
        work: The work to wait for.
        finish: Returns the result, once ``work`` is done.
    """

    def __init__(self, work: Any, finish: Callable[[], torch.Tensor]) -> None:
        self._work, self._finish = work, finish

    def wait(self) -> torch.Tensor:
        """Wait and return the result; on CUDA the stream waits, not the host."""
        self._work.wait()
        return self._finish()


def gather_async(x: torch.Tensor, members: Members) -> Pending:
    """Start :func:`gathered`."""
    every = x.new_empty(members.size * x.numel())
    work = all_gather_flat(every, x.contiguous().view(-1), group=members.group, async_op=True)
    return Pending(work, lambda: every.view(members.size, *x.shape))


def reduce_async(x: torch.Tensor, members: Members) -> Pending:
    """Start :func:`reduced` with ``op="sum"``."""
    total = _summand(x, "sum", members)
    work = dist.all_reduce(total, group=members.group, async_op=True)
    return Pending(work, lambda: total.to(x.dtype))


def reduce_scatter_async(x: torch.Tensor, members: Members) -> Pending:
    """Start :func:`reduce_scattered` with ``op="sum"``."""
    parts = _summand(x, "sum", members)
    own = parts.new_empty(x.numel() // members.size)
    work = reduce_scatter_flat(own, parts.view(-1), group=members.group, async_op=True)
    return Pending(work, lambda: own.to(x.dtype).view(x.shape[0] // members.size, *x.shape[1:]))
