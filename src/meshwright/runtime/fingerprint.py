"""Short numbers that tell whether tensors of several ranks hold the same bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from meshwright.runtime.agreement import gather_objects, named_ranks
from meshwright.runtime.processes import world_size

_WORD = 8  # bytes
_ROWS = 64  # parts of a tensor whose order counts
_ODD = 0x5851F42D4C957F2D  # Knuth's multiplier of MMIX


@torch.no_grad()
def bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """A number of 64 bits that another one of the same shape nearly always differs in; int64, 0-dim, on its device.

    The bits are read as integers of 64 bits and added up modulo 2^64, in one pass at the speed of memory: any one
    flipped bit, and any change within one word, changes the sum. NaN and -0.0 count by their bits, too. 64 parts of the
    tensor are weighted by odd numbers, so that most exchanges of places are found. No float is computed, so the number
    is the same on every device and with every number of threads.

    Args:
        tensor: Plain, of any type: of a DTensor, the local part.
    """
    flat = tensor.detach().reshape(-1).contiguous()
    if flat.storage_offset() * flat.element_size() % _WORD:
        flat = flat.clone()  # words begin where the storage of the copy does
    each_byte = flat.view(torch.uint8)
    words = each_byte[: each_byte.numel() // _WORD * _WORD].view(torch.int64)
    whole = words.numel() // _ROWS * _ROWS
    sums = words[:whole].view(_ROWS, -1).sum(1)
    total = (sums * torch.arange(1, 2 * _ROWS, 2, device=flat.device)).sum() + words[whole:].sum() * _ODD
    rest = each_byte[words.numel() * _WORD :].to(torch.int64)
    return total + (rest << torch.arange(0, 8 * rest.numel(), 8, device=flat.device)).sum()


def bit_sums(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The :func:`bit_sum` of each; int64 on the host, which waits once for each device."""
    sums = [bit_sum(tensor) for tensor in tensors]
    places: dict[torch.device, list[int]] = {}
    for place, each in enumerate(sums):
        places.setdefault(each.device, []).append(place)
    found = torch.zeros(len(sums), dtype=torch.int64)
    for own in places.values():
        found[own] = torch.stack([sums[place] for place in own]).cpu()
    return found


@dataclass(frozen=True)
class Difference:
    """A tensor that is not equal on all the ranks that ought to hold the same."""

    name: str
    """The first such tensor."""
    odd: tuple[int, ...]
    """Ranks that differ from most of the others; all of them where there is no majority."""
    majority: tuple[int, ...]
    """The ranks that agree; empty where there is no majority."""
    others: tuple[str, ...] = ()
    """Further such tensors."""

    def __str__(self) -> str:
        more = f" and {len(self.others)} more" if self.others else ""
        if not self.majority:
            return f"{self.name}{more} on {named_ranks(self.odd)}, of which no majority holds the same"
        return f"{self.name}{more} on {named_ranks(self.odd)}, while {named_ranks(self.majority)} hold the same"


def outvoted(values: Mapping[int, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Divides ranks by what most of them hold.

    Args:
        values: By rank.

    Returns:
        Ranks that differ from the majority, and the majority: more than half of all. Without one, all ranks and none.
        Where all agree, none and all.
    """
    value, votes = Counter(values.values()).most_common(1)[0]
    if 2 * votes <= len(values):
        return tuple(values), ()
    return tuple(rank for rank in values if values[rank] != value), tuple(r for r in values if values[r] == value)


def difference_between_ranks(tensors: Mapping[str, torch.Tensor]) -> Difference | None:
    """The first tensor that is not equal on all ranks; None where all are. Collective: one number per rank, and more
    only where it differs.

    Args:
        tensors: With values; the same names, shapes and types on every rank.
    """
    if world_size() == 1:
        return None
    sums: list[int] = bit_sums(tensors.values()).tolist()
    if len(set(gather_objects(hash(tuple(sums))))) == 1:  # of integers, a hash is the same in every process
        return None
    every: list[list[int]] = gather_objects(sums)
    differing = [place for place, held in enumerate(zip(*every, strict=True)) if len(set(held)) > 1]
    odd, majority = outvoted({rank: own[differing[0]] for rank, own in enumerate(every)})
    names = list(tensors)
    return Difference(names[differing[0]], odd, majority, tuple(names[place] for place in differing[1:]))
