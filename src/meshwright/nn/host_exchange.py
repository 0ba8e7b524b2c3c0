"""What ranks of one host hand each other through memory that they share: gathered weights, sums of gradients.

A collective of gloo copies what it sends into the kernel and out of it again. Here FSDP2 packs into memory that all
ranks see, and unpacks from it: a few numbers that all ranks reduce tell that everybody has packed. They also tell what
each rank exchanges, by which ranks that run different layers are found out; gloo pairs them by order alone.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from meshwright.distributed.shared_memory import SharedMemory, aligned, shared_memory
from meshwright.distributed.transport import all_gather_flat
from meshwright.errors import ModelError

_UNDER_WAY = 2  # gathers that FSDP2 has at once: the one that is waited for, and the next
_GATHERS = 3  # whose memory is in use, or not known to be free: one that is unpacked, and those before and behind it


class _Units:
    """What a group of ranks will exchange: names and sizes, in an order that is the same on all of them."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._sizes: list[int] = []

    def add(self, name: str, num_bytes: int) -> int:
        """The unit's number."""
        self._names.append(name)
        self._sizes.append(aligned(num_bytes))
        return len(self._names) - 1

    def largest(self, count: int) -> int:
        """Bytes of so many of them together."""
        return sum(sorted(self._sizes)[-count:])

    def numbers(self, unit: int, num_bytes: int) -> list[int]:
        """What ranks compare of an exchange by the least of each: equal where they agree, but for who they are."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        return [unit * ranks + rank, -unit * ranks + rank, num_bytes, -num_bytes]

    def check(self, agreed: torch.Tensor) -> None:
        """Looks at the least of all ranks' :meth:`numbers`.

        Raises:
            ModelError: On all ranks, when these had different ones.
        """
        first, last, least, most = (int(each) for each in agreed.tolist())
        ranks = dist.get_world_size()
        (unit, rank), (other, behind) = divmod(first, ranks), divmod(last, ranks)
        if unit != -other:
            raise ModelError(
                "The ranks have run different layers, and would get each other's weights and gradients",
                expected="the same layers in the same order on every rank: all of them exchange each one together",
                got=f"{self._names[unit]} on rank {rank} and {self._names[-other]} on rank {behind}, in one exchange",
                fix="let all ranks decide alike which layers run, by a torch.Generator of one seed (a transformers "
                "model: layerdrop=0 in its config); or leave the sharding method out, and set "
                "find_unused_parameters=True",
            )
        if least != -most:
            raise ModelError(
                f"The ranks have gradients of different parameters of {self._names[unit]}",
                expected="the same parameters in the loss of every rank",
                got=f"{least:,} to {-most:,} bytes of gradients",
                fix="let every parameter take part in every rank's loss (add 0 * parameter.sum()); or leave the "
                "sharding method out, and set find_unused_parameters=True",
            )


@dataclass(frozen=True)
class _Place:
    """Memory of a gather: its number, where it lies, and what lives as long as tensors in it."""

    number: int
    start: int
    end: int
    part: weakref.ref[memoryview]


class _Arrival(dist.Work):
    """All ranks have packed for a gather; what they tell each other of it."""

    def __init__(self, work: dist.Work, agreed: torch.Tensor, units: _Units, *, refuses: bool) -> None:
        super().__init__()
        self._work, self._agreed, self._units, self._refuses = work, agreed, units, refuses

    def wait(self, *args: Any) -> bool:
        """Until then.

        Raises:
            ModelError: The first time, when they have different units.
        """
        self._work.wait()
        refuses, self._refuses = self._refuses, False
        if refuses:
            self._units.check(self._agreed[1:])
        return True

    def unpacked(self) -> int | None:
        """The first gather that some rank still unpacked when it began this one; None where they are apart."""
        self._work.wait()
        with contextlib.suppress(ModelError):
            self._units.check(self._agreed[1:])
            return int(self._agreed[0])
        return None


class HostGathers:
    """All-gathers of one group of ranks, one after the other through a ring of shared memory.

    A part is used again when all ranks have unpacked it, which they tell each other with a later gather. As all ranks
    gather in one order, they find the same room, or none: then gloo carries the gather.

    Args:
        group: The ranks, of one host or not.
        refuses: Whether ranks at different layers end here; else somebody else tells them, at the end of the step.
    """

    def __init__(self, group: dist.ProcessGroup, *, refuses: bool) -> None:
        self._group, self._refuses, self.units = group, refuses, _Units()
        self._memory: SharedMemory | None = None
        self._capacity = 0
        self._places: deque[_Place] = deque()
        self._under_way: deque[_Arrival] = deque(maxlen=_UNDER_WAY)
        self._number = 0

    @property
    def num_ranks(self) -> int:
        """Of the group."""
        return self._group.size()

    def allocate(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor to pack a shard into and to unpack all from: in shared memory, where that has room."""
        unpacked = self._under_way[0].unpacked() if len(self._under_way) == _UNDER_WAY else 0
        self._forget(unpacked or 0)
        # At first, where blocks were added since, and where ranks have found room for different layers.
        if unpacked is None or self._capacity < self.units.largest(_GATHERS):
            self._capacity = self.units.largest(_GATHERS)
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
        """Lets go of the places of gathers before the first that some rank still unpacks."""
        while self._places and self._places[0].number < unpacked:
            self._places.popleft()

    def _in_use(self) -> int:
        """This rank's first gather that it has not unpacked."""
        return next((place.number for place in self._places if place.part() is not None), self._number)

    def _ask(self) -> int:
        """The same of all ranks."""
        first = torch.tensor(self._in_use())
        dist.all_reduce(first, op=dist.ReduceOp.MIN, group=self._group)
        return int(first)

    def _room(self, num_bytes: int) -> int | None:
        """Where so many bytes are free on all ranks, behind the last place or at the beginning."""
        if not self._places:
            return 0
        first, last = self._places[0].start, self._places[-1].end
        if last > first:  # free: behind the last, and before the first
            if last + num_bytes <= self._capacity:
                return last
            return 0 if num_bytes <= first else None
        return last if last + num_bytes <= first else None

    def gather(self, unit: int, output: torch.Tensor, own: torch.Tensor, *, async_op: bool) -> dist.Work | None:
        """Fills ``output`` (ranks · elements), from :meth:`allocate`, with every rank's ``own``, its rank-th part."""
        shared = bool(self._places) and self._places[-1].number == self._number
        arrival = self._tell(unit, output.nbytes) if self._memory is not None else None
        if shared and arrival is not None:
            if async_op:
                return arrival
            arrival.wait()
            return None
        work: dist.Work | None = all_gather_flat(output, own, group=self._group, async_op=async_op)
        return work

    def _tell(self, unit: int, num_bytes: int) -> _Arrival:
        agreed = torch.tensor([self._in_use(), *self.units.numbers(unit, num_bytes)])
        work: Any = dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=self._group, async_op=True)
        self._under_way.append(_Arrival(work, agreed, self.units, refuses=self._refuses))
        self._number += 1
        return self._under_way[-1]


