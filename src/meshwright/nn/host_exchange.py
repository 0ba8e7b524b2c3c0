"""FSDP2's collectives on CPUs: through memory that the ranks of a host share, or by gloo.

[Note: shared-memory gathers] gloo copies every byte through sockets, also between processes of one host. Here each
rank packs its shard into memory that all of them map, and unpacks the others' shards from there. One small all-reduce
per gather is the only message: it says that a rank has packed, and carries the number of the oldest gather that it has
not unpacked yet. So nobody waits for an acknowledgement: memory is reused once a later gather has brought it. All ranks
gather in one order and see the same numbers, hence they find space at the same place, or none of them does; then gloo
carries this gather. Gradients travel likewise.

Ranks of different hosts find that they share no memory, and use gloo: its all-gather, and for gradients an all-to-all
and a sum, which take half the time of its own reduce-scatter.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import secrets
import warnings
import weakref
from collections import deque
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from meshwright.comm.transport import all_gather_flat
from meshwright.errors import StrategyError
from meshwright.nn.fsdp_units import parameter_groups
from meshwright.runtime.torch_internals.fsdp import gathering_ranks_of, reducing_ranks_of, reshards_to_fewer

# --- Memory that the processes of one host share.

ALIGNMENT = 64
"""Bytes of a cache line: parts of the memory begin at a multiple of it."""

_FOLDER = Path("/dev/shm")
_NAME_BYTES = 16
_MIB = 2**20
# At most one part in so many of the free memory is taken: workers of data loaders need the folder, too.
_SHARE = 2


class SharedMemory:
    """Zero-filled memory that every rank of a group can read and write.

    Args:
        memory: The mapping.
        num_ranks: Ranks that map it.
    """

    def __init__(self, memory: mmap.mmap, num_ranks: int) -> None:
        self._memory, self.num_ranks = memoryview(memory), num_ranks
        _live.add(self)

    def part(self, start: int, num_bytes: int) -> memoryview:
        """Return ``num_bytes`` from ``start``; a tensor made of it (``torch.frombuffer``) keeps it alive."""
        return self._memory[start : start + num_bytes]

    @property
    def own_bytes(self) -> int:
        """Return this rank's share of the size."""
        return len(self._memory) // self.num_ranks


_live: weakref.WeakSet[SharedMemory] = weakref.WeakSet()


def shared_memory_bytes() -> int:
    """Return this rank's share of all shared memory, which no count of tensors includes."""
    return sum(memory.own_bytes for memory in _live)


def shared_memory(group: dist.ProcessGroup, num_bytes: int) -> SharedMemory | None:
    """Map memory that the ranks of a group share. Collective.

    The file behind it has no name any more when this returns: nothing is left behind when ranks die.

    Args:
        group: A group with a CPU backend.
        num_bytes: The same on all ranks, above 0.

    Returns:
        The memory. None on all ranks if they are on several hosts (or in containers that share no memory), or if there
        is no space for it, of which rank 0 warns.
    """
    name = torch.zeros(_NAME_BYTES, dtype=torch.uint8)
    with contextlib.ExitStack() as stack:
        if dist.get_rank(group) == 0:
            name = stack.enter_context(_named_file(num_bytes))
        dist.broadcast(name, group=group, group_src=0)
        memory = _map_file(bytes(name.tolist()).hex(), num_bytes) if name.any() else None
        seen = torch.tensor(memory is not None)
        dist.all_reduce(seen, op=dist.ReduceOp.MIN, group=group)
    if memory is None and dist.get_rank(group) == 0:
        # Only now, when no rank waits any more: warnings may be errors.
        _warn_if_full(num_bytes)
    return SharedMemory(memory, group.size()) if memory is not None and seen else None


@contextlib.contextmanager
def _named_file(num_bytes: int) -> Iterator[torch.Tensor]:
    """Make a file in memory while ranks open it; yield its name, or zeros if there can be none."""
    name = secrets.token_bytes(_NAME_BYTES)
    path = _path(name.hex())
    try:
        try:
            _reserve(path, num_bytes)
        except (OSError, AttributeError):  # a system may have no such folder, or no such call
            name = bytes(_NAME_BYTES)
        yield torch.tensor(list(name), dtype=torch.uint8)
    finally:
        path.unlink(missing_ok=True)


def _reserve(path: Path, num_bytes: int) -> None:
    """Reserve all pages at once: writing where none are left ends the process (SIGBUS) without an error."""
    if num_bytes * _SHARE > _free_bytes():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    finally:
        os.close(descriptor)


