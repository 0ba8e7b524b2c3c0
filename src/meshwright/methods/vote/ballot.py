"""Which ranks hold the same part of which weight, and which of them disagree."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from meshwright.runtime import bit_sums, gather_objects, outvoted, world_size

_NOBODY = 0  # where a rank holds fewer weights than others


@dataclass(frozen=True)
class Outcome:
    """One part of a weight that ranks hold unequally."""

    key: int
    odd: tuple[int, ...]
    """Ranks outside of the majority; all that hold it where there is none."""
    majority: tuple[int, ...]


def key_of(name: str, weight: torch.Tensor, place: Iterable[object] = ()) -> int:
    """A number that two ranks share if, and only if, they are to hold the same bits.

    Args:
        name: Of the weight.
        weight: A DTensor tells by its mesh which part a rank holds; anything else is whole.
        place: What else tells ranks apart, such as the replica.
    """
    parts = list(place)
    if isinstance(weight, DTensor):
        mesh, coordinate = weight.device_mesh, weight.device_mesh.get_coordinate()
        assert coordinate is not None, "a rank outside of the mesh has no such parameter"
        names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
        split = zip(names, weight.placements, coordinate, strict=True)
        parts += [(axis, at) for axis, placement, at in split if not placement.is_replicate()]
    digest = hashlib.sha256(repr((name, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True) or 1


class Ballot:
    """The weights of all ranks, of which those of one key ought to be equal.

    Args:
        keys: Of this rank's weights. Making a ballot is collective.
        device: Whose links carry it, and the votes.
    """

    def __init__(self, keys: list[int], device: torch.device) -> None:
        self._most = max(gather_objects(len(keys)))
        self._own, self._device = keys, device
        every = gather(keys, self._most, device) if world_size() > 1 else np.array([keys])
        flat = every.reshape(-1)
        self._order = np.argsort(flat, kind="stable")
        in_order = flat[self._order]
        self._keys = in_order
        self._first = np.searchsorted(in_order, in_order)  # where the run of each one's key begins
        _, counts = np.unique(flat[flat != _NOBODY], return_counts=True)
        self.num_compared = int((counts > 1).sum())
        """Parts of weights that several ranks hold."""

    def vote(self, tensors: Iterable[torch.Tensor]) -> list[Outcome]:
        """Compares what the ranks hold; collective: one all-gather of 8 bytes for every weight.

        Args:
            tensors: This rank's parts, in the order of the keys.

        Returns:
            What is unequal, the same on every rank.
        """
        if not self.num_compared:
            return []
        sums = gather(bit_sums(tensors).tolist(), self._most, self._device).reshape(-1)[self._order]
        odd = (sums != sums[self._first]) & (self._keys != _NOBODY)
        found = []
        for key in np.unique(self._keys[odd]).tolist():
            of_key = np.flatnonzero(self._keys == key)
            ranks = (self._order[of_key] // self._most).tolist()
            found.append(Outcome(key, *outvoted(dict(zip(ranks, sums[of_key].tolist(), strict=True)))))
        return found


def gather(numbers: list[int], length: int, device: torch.device) -> np.ndarray:
    """Integers of every rank, filled up to one length: (world, length)."""
    own = torch.full((length,), _NOBODY, dtype=torch.int64)
    own[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
    every = torch.empty(world_size(), length, dtype=torch.int64, device=device)
    dist.all_gather(list(every), own.to(device))
    return every.cpu().numpy()


def names_of(outcomes: Iterable[Outcome], names: Mapping[int, str]) -> dict[int, str]:
    """The names of what is unequal, also of weights that this rank has not; collective.

    Args:
        outcomes: Equal on every rank.
        names: This rank's, by key.
    """
    found: dict[int, str] = {}
    for own in gather_objects({each.key: names[each.key] for each in outcomes if each.key in names}):
        found |= own
    return found