class HostReductions:
    """Reduce-scatters of one group of ranks: each packs its gradients into shared memory, and adds up its row of all.

    Args:
        group: The ranks, of one host or not.
        refuses: Whether ranks at different layers end here; else somebody else tells them, at the end of the step.
    """

    def __init__(self, group: dist.ProcessGroup, *, refuses: bool) -> None:
        self._group, self._refuses, self.units = group, refuses, _Units()
        self._memory: SharedMemory | None = None
        self._capacity = 0  # of each rank
        self._added: Any = None  # of the last time: all ranks have

    @property
    def num_ranks(self) -> int:
        """Of the group."""
        return self._group.size()

    def allocate(self, size: int, dtype: torch.dtype) -> torch.Tensor | None:
        """A tensor to pack a row for every rank into; None where that has no room."""
        if self._capacity < self.units.largest(1):
            self._capacity = self.units.largest(1)
            self._memory = shared_memory(self._group, self._capacity * self.num_ranks)
        if self._memory is None or size * dtype.itemsize > self._capacity:
            return None
        if self._added is not None:
            self._added.wait()
        return self._part(self._group.rank(), 0, size, dtype)

    def reduce(self, unit: int, output: torch.Tensor, packed: torch.Tensor) -> None:
        """Fills ``output`` (elements) with the sum of the ranks' rows for this one; ``packed`` was allocated last."""
        agreed = torch.tensor(self.units.numbers(unit, packed.nbytes))
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=self._group)
        if self._refuses:
            self.units.check(agreed)
        row = self._group.rank() * output.nbytes
        _add([self._part(rank, row, output.numel(), output.dtype) for rank in range(self.num_ranks)], output)
        self._added = dist.all_reduce(agreed[:1], group=self._group, async_op=True)

    def _part(self, rank: int, start: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        assert self._memory is not None
        return torch.frombuffer(
            self._memory.part(rank * self._capacity + start, size * dtype.itemsize), dtype=dtype, count=size
        )


def _add(rows: Sequence[torch.Tensor], total: torch.Tensor) -> None:
    """Adds rows up in their order, half precision in fp32."""
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
        refuses: As for its two parts.
    """

    def __init__(self, group: dist.ProcessGroup, *, refuses: bool) -> None:
        self.gathers = HostGathers(group, refuses=refuses)
        self.reductions = HostReductions(group, refuses=refuses)
