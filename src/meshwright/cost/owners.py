"""Dealing things of different sizes out to ranks."""

from __future__ import annotations

from collections.abc import Sequence


def balanced_owners(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Gives every thing one owner, the largest first to whoever has least (Graham's LPT rule).

    No rank gets more than 4/3 of what the best division gives the fullest; equal on every rank that asks.

    Returns:
        The owner of each.
    """
    loads = [0] * num_ranks
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        owners[index] = min(range(num_ranks), key=lambda rank: loads[rank])
        loads[owners[index]] += sizes[index]
    return owners
