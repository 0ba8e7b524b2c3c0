"""The replicas that a rank synchronises with: their group, flat messages between them, and equal starting weights."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright.comm.transport import all_gather_flat, group_of_partition
from meshwright.errors import ConfigError, LaunchError, join_names
from meshwright.runtime import agreeing_over, any_rank, bit_sums, first_text, gather_numbers, print_rank, world_size
from meshwright.runtime.agreement import gather_distinct
from meshwright.runtime.torch_internals.c10d import default_store

_PATIENCE_S = 3.0  # to wait for the marks of ranks that are alive but slow


class Replicas:
    """The ranks that hold this rank's part of the model in every replica; collective over the world to construct.

    Args:
        group: Their process group, or a mesh of one axis. None: every rank of the world is a replica.

    Raises:
        ConfigError: When a mesh has several axes.
    """

    def __init__(self, group: dist.ProcessGroup | DeviceMesh | None = None) -> None:
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ConfigError(
                    "Replicas lie along one mesh axis",
                    expected="a mesh of one axis, such as mesh['replica']",
                    got=f"a mesh with the axes {group.mesh_dim_names}",
                    fix="slice the mesh by the name of the axis",
                )
            group = group.get_group()
        self.group = group
        in_world = world_size() > 1
        self.ranks: list[int] = dist.get_process_group_ranks(group or dist.group.WORLD) if in_world else [0]
        self.size = len(self.ranks)
        self.rank = self.ranks.index(dist.get_rank()) if in_world else 0
        self.inside, self.num_inside = _inside(self.rank) if in_world else (None, 1)
        on_cuda = in_world and "nccl" in dist.get_backend_config(group or dist.group.WORLD)
        self.device = torch.device("cuda" if on_cuda else "cpu")
        """The device on which single numbers are exchanged."""
        self.bytes_sent = 0
        """Bytes that this rank has sent, as ring algorithms send them."""
        self._num_syncs = 0

    def all_reduce(self, flat: torch.Tensor, operation: Any = dist.ReduceOp.SUM) -> dist.Work | None:
        """Start an all-reduce in place; return None for a single replica."""
        if self.size == 1:
            return None
        self.bytes_sent += 2 * (self.size - 1) * flat.nbytes // self.size
        with self.watched():
            return dist.all_reduce(flat, operation, group=self.group, async_op=True)

    def exchange(
        self, received: torch.Tensor, sent: torch.Tensor, into: list[int] | None = None, out_of: list[int] | None = None
    ) -> dist.Work:
        """Start an all-to-all of the rows of a tensor, or of pieces of the given sizes."""
        own = out_of[self.rank] if out_of is not None else sent.shape[0] // self.size
        self.bytes_sent += (sent.shape[0] - own) * sent[:1].nbytes
        with self.watched():
            work: dist.Work = dist.all_to_all_single(received, sent, into, out_of, group=self.group, async_op=True)
        return work

    def all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> dist.Work:
        """Start an all-gather of equal pieces."""
        self.bytes_sent += (self.size - 1) * sent.nbytes
        with self.watched():
            work: dist.Work = all_gather_flat(received, sent, group=self.group, async_op=True)
        return work

    def broadcast(self, tensor: torch.Tensor, replica: int) -> dist.Work | None:
        """Start a broadcast of one replica's tensor; return None where there is nothing to send."""
        if self.size == 1 or tensor.numel() == 0:
            return None
        self.bytes_sent += tensor.nbytes if replica == self.rank else 0
        with self.watched():
            return dist.broadcast(tensor, src=self.ranks[replica], group=self.group, async_op=True)

    def gather_distinct(self, value: Any) -> list[tuple[list[int], Any]]:
        """Gather a value of text and numbers from replicas that differ: the replicas of each set, and its value."""
        if self.size == 1:
            return [([0], value)]
        with self.watched(), agreeing_over(self.group):
            return gather_distinct(value, repr(value))

    def check_alike(self, parameters: Sequence[torch.Tensor]) -> None:
        """Refuse parameters that differ between replicas, or are sharded over them; collective.

        Raises:
            ConfigError: On every rank of the world, when there are such.
        """
        sets = self.gather_distinct([(tuple(p.shape), str(p.dtype)) for p in parameters])
        problem = _difference(sets) or self._crossing(parameters)
        found = first_text(problem)
        if found:
            raise ConfigError(
                "Replicas that are to synchronise hold different parameters",
                expected="the same parameters, in the same order and cut alike, in every replica",
                got=found,
                fix="build the same model in every replica; shard it over axes other than the replicas'",
            )

    def _crossing(self, parameters: Sequence[torch.Tensor]) -> str | None:
        others = set(self.ranks) - {self.ranks[self.rank]}
        for parameter in parameters:
            if isinstance(parameter, DTensor) and others.intersection(parameter.device_mesh.mesh.flatten().tolist()):
                return f"a parameter of shape {tuple(parameter.shape)} that is sharded over the replicas {self.ranks}"
        return None

    @contextlib.contextmanager
    def synchronizing(self) -> Iterator[None]:
        """Mark in the store that this rank has joined a synchronisation, whose collectives run inside the block."""
        self._num_syncs += 1
        store = _store() if self.size > 1 else None
        if store is not None:
            with contextlib.suppress(RuntimeError):
                store.set(self._mark(self.ranks[self.rank]), str(self._num_syncs))
        yield

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Name the missing ranks when a collective inside the block fails.

        Raises:
            LaunchError: With the ranks that did not join this synchronisation.
        """
        try:
            yield
        except LaunchError:
            raise
        except RuntimeError as error:
            raise LaunchError(
                "Synchronising the replicas failed",
                expected=f"ranks {join_names(map(str, self.ranks))} to meet",
                got=f"{self._missing()}; {str(error).splitlines()[0][:200]}",
                fix="see why that rank ended, and resume from the last checkpoint (with fewer replicas, if need be)",
            ) from error

    def _missing(self) -> str:
        deadline = time.monotonic() + _PATIENCE_S
        late = self._late()
        while late and time.monotonic() < deadline:
            time.sleep(0.1)
            late = self._late()
        if late is None:
            return "no answer from the rank that holds the store (rank 0, or the launcher)"
        return f"nothing from rank {join_names(map(str, late))}" if late else "an error although all ranks had come"

    def _late(self) -> list[int] | None:
        """Return the ranks that have not joined the present synchronisation; None where the store is gone."""
        store = _store()
        try:
            if store is None:
                return None
            return [
                rank
                for rank in self.ranks
                if not store.check([self._mark(rank)]) or int(store.get(self._mark(rank))) < self._num_syncs
            ]
        except RuntimeError:
            return None

    def _mark(self, rank: int) -> str:
        return f"meshwright/replicas/{'-'.join(map(str, self.ranks[:2]))}/{rank}"


def _difference(sets: list[tuple[list[int], Any]]) -> str | None:
    _, ours = sets[0]
    for (replica, *_), theirs in sets[1:]:
        if len(theirs) != len(ours):
            return f"{len(ours)} parameters in replica 0, {len(theirs)} in replica {replica}"
        for place, (one, two) in enumerate(zip(ours, theirs, strict=True)):
            if one != two:
                return f"parameter {place}: {one[0]} {one[1]} in replica 0, {two[0]} {two[1]} in replica {replica}"
    return None


def _inside(place: int) -> tuple[dist.ProcessGroup | None, int]:
    """Return the group and the number of this replica's ranks: those at the same place in their replica groups."""
    world = dist.group.WORLD
    places = [each for (each,) in gather_numbers([place])]
    at: dict[int, list[int]] = {}
    for rank, other in enumerate(places):
        at.setdefault(other, []).append(rank)
    # Of one answer on all ranks: they make all groups together.
    if len(at) == 1:
        return world, len(places)
    if len(at) == len(places):
        return None, 1
    group = group_of_partition(list(map(tuple, at.values())))
    return (None if len(at[place]) == 1 else group), len(at[place])