def _free_bytes() -> int:
    room = os.statvfs(_FOLDER)
    return room.f_bavail * room.f_frsize


def _warn_if_full(num_bytes: int) -> None:
    # Other reasons, such as ranks on several hosts, are normal; this one the user can change.
    with contextlib.suppress(OSError, AttributeError):
        needed, free = num_bytes * _SHARE, _free_bytes()
        if needed > free:
            warnings.warn(
                f"{_FOLDER} has {free / _MIB:.1f} MiB free; with {needed / _MIB:.1f} (half of which is taken) ranks of "
                "this host would exchange through it. They go on by gloo, whose steps take longer. What to do: give it "
                "more room (docker run --shm-size=4g; in Kubernetes an emptyDir of medium Memory)",
                stacklevel=4,
            )


def _map_file(name: str, num_bytes: int) -> mmap.mmap | None:
    try:
        descriptor = os.open(_path(name), os.O_RDWR)
    except OSError:
        return None
    try:
        return mmap.mmap(descriptor, num_bytes)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)


def _path(name: str) -> Path:
    return _FOLDER / f"meshwright-{name}"


def aligned(num_bytes: int) -> int:
    """Return the next multiple of ``ALIGNMENT``."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


# --- Collectives of one group of ranks through shared memory.

# Gathers that FSDP2 has in flight at once: the one that it waits for, and the next.
_IN_FLIGHT = 2
# Gathers whose memory is in use or not known to be free: the one being unpacked, and those before and behind it.
_GATHERS = 3


@dataclass(frozen=True)
class _Slot:
    """Memory of one gather: its number, its extent, and a reference that ends with the tensors in it."""

    number: int
    start: int
    end: int
    part: weakref.ref[memoryview]


class _Arrival(dist.Work):
    """Work that is done when all ranks have packed for a gather."""

    def __init__(self, work: dist.Work, message: torch.Tensor) -> None:
        super().__init__()
        self._work, self._message = work, message

    def wait(self, *args: Any) -> bool:
        """Block until every rank has packed its shard."""
        return self._work.wait()

    def oldest_in_use(self) -> int | None:
        """Return the oldest gather that some rank had not unpacked when it began this one.

        None if ranks gathered different sizes.
        """
        self._work.wait()
        number, least, most = self._message.tolist()
        return int(number) if least == -most else None


class _SharedByRanks:
    """A group of ranks, the sizes that it will exchange, and the memory for them once it does.

    Args:
        group: The ranks, of one host or not.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        # Weak, for a registry keyed by groups must not keep them alive.
        self._ranks, self._sizes = weakref.ref(group), list[int]()
        self._memory: SharedMemory | None = None
        self._capacity = 0

    @property
    def _group(self) -> dist.ProcessGroup:
        group = self._ranks()
        assert group is not None
        return group

    @property
    def num_ranks(self) -> int:
        """Return the size of the group."""
        return self._group.size()

    def expect(self, num_bytes: int) -> None:
        """Announce the bytes that one unit will exchange at once; on all ranks, before the first exchange."""
        self._sizes.append(aligned(num_bytes))


