"""A pipeline whose ranks take turns on fewer cores: what one leaves idle, another uses, as far as it has work."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.cost.pipeline import Action, StageTimes, ready_s


def play_on_cores(
    rows: Sequence[Sequence[Action]], times: Sequence[StageTimes], hop_s: float, stages_per_rank: int, cores: int
) -> float:
    """Seconds until the last action ends: whoever is ready first takes the core that is free first.

    Args:
        rows: What every rank computes, in order.
        times: Of every rank, with a core of its own.
        hop_s: From one stage to the next.
        stages_per_rank: Stages of a rank.
        cores: Of all ranks together.

    Raises:
        ValueError: When the order waits for itself.
    """
    ranks, last = len(rows), len(rows) * stages_per_rank - 1
    done: dict[Action, float] = {}
    clock, position, free = [0.0] * ranks, [0] * ranks, [0.0] * cores
    for _ in range(sum(map(len, rows))):
        known = [
            (max(clock[rank], ready), rank)
            for rank in range(ranks)
            if position[rank] < len(rows[rank])
            and (ready := ready_s(rows[rank][position[rank]], last, hop_s, done)) is not None
        ]
        if not known:
            raise ValueError("the order of a pipeline waits for itself")
        ready, rank = min(known)
        action, core = rows[rank][position[rank]], free.index(min(free))
        seconds = times[rank].forward_s if action[0] == "F" else times[rank].backward_s
        free[core] = clock[rank] = done[action] = max(ready, free[core]) + seconds / stages_per_rank
        position[rank] += 1
    return max(done.values())
