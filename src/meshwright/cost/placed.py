"""Amounts with the places of a model they belong to, summed by the stages of a pipeline."""

from __future__ import annotations

import functools

Placed = tuple[tuple[tuple[int, ...], int], ...]
"""Amounts, each with the places it belongs to: blocks of the list that a pipeline cuts, by their numbers; -1 is before
the list, and the number of its blocks is behind it. What belongs to several places is once in a stage with any."""


@functools.lru_cache(maxsize=512)
def sums_of(ranges: tuple[tuple[int, int], ...], num_blocks: int, amounts: Placed) -> tuple[int, ...]:
    """What of some amounts every stage has, the blocks from ``first`` to ``end`` of a list of ``num_blocks``.

    Kept, as every rank of a pipeline asks for the same.

    The stage of the first block has also what is before the list, that of the last what is behind it.
    """
    stages: dict[int, list[int]] = {}
    for stage, (first, end) in enumerate(ranges):
        before = (-1,) if first == 0 < end else ()
        for place in (*before, *range(first, end + 1 if end == num_blocks else end)):
            stages.setdefault(place, []).append(stage)
    found = [0] * len(ranges)
    for places, size in amounts:
        for stage in {stage for place in places for stage in stages.get(place, ())}:
            found[stage] += size
    return tuple(found)