class HostGathers(_SharedByRanks):
    """All-gathers of one group of ranks through a ring of shared memory.

    See [Note: shared-memory gathers]. A slot is reused once all ranks have unpacked it; the acknowledgement rides on a
    later gather.

    Args:
        group: The ranks, of one host or not.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._places: deque[_Slot] = deque()
        self._in_flight: deque[_Arrival] = deque(maxlen=_IN_FLIGHT)
        self._number = 0

    def allocate(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor to pack this rank's shard into and to unpack all shards from.

        It lies in shared memory if that has space. All ranks call this in the same order.
        """
        in_use = self._in_flight[0].oldest_in_use() if len(self._in_flight) == _IN_FLIGHT else 0
        self._release_before(in_use or 0)
        needed = sum(sorted(self._sizes)[-_GATHERS:])
        # At first, where blocks were added since, and where ranks found space for different layers.
        if in_use is None or self._capacity < needed:
            self._capacity = needed
            self._memory = shared_memory(self._group, self._capacity)
            self._places.clear()  # tensors that are left keep the old memory alive
        num_bytes = size * dtype.itemsize
        if self._memory is None or num_bytes > self._capacity:
            return torch.empty(size, dtype=dtype)
        start = self._find_space(num_bytes)
        if start is None:
            self._release_before(self._oldest_in_use_of_all())
            start = self._find_space(num_bytes)
        if start is None:
            return torch.empty(size, dtype=dtype)
        part = self._memory.part(start, num_bytes)
        self._places.append(_Slot(self._number, start, start + aligned(len(part)), weakref.ref(part)))
        return torch.frombuffer(part, dtype=dtype)

    def _release_before(self, number: int) -> None:
        while self._places and self._places[0].number < number:
            self._places.popleft()

    def _oldest_in_use(self) -> int:
        """Return the oldest gather that this rank has not unpacked."""
        return next((slot.number for slot in self._places if slot.part() is not None), self._number)

    def _oldest_in_use_of_all(self) -> int:
        oldest = torch.tensor(self._oldest_in_use())
        dist.all_reduce(oldest, op=dist.ReduceOp.MIN, group=self._group)
        return int(oldest)

    def _find_space(self, num_bytes: int) -> int | None:
        """Find the offset of ``num_bytes`` that are free on all ranks, behind the newest slot or at the start."""
        if not self._places:
            return 0
        first, last = self._places[0].start, self._places[-1].end
        if last > first:  # free: behind the newest, and before the oldest
            if last + num_bytes <= self._capacity:
                return last
            return 0 if num_bytes <= first else None
        return last if last + num_bytes <= first else None

    def gather(self, output: torch.Tensor, own: torch.Tensor, *, async_op: bool) -> dist.Work | None:
        """Fill ``output`` (ranks · elements), from :meth:`allocate`, with every rank's ``own``, its rank-th part."""
        is_shared = bool(self._places) and self._places[-1].number == self._number
        arrival = self._announce(output.nbytes) if self._memory is not None else None
        if is_shared and arrival is not None:
            if async_op:
                return arrival
            arrival.wait()
            return None
        work: dist.Work | None = all_gather_flat(output, own, group=self._group, async_op=async_op)
        return work

    def _announce(self, num_bytes: int) -> _Arrival:
        # A minimum of sizes and of negative sizes shows whether they were equal.
        message = torch.tensor([self._oldest_in_use(), num_bytes, -num_bytes])
        work: Any = dist.all_reduce(message, op=dist.ReduceOp.MIN, group=self._group, async_op=True)
        self._in_flight.append(_Arrival(work, message))
        self._number += 1
        return self._in_flight[-1]


