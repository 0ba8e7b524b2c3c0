"""FSDP2's collectives on CPUs: through memory that the ranks of a host share, or by gloo's all-to-all."""

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

_UNDER_WAY = 2  # gathers that FSDP2 has at once: the one that is waited for, and the next
_GATHERS = 3  # whose memory is in use, or not known to be free: one that is unpacked, and those before and behind it


@dataclass(frozen=True)
class _Place:
    """Memory of a gather: its number, where it lies, and what lives as long as tensors in it."""

    number: int
    start: int
    end: int
    part: weakref.ref[memoryview]


class _Arrival(dist.Work):
    """All ranks have packed for a gather; what they tell each other of it."""

    def __init__(self, work: dist.Work, told: torch.Tensor) -> None:
        super().__init__()
        self._work, self._told = work, told

    def wait(self, *args: Any) -> bool:
        """Until then."""
        return self._work.wait()

    def unpacked(self) -> int | None:
        """Return the first gather that some rank still unpacked when it began this one.

        None where sizes were not the same.
        """
        self._work.wait()
        number, least, most = self._told.tolist()
        return int(number) if least == -most else None


class _Ranks:
    """A group of ranks, what they will exchange, and the memory that they have for it once they do.

    Args:
        group: The ranks, of one host or not.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._ranks, self._sizes = weakref.ref(group), list[int]()
        self._memory: SharedMemory | None = None
        self._capacity = 0

    @property
    def _group(self) -> dist.ProcessGroup:
        group = self._ranks()  # weak: what is remembered by groups ends with them
        assert group is not None
        return group

    @property
    def num_ranks(self) -> int:
        """Of the group."""
        return self._group.size()

    def expect(self, num_bytes: int) -> None:
        """So many bytes of one unit will be exchanged at once; all ranks say so before they are."""
        self._sizes.append(aligned(num_bytes))


class HostGathers(_Ranks):
    """All-gathers of one group of ranks, one after the other through a ring of shared memory.

    A part is used again when all ranks have unpacked it, which they tell each other with a later gather. As all ranks
    gather in one order, they find the same room, or none: then gloo carries the gather.

    Args:
        group: The ranks, of one host or not.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._places: deque[_Place] = deque()
        self._under_way: deque[_Arrival] = deque(maxlen=_UNDER_WAY)
        self._number = 0

    def allocate(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor to pack a shard into and to unpack all from: in shared memory, where that has room."""
        unpacked = self._under_way[0].unpacked() if len(self._under_way) == _UNDER_WAY else 0
        self._forget(unpacked or 0)
        needed = sum(sorted(self._sizes)[-_GATHERS:])
        # At first, where blocks were added since, and where ranks found room for different layers.
        if unpacked is None or self._capacity < needed:
            self._capacity = needed
            self._memory = shared_memory(self._group, self._capacity)
            self._places.clear()  # tensors that are left keep what they lie in
        num_bytes = size * dtype.itemsize
        if self._memory is None or num_bytes > self._capacity:
            return torch.empty(size, dtype=dtype)
        start = self._room(num_bytes)
        if start is None:
            self._forget(self._ask())
            start = self._room(num_bytes)
        if start is None:
            return torch.empty(size, dtype=dtype)
        part = self._memory.part(start, num_bytes)
        self._places.append(_Place(self._number, start, start + aligned(len(part)), weakref.ref(part)))
        return torch.frombuffer(part, dtype=dtype)

    def _forget(self, unpacked: int) -> None:
        """Let go of the places of gathers before the first that some rank still unpacks."""
        while self._places and self._places[0].number < unpacked:
            self._places.popleft()

    def _in_use(self) -> int:
        """This rank's first gather that it has not unpacked."""
        return next((place.number for place in self._places if place.part() is not None), self._number)

    def _ask(self) -> int:
        """Return the same of all ranks."""
        first = torch.tensor(self._in_use())
        dist.all_reduce(first, op=dist.ReduceOp.MIN, group=self._group)
        return int(first)

    def _room(self, num_bytes: int) -> int | None:
        """Return where so many bytes are free on all ranks, behind the last place or at the beginning."""
        if not self._places:
            return 0
        first, last = self._places[0].start, self._places[-1].end
        if last > first:  # free: behind the last, and before the first
            if last + num_bytes <= self._capacity:
                return last
            return 0 if num_bytes <= first else None
        return last if last + num_bytes <= first else None

    def gather(self, output: torch.Tensor, own: torch.Tensor, *, async_op: bool) -> dist.Work | None:
        """Fill ``output`` (ranks · elements), from :meth:`allocate`, with every rank's ``own``, its rank-th part."""
        shared = bool(self._places) and self._places[-1].number == self._number
        arrival = self._tell(output.nbytes) if self._memory is not None else None
        if shared and arrival is not None:
            if async_op:
                return arrival
            arrival.wait()
            return None
        work: dist.Work | None = all_gather_flat(output, own, group=self._group, async_op=async_op)
        return work

    def _tell(self, num_bytes: int) -> _Arrival:
        told = torch.tensor([self._in_use(), num_bytes, -num_bytes])
        work: Any = dist.all_reduce(told, op=dist.ReduceOp.MIN, group=self._group, async_op=True)
        self._under_way.append(_Arrival(work, told))
        self._number += 1
        return self._under_way[-1]


class HostReductions(_Ranks):
    """Reduce-scatters of one group of ranks: each packs its gradients into shared memory, and adds up its row of all.

    The capacity is that of one rank.

    Args:
        group: The ranks, of one host or not.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._added: Any = None  # of the last time: all ranks have

    def allocate(self, size: int, dtype: torch.dtype) -> torch.Tensor | None:
        """A tensor to pack a row for every rank into; None where that has no room."""
        if self._capacity < max(self._sizes):
            self._capacity = max(self._sizes)
            self._memory = shared_memory(self._group, self._capacity * self.num_ranks)
        if self._memory is None or size * dtype.itemsize > self._capacity:
            return None
        if self._added is not None:
            self._added.wait()
        return self._part(self._group.rank(), 0, size, dtype)

    def reduce(self, output: torch.Tensor) -> None:
        """Fill ``output`` (elements) with the sum of the ranks' rows for this one; all were allocated last."""
        arrived = torch.zeros(1)
        dist.all_reduce(arrived, group=self._group)
        row = self._group.rank() * output.nbytes
        _add([self._part(rank, row, output.numel(), output.dtype) for rank in range(self.num_ranks)], output)
        self._added = dist.all_reduce(arrived, group=self._group, async_op=True)

    def _part(self, rank: int, start: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        assert self._memory is not None
        return torch.frombuffer(self._memory.part(rank * self._capacity + start, size * dtype.itemsize), dtype=dtype)


def _add(rows: Sequence[torch.Tensor], total: torch.Tensor) -> None:
    """Add rows up in their order, half precision in fp32."""
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
    """What the units that one group of ranks shards exchange through.

    Args:
        group: The ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.gathers = HostGathers(group)
        self.reductions = HostReductions(group)


# --- FSDP2's collectives on CPUs: through memory that the ranks of a host share, or by gloo's all-to-all.
#
# That and a sum take half the time of gloo's own reduce-scatter.


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


_Exchanges = MutableMapping[dist.ProcessGroup, HostExchange]
# By the ranks that shard Blocks one by one; the entry of a group that is gone goes with it.
_of_blocks: weakref.WeakKeyDictionary[dist.ProcessGroup, HostExchange] = weakref.WeakKeyDictionary()


def exchange_on_host(model: nn.Module, *, is_block: bool = False) -> None:
    """CollectiveLog the collectives of every unit of a sharded model on CPUs, whose values travel as they are.

    All ranks call it alike: memory is theirs together.

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
                    for ranks in (group._all_gather_process_group, group._reduce_scatter_process_group)
                )
                _exchange(module, group, gathering.gathers, reducing.reductions)


def _exchange(module: FSDPModule, group: Any, gathers: HostGathers, reductions: HostReductions) -> None:
    """Of one unit; ``group`` is what FSDP2 keeps of its parameters."""
    policy = group.mp_policy
    parameters = [(each.sharded_param, each.padded_sharded_param_size.numel()) for each in group.fsdp_params]
    if not group._use_post_forward_mesh:  # which gathers part of the time over fewer ranks
        gathers.expect(gathers.num_ranks * sum(numel * _itemsize(p, policy.param_dtype) for p, numel in parameters))
        module.set_custom_all_gather(_Gather(gathers))  # type: ignore[arg-type]
    dtype, trained = policy.reduce_dtype or policy.param_dtype, [each for each in parameters if each[0].requires_grad]
    reductions.expect(reductions.num_ranks * sum(numel * _itemsize(p, dtype) for p, numel in trained))
    module.set_custom_reduce_scatter(_Reduce(reductions))  # type: ignore[arg-type]


def _itemsize(parameter: torch.Tensor, dtype: torch.dtype | None) -> int:
    return (dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype).itemsize


class Comm:
    """What FSDP2 asks of a custom collective besides being called."""

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a buffer for FSDP2 to pack into."""
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(Comm):
    """In the place of FSDP2's all-gather of one unit."""

    def __init__(self, gathers: HostGathers) -> None:
        self._gathers = gathers

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return what all ranks pack into, and unpack from."""
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
    """In the place of FSDP2's reduce-scatter of one unit.

    gloo's ring adds a row up rank by rank, each waiting for the one before; here all rows are there at once. They are
    added in the order of ranks, and half precision in fp32.
    """

    def __init__(self, reductions: HostReductions) -> None:
        self._reductions = reductions
        self._size: int | None = None  # packed, until FSDP2 asks for a place for the sum
        self._shared = False

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return what this rank packs into; then a place for the sum, which stays as the gradient."""
        numel = math.prod(size)
        if self._size == numel * self._reductions.num_ranks:
            self._size = None
            return super().allocate(size, dtype=dtype, device=device)
        self._size, packed = numel, self._reductions.allocate(numel, dtype)
        self._shared = packed is not None
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
        if self._shared:
            self._reductions.reduce(output_tensor)
        else:
            arrived = torch.empty_like(input_tensor)
            dist.all_to_all_single(arrived, input_tensor, group=group)
            torch.sum(arrived.view(group.size(), -1), 0, out=output_tensor)
        if mean:
            output_tensor.div_(group.size())


# --- Memory that the processes of one host have in common.

ALIGNMENT = 64
"""Bytes of a line of the processor's cache: parts of the memory begin at a multiple of it."""

_FOLDER = Path("/dev/shm")
_NAME_BYTES = 16
_MIB = 2**20
_SHARE = 2  # of what is free at most one part in so many is taken: workers of data loaders need the folder, too


class SharedMemory:
    """Zeros that every rank of a group sees and may write.

    Args:
        memory: What the operating system gave.
        num_ranks: That have it together.
    """

    def __init__(self, memory: mmap.mmap, num_ranks: int) -> None:
        self._memory, self.num_ranks = memoryview(memory), num_ranks
        _held.add(self)

    def part(self, start: int, num_bytes: int) -> memoryview:
        """So many bytes from ``start``; a tensor made of it (``torch.frombuffer``) keeps it alive."""
        return self._memory[start : start + num_bytes]

    @property
    def own_bytes(self) -> int:
        """Return a rank's share of it."""
        return len(self._memory) // self.num_ranks


_held: weakref.WeakSet[SharedMemory] = weakref.WeakSet()


def held_bytes() -> int:
    """This rank's share of all memory that it has with others, which no count of tensors sees."""
    return sum(memory.own_bytes for memory in _held)


def shared_memory(group: dist.ProcessGroup, num_bytes: int) -> SharedMemory | None:
    """Memory that the ranks of a group share. Collective.

    The file behind it has no name any more when this returns: nothing is left behind when ranks die.

    Args:
        group: One whose CPU tensors travel.
        num_bytes: The same on all ranks, above 0.

    Returns:
        The memory; None, on all ranks, where these are not on one host (or in containers that share no memory), or
        where it has no room, which a warning says.
    """
    name = torch.zeros(_NAME_BYTES, dtype=torch.uint8)
    with contextlib.ExitStack() as made:
        if dist.get_rank(group) == 0:
            name = made.enter_context(_file(num_bytes))
        dist.broadcast(name, group=group, group_src=0)
        memory = _opened(bytes(name.tolist()).hex(), num_bytes) if name.any() else None
        seen = torch.tensor(memory is not None)
        dist.all_reduce(seen, op=dist.ReduceOp.MIN, group=group)
    if memory is None and dist.get_rank(group) == 0:
        _warn_if_full(num_bytes)  # now that nobody waits: warnings may be errors
    return SharedMemory(memory, group.size()) if memory is not None and seen else None


@contextlib.contextmanager
def _file(num_bytes: int) -> Iterator[torch.Tensor]:
    """A file in memory while ranks open it; its name, zeros where there can be none."""
    name = secrets.token_bytes(_NAME_BYTES)
    path = _path(name.hex())
    try:
        try:
            _fill(path, num_bytes)
        except (OSError, AttributeError):  # a system may have no such folder, or no such call
            name = bytes(_NAME_BYTES)
        yield torch.tensor(list(name), dtype=torch.uint8)
    finally:
        path.unlink(missing_ok=True)


def _fill(path: Path, num_bytes: int) -> None:
    """Take all pages at once: a process that writes where there are none left is ended (SIGBUS), without an error."""
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
    """Other reasons are the rule, as of ranks on several hosts; this one somebody can change."""
    with contextlib.suppress(OSError, AttributeError):
        needed, free = num_bytes * _SHARE, _free_bytes()
        if needed > free:
            warnings.warn(
                f"{_FOLDER} has {free / _MIB:.1f} MiB free; with {needed / _MIB:.1f} (half of which is taken) ranks of "
                "this host would exchange through it. They go on by gloo, whose steps take longer. What to do: give it "
                "more room (docker run --shm-size=4g; in Kubernetes an emptyDir of medium Memory)",
                stacklevel=4,
            )


def _opened(name: str, num_bytes: int) -> mmap.mmap | None:
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
