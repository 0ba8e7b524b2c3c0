"""Simulate the bubble of a pipeline schedule, action by action; a reference for the cost model and measurements."""

from __future__ import annotations

from meshwright.methods.pipeline.schedules import actions


def bubble_fraction(name: str, ranks: int, stages_per_rank: int, micro_batches: int) -> float:
    """Return the share of a step in which the slowest rank waits.

    Stages are equal, communication is free, a backward takes as long as two forwards, and I and W as one each. Every
    action starts as soon as its rank and its inputs are ready.
    """
    order = _numbered(actions(name, ranks, stages_per_rank, micro_batches))
    last = ranks * stages_per_rank - 1
    done: dict[tuple[str, int, int], float] = {}
    clock, position = [0.0] * ranks, [0] * ranks
    while any(position[rank] < len(order[rank]) for rank in range(ranks)):
        before = sum(position)
        for rank, row in enumerate(order):
            while position[rank] < len(row):
                kind, stage, part = row[position[rank]]
                ready = _ready(kind, stage, part, last, done)
                if ready is None:
                    break
                clock[rank] = max(clock[rank], ready) + (2.0 if kind == "B" else 1.0)
                done["B" if kind in "BI" else kind, stage, part] = clock[rank]
                position[rank] += 1
        assert sum(position) > before, "the schedule waits for itself"
    return 1 - 3.0 * stages_per_rank * micro_batches / max(clock)


def _numbered(order: list[list[tuple[str, int, int]]]) -> list[list[tuple[str, int, int]]]:
    """Number micro-batches from 0 per kind and stage: in torch's table of 1F1B a rank's start at its own number."""
    numbered = []
    for row in order:
        seen: dict[tuple[str, int], int] = {}
        again = []
        for kind, stage, _ in row:
            family = "B" if kind in "BI" else kind
            number = seen.get((family, stage), 0)
            seen[family, stage] = number + 1
            again.append((kind, stage, number))
        numbered.append(again)
    return numbered


def _ready(kind: str, stage: int, part: int, last: int, done: dict[tuple[str, int, int], float]) -> float | None:
    """Return the time at which an action's inputs are ready; None if they are not computed yet."""
    if kind == "F":
        return 0.0 if stage == 0 else done.get(("F", stage - 1, part))
    if kind == "W":
        return 0.0  # its own I came before on the same rank
    return done.get(("F", stage, part)) if stage == last else done.get(("B", stage + 1, part))
