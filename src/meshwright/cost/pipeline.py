"""Seconds of a pipeline: the order in which each rank computes, played through with each rank's own times."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

Action = tuple[str, int, int]  # F or B, the stage, the micro-batch
SPLIT_BACKWARD = ("zbv", "dualpipev")  # schedules that leave gradients of weights for later

_PLAYED_ACTIONS = 100_000
_SETTLED_ROUNDS = 1  # after so many rounds over the ranks every further micro-batch takes the same


@dataclass(frozen=True)
class StageTimes:
    """What one rank's part of one micro-batch takes.

    Args:
        forward_s: All its stages, forward.
        backward_s: All its stages, backward.
    """

    forward_s: float
    backward_s: float


@functools.cache
def order(schedule: str, ranks: int, stages_per_rank: int, micro_batches: int) -> list[list[Action]]:
    """What every rank computes, in order.

    ``gpipe`` (Huang et al. 2019), ``1f1b`` (Narayanan et al. 2019) and ``interleaved`` (Narayanan et al. 2021, §2.2) as
    they are; the schedules that split backward (``zbv``, ``dualpipev``) have an order of their own, see
    :func:`pipeline_s`.
    """
    return [_row(schedule, rank, ranks, stages_per_rank, micro_batches) for rank in range(ranks)]


def pipeline_s(
    schedule: str, times: Sequence[StageTimes], hop_s: float, stages_per_rank: int, micro_batches: int
) -> float:
    """Seconds from the first forward to the last backward.

    Args:
        schedule: Its name.
        times: Of every rank of the pipeline.
        hop_s: From one stage to the next.
        stages_per_rank: Stages of a rank.
        micro_batches: Of a step. Beyond a few rounds each takes as long as those before.
    """
    ranks = len(times)
    slowest = max(each.forward_s + each.backward_s for each in times)
    if ranks == 1:
        return slowest * micro_batches
    if ranks * ranks * stages_per_rank > _PLAYED_ACTIONS:  # of so many ranks: as if all were the slowest
        return slowest * micro_batches + (ranks - 1) * (slowest / stages_per_rank + 2 * hop_s)
    if schedule in SPLIT_BACKWARD:
        return _split_s(times, hop_s, stages_per_rank, micro_batches)
    settled = micro_batches if schedule == "gpipe" else settled_after(schedule, ranks, micro_batches)

    def played(number: int) -> float:
        rows = order(schedule, ranks, stages_per_rank, number)
        return max(end for _, _, end in play(rows, times, hop_s, stages_per_rank))

    whole = played(settled)
    if settled == micro_batches:
        return whole
    each = _per_round(schedule, ranks, micro_batches)
    rate = max((whole - played(settled - each)) / each, slowest)  # hops that the ranks wait for count, too
    return whole + (micro_batches - settled) * rate


def _split_s(times: Sequence[StageTimes], hop_s: float, stages_per_rank: int, micro_batches: int) -> float:
    """Schedules that split backward: gradients of weights wait until a rank has nothing else to do."""
    ranks, slowest = len(times), max(each.forward_s + each.backward_s for each in times)
    # Qi et al. 2024, Table 2 and DeepSeek-AI 2025, Table 2: with I = W = F the bubble is at most a rank's F a hop.
    full = slowest * micro_batches + (ranks - 1) * (slowest / 6 / stages_per_rank + 2 * hop_s)
    # That takes enough micro-batches to fill all stages. Few of them follow the first one through all stages and back,
    # and no rank has anything to do meanwhile but gradients of weights; the first rank's last ones come at the end.
    weights = [min(each.forward_s, each.backward_s / 2) for each in times]  # as much as forward, and no recomputation
    there_and_back = [each.forward_s + each.backward_s - own for each, own in zip(times, weights, strict=True)]
    few = sum(there_and_back) + (micro_batches - 1) * max(there_and_back) + weights[0]
    return max(full, few + 2 * stages_per_rank * (ranks - 1) * hop_s)


def settled_after(schedule: str, ranks: int, micro_batches: int) -> int:
    """So many micro-batches show what all of them do: every further round of them takes as long as the last."""
    each = _per_round(schedule, ranks, micro_batches)
    return min(micro_batches, (_SETTLED_ROUNDS + 1) * each + micro_batches % each)


def _per_round(schedule: str, ranks: int, micro_batches: int) -> int:
    """Micro-batches that go through one stage of a rank before the next stage's turn; torch makes rounds equal."""
    return micro_batches // max(1, micro_batches // ranks) if schedule == "interleaved" else ranks


def play(
    rows: Sequence[Sequence[Action]], times: Sequence[StageTimes], hop_s: float, stages_per_rank: int
) -> list[tuple[int, Action, float]]:
    """Plays an order through: ``(rank, action, when it ends)``, as they end."""
    ranks, last = len(rows), len(rows) * stages_per_rank - 1
    done: dict[Action, float] = {}
    clock, position = [0.0] * ranks, [0] * ranks
    played: list[tuple[int, Action, float]] = []
    waiting = set(range(ranks))
    while waiting:
        before = len(played)
        for rank in sorted(waiting):
            row = rows[rank]
            while position[rank] < len(row):
                action = row[position[rank]]
                ready = ready_s(action, last, hop_s, done)
                if ready is None:
                    break
                seconds = times[rank].forward_s if action[0] == "F" else times[rank].backward_s
                clock[rank] = max(clock[rank], ready) + seconds / stages_per_rank
                done[action] = clock[rank]
                played.append((rank, action, clock[rank]))
                position[rank] += 1
        waiting = {rank for rank in waiting if position[rank] < len(rows[rank])}
        if len(played) == before:
            raise ValueError("the order of a pipeline waits for itself")
    return played


def ready_s(action: Action, last: int, hop_s: float, done: dict[Action, float]) -> float | None:
    """When an action's input is there; None while what makes it has not been played."""
    kind, stage, part = action
    if kind == "F":
        source = ("F", stage - 1, part) if stage else None
    else:
        source = ("B", stage + 1, part) if stage < last else ("F", stage, part)
    if source is None:
        return 0.0
    end = done.get(source)
    return None if end is None else end + (0.0 if source[1] == stage else hop_s)


def _row(schedule: str, rank: int, ranks: int, stages_per_rank: int, micro_batches: int) -> list[Action]:
    if schedule == "gpipe":
        forwards, backwards = _passes(rank, ranks, 1, micro_batches, micro_batches)
        return [*forwards, *backwards]
    each = _per_round(schedule, ranks, micro_batches)
    forwards, backwards = _passes(rank, ranks, stages_per_rank, micro_batches, each)
    if stages_per_rank == 1:
        warm_up = ranks - rank - 1
    else:
        warm_up = (ranks - rank - 1) * 2 + (stages_per_rank - 1) * each
    warm_up = min(warm_up, len(forwards))
    row = forwards[:warm_up]
    for index in range(len(forwards) - warm_up):
        row += [forwards[warm_up + index], backwards[index]]
    return row + backwards[len(forwards) - warm_up :]


def _passes(
    rank: int, ranks: int, per_rank: int, micro_batches: int, per_round: int
) -> tuple[list[Action], list[Action]]:
    """A rank's forwards and its backwards: round by round, stage after stage."""
    forwards: list[Action] = []
    backwards: list[Action] = []
    for first in range(0, micro_batches, per_round):
        parts = range(first, min(first + per_round, micro_batches))
        for turn in range(per_rank):
            forwards += [("F", turn * ranks + rank, part) for part in parts]
            backwards += [("B", (per_rank - 1 - turn) * ranks + rank, part) for part in parts]
    return forwards, backwards