class HostReductions(_SharedByRanks):
    """Reduce-scatters of one group of ranks: each packs its gradients into shared memory and sums its row of all.

    The capacity is that of one rank.

    Args:
        group: The ranks, of one host or not.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._all_summed: Any = None  # work that is done when every rank has read the last gradients

    def allocate(self, size: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return a tensor to pack a row for every rank into; None if shared memory has no space for it."""
        if self._capacity < max(self._sizes):
            self._capacity = max(self._sizes)
            self._memory = shared_memory(self._group, self._capacity * self.num_ranks)
        if self._memory is None or size * dtype.itemsize > self._capacity:
            return None
        if self._all_summed is not None:
            self._all_summed.wait()
        return self._part(self._group.rank(), 0, size, dtype)

    def reduce(self, output: torch.Tensor) -> None:
        """Fill ``output`` (elements) with the sum of all ranks' rows for this one, from the last allocation."""
        packed = torch.zeros(1)
        dist.all_reduce(packed, group=self._group)
        row = self._group.rank() * output.nbytes
        _sum_rows([self._part(rank, row, output.numel(), output.dtype) for rank in range(self.num_ranks)], output)
        self._all_summed = dist.all_reduce(packed, group=self._group, async_op=True)

    def _part(self, rank: int, start: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        assert self._memory is not None
        return torch.frombuffer(self._memory.part(rank * self._capacity + start, size * dtype.itemsize), dtype=dtype)


def _sum_rows(rows: Sequence[torch.Tensor], total: torch.Tensor) -> None:
    """Sum rows in their order, half precision in fp32."""
    first, second, *others = rows
    if not others:
        torch.add(first, second, out=total)
        return
    wide = total if total.dtype.itemsize > 2 else torch.empty_like(total, dtype=torch.float32)
    torch.add(first, second, out=wide)
    for other in others:
        wide += other
    if wide is not total:
        total.copy_(wide)


class HostExchange:
    """The gathers and reductions of all units that one group of ranks shards.

    Args:
        group: The ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.gathers = HostGathers(group)
        self.reductions = HostReductions(group)


# --- What takes the place of FSDP2's collectives.

_Exchanges = MutableMapping[dist.ProcessGroup, HostExchange]
# Of units that are sharded one by one, as BMTrain's Blocks are; an entry ends with its group.
_of_blocks: weakref.WeakKeyDictionary[dist.ProcessGroup, HostExchange] = weakref.WeakKeyDictionary()


def exchange_on_host(model: nn.Module, *, is_block: bool = False) -> None:
    """Replace the collectives of every unit of a sharded model on CPUs; values travel as they are.

    All ranks call it alike, for they map the memory together.

    Args:
        model: Sharded with ``fully_shard``.
        is_block: Whether it is a part of a model, which shares its memory with the other parts.
    """
    known: _Exchanges = _of_blocks if is_block else {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in parameter_groups(module):
                gathering, reducing = (
                    known.setdefault(ranks, HostExchange(ranks))
                    for ranks in (gathering_ranks_of(group), reducing_ranks_of(group))
                )
                _replace_collectives(module, group, gathering.gathers, reducing.reductions)


def _replace_collectives(module: FSDPModule, group: Any, gathers: HostGathers, reductions: HostReductions) -> None:
    policy = group.mp_policy
    parameters = [(each.sharded_param, each.padded_sharded_param_size.numel()) for each in group.fsdp_params]
    # With a post-forward mesh, some gathers are over fewer ranks.
    if not reshards_to_fewer(group):
        gathers.expect(gathers.num_ranks * sum(numel * _itemsize(p, policy.param_dtype) for p, numel in parameters))
        module.set_custom_all_gather(_Gather(gathers))  # type: ignore[arg-type]
    dtype, trained = policy.reduce_dtype or policy.param_dtype, [each for each in parameters if each[0].requires_grad]
    reductions.expect(reductions.num_ranks * sum(numel * _itemsize(p, dtype) for p, numel in trained))
    module.set_custom_reduce_scatter(_Reduce(reductions))  # type: ignore[arg-type]


def _itemsize(parameter: torch.Tensor, dtype: torch.dtype | None) -> int:
    return (dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype).itemsize


def is_mean(op: Any) -> bool:
    """Return whether FSDP2 asks a reduction for a mean of gradients, and not for their sum.

    Raises:
        StrategyError: When it asks for something else.
    """
    if op in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
        return bool(op == dist.ReduceOp.AVG)
    raise StrategyError(
        "Gradients cannot be reduced in this way",
        expected="a sum or a mean",
        got=str(op),
        fix="do not call set_gradient_divide_factor on the model",
    )


class Comm:
    """Base of custom collectives: FSDP2 asks them for buffers before it calls them."""

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a buffer for FSDP2 to pack into."""
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(Comm):
    """The all-gather of one unit."""

    def __init__(self, gathers: HostGathers) -> None:
        self._gathers = gathers

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._gathers.allocate(math.prod(size), dtype).view(size)

    @torch.no_grad()
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill ``output_tensor`` (ranks · elements) with every rank's ``input_tensor``."""
        return self._gathers.gather(output_tensor, input_tensor, async_op=async_op)


class _Reduce(Comm):
    """The reduce-scatter of one unit.

    gloo's ring adds a row up rank by rank, each waiting for the one before; here all rows are there at once. They are
    added in the order of ranks, and half precision in fp32.
    """

    def __init__(self, reductions: HostReductions) -> None:
        self._reductions = reductions
        # Elements that were packed, until FSDP2 asks for the buffer of the sum.
        self._size: int | None = None
        self._is_shared = False

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the buffer that this rank packs into; then one for the sum, which stays as the gradient."""
        numel = math.prod(size)
        if self._size == numel * self._reductions.num_ranks:
            self._size = None
            return super().allocate(size, dtype=dtype, device=device)
        self._size, packed = numel, self._reductions.allocate(numel, dtype)
        self._is_shared = packed is not None
        return super().allocate(size, dtype=dtype, device=device) if packed is None else packed.view(size)

    @torch.no_grad()
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Fill ``output_tensor`` (elements) with the sum or mean of the ranks' rows for this one."""
        mean = is_mean(op)
        if self._is_shared:
            self._reductions.reduce(output_tensor)
        else:
            arrived = torch.empty_like(input_tensor)
            dist.all_to_all_single(arrived, input_tensor, group=group)
            torch.sum(arrived.view(group.size(), -1), 0, out=output_tensor)
        if mean:
            output_tensor.div_(group.size())