def _store() -> Any:
    try:
        return default_store()
    except (RuntimeError, ValueError):
        return None


# --- Messages between replicas: many tensors in few flat buffers


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type of sums over replicas: fp64 for fp64, fp32 for all other real types; complex ones stay."""
    if dtype.is_complex:
        return dtype
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass
class Bucket:
    """A flat buffer of some of a message's tensors, followed by extra slots of one number each."""

    members: list[int]
    """Indices of these tensors in the message."""
    flat: torch.Tensor
    """Shape ``(elements + extras,)``."""
    sizes: list[int]
    """Number of elements of each member; of a complex one twice as many, its real and imaginary parts."""

    @property
    def values(self) -> torch.Tensor:
        """Return the elements without the extra slots."""
        return self.flat[: sum(self.sizes)]

    @property
    def extras(self) -> torch.Tensor:
        """Return the extra slots."""
        return self.flat[sum(self.sizes) :]


class Message:
    """Flat buffers with one view per tensor; fill the views, send the buckets, read the views.

    Args:
        like: Tensors whose shapes, devices and (widened) types the views have.
        bucket_bytes: Size at which a bucket is closed. A tensor is never cut, however large.
        extras: Extra slots of each bucket: ``"one"``, or ``"each"`` for one per member and one more.
    """

    def __init__(self, like: Sequence[torch.Tensor], bucket_bytes: int, extras: str = "one") -> None:
        self.views: list[torch.Tensor] = [tensor.new_empty(0) for tensor in like]
        self.buckets: list[Bucket] = []
        for members in _cut(like, bucket_bytes):
            is_complex = like[members[0]].is_complex()
            sizes = [like[index].numel() * (2 if is_complex else 1) for index in members]
            slots = 1 + (len(members) if extras == "each" else 0)
            first = like[members[0]]
            flat = torch.zeros(sum(sizes) + slots, dtype=wide_type(first.dtype).to_real(), device=first.device)
            self.buckets.append(Bucket(members, flat, sizes))
            for index, part in zip(members, flat[: sum(sizes)].split(sizes), strict=True):
                shape = like[index].shape
                self.views[index] = torch.view_as_complex(part.view(*shape, 2)) if is_complex else part.view(shape)

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], bucket_bytes: int) -> Message:
        """Make a message filled with copies of tensors."""
        message = cls(tensors, bucket_bytes)
        for view, tensor in zip(message.views, tensors, strict=True):
            view.copy_(tensor)
        return message

    def copy_to(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the views into tensors."""
        for view, tensor in zip(self.views, tensors, strict=True):
            tensor.copy_(view)


def _cut(like: Sequence[torch.Tensor], bucket_bytes: int) -> list[list[int]]:
    """Group indices into buckets of one device and type each, in the order of their first tensors."""
    buckets: list[list[int]] = []
    open_buckets: dict[tuple[torch.device, torch.dtype], tuple[list[int], int]] = {}
    for index, tensor in enumerate(like):
        kind = (tensor.device, wide_type(tensor.dtype))
        bucket, size = open_buckets.get(kind, ([], 0))
        if not bucket:
            buckets.append(bucket)
        bucket.append(index)
        size += tensor.numel() * kind[1].itemsize
        open_buckets[kind] = (bucket, size) if size < bucket_bytes else ([], 0)
    return buckets


# --- Equal starting weights: checksums find differences, and the first replica's values replace them


def make_equal(tensors: Sequence[torch.Tensor], replicas: Replicas, bucket_bytes: int) -> None:
    """Copy the first replica's values to all where any differ, and print a line then; collective over the world.

    Args:
        tensors: This rank's parts, as plain tensors.
        replicas: The ranks that hold the same parts.
        bucket_bytes: See Message.
    """
    if not any_rank(len(replicas.gather_distinct(bit_sums(tensors).tolist())) > 1):
        return
    take_first(tensors, replicas, bucket_bytes)
    print_rank("meshwright: the replicas began with different weights; all have those of the first now", flush=True)


@torch.no_grad()
def take_first(tensors: Sequence[torch.Tensor], replicas: Replicas, bucket_bytes: int) -> None:
    """Replace plain tensors by the first replica's."""
    message = Message.of(tensors, bucket_bytes)
    works = [replicas.broadcast(bucket.flat, 0) for bucket in message.buckets]
    with replicas.watched():
        for work in works:
            if work is not None:
                work.wait()
    message.copy_to(tensors)
