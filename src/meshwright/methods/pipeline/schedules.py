"""The pipeline schedules: torch's names, their rules, where their stages lie, and what a rank holds while they run."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from meshwright.cost import BackwardAt
from meshwright.errors import StrategyError

# torch.distributed.pipelining is imported where a pipeline is: it takes long, and most runs have none.
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zbv", "dualpipev"]


@dataclass(frozen=True)
class Schedule:
    """What there is to know of one schedule."""

    torch_name: str
    v_shaped: bool = False  # a rank's two stages lie opposite: the first rank holds the first stage and the last
    splits_backward: bool = False  # gradients of inputs and of weights are computed apart
    needs_full: bool = False  # at least as many micro-batches as stages


SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule("GPipe"),  # Huang et al. 2019
    "1f1b": Schedule("1F1B", needs_full=True),  # Narayanan et al. 2019 (PipeDream-Flush)
    "interleaved": Schedule("Interleaved1F1B"),  # Narayanan et al. 2021, §2.2
    "zbv": Schedule("ZBVZeroBubble", v_shaped=True, splits_backward=True),  # Qi et al. 2024
    "dualpipev": Schedule("DualPipeV", v_shaped=True, splits_backward=True, needs_full=True),  # DeepSeek-AI 2025
}

# What torch, PiPPy and ATorch's examples call them, in lower case.
_SPELLINGS = {"interleaved1f1b": "interleaved", "zbvzerobubble": "zbv", "zero_bubble_v": "zbv", "fill_drain": "gpipe"}


def schedule_name(value: Any) -> Any:
    """Torch's and the seeds' spellings of a schedule as Meshwright's."""
    if not isinstance(value, str):
        return value
    return _SPELLINGS.get(value.lower(), value.lower())


def stage_ranks(name: str, ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Return the pipeline rank of every stage."""
    if SCHEDULES[name].v_shaped:
        return (*range(ranks), *reversed(range(ranks)))
    return tuple(range(ranks)) * stages_per_rank


def check_micro_batches(name: str, ranks: int, stages: int, micro_batches: int) -> None:
    """Refuse numbers of micro-batches that a schedule cannot run with.

    Raises:
        StrategyError: Saying which it can.
    """
    rounds = max(1, micro_batches // ranks)
    if SCHEDULES[name].needs_full and micro_batches < stages:
        expected = f"at least {stages}, one for every stage"
    elif name == "interleaved" and micro_batches % rounds:
        expected = f"up to {ranks}, or a multiple of the number of rounds ({rounds})"
    else:
        return
    raise StrategyError(
        f"pipeline_parallel: the schedule {name!r} cannot run with this number of micro-batches",
        expected=expected,
        got=str(micro_batches),
        fix="set num_micro_batches, or use the schedule 'gpipe', which takes any number",
    )


@functools.cache
def _any_stage() -> Any:
    """Return what torch's schedules take for a stage; made once, since it takes longer than all they do with it."""
    from unittest import mock

    from torch.distributed.pipelining.stage import PipelineStage

    return mock.create_autospec(PipelineStage, instance=True)


def _torch_order(schedule: type[Any], ranks: int, stages_per_rank: int, micro_batches: int) -> list[list[Any]]:
    """Return what torch's ``get_schedule_ops`` returns."""
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti

    stage = _any_stage()
    stage.group_rank, stage.group_size, stage.submod = 0, ranks, None
    stage.num_stages = ranks * stages_per_rank
    several = issubclass(schedule, PipelineScheduleMulti)
    made: Any = schedule([stage] * stages_per_rank if several else stage, micro_batches)  # type: ignore[arg-type]
    return [made.pipeline_order[rank] for rank in range(ranks)]


@functools.cache
def actions(name: str, ranks: int, stages_per_rank: int, micro_batches: int) -> list[list[tuple[str, int, int]]]:
    """Return what every rank computes, in order: ``(kind, stage, micro-batch)``.

    Kinds: F forward, B backward, I and W the backward of inputs and of weights. The answer is kept: do not change it.
    """
    from torch.distributed.pipelining.schedules import get_schedule_class

    every = _torch_order(get_schedule_class(SCHEDULES[name].torch_name), ranks, stages_per_rank, micro_batches)
    # torch prints an action as 2F0, and two that overlap as (2F0;1B3)…
    printed = [" ".join(str(action) for action in row if action is not None) for row in every]
    return [[(kind, int(stage), int(part)) for stage, kind, part in _ACTION.findall(row)] for row in printed]


def live_peaks(
    name: str, ranks: int, stages_per_rank: int, micro_batches: int, stage_sizes: Sequence[int]
) -> tuple[int, ...]:
    """Return the most that is kept for backward at once, on every rank.

    Args:
        stage_sizes: What one micro-batch keeps in every stage, in any unit; the answer is in the same.
    """
    return tuple(
        max(sum(count * stage_sizes[stage] for stage, count in held) for held in row)
        for row in held_at_most(name, ranks, stages_per_rank, micro_batches)
    )


def most_in_flight(name: str, ranks: int, stages_per_rank: int, micro_batches: int) -> int:
    """Return the largest of :func:`live_peaks` for stages that keep one unit each."""
    if SCHEDULES[name].v_shaped:
        return 2 * min(micro_batches, ranks)
    if stages_per_rank == 1:
        return micro_batches if name == "gpipe" else min(micro_batches, ranks)
    per_round = micro_batches // max(1, micro_batches // ranks)
    return min(stages_per_rank * micro_batches, 2 * (ranks - 1) + (stages_per_rank - 1) * per_round + 1)


@functools.cache
def held_at_most(
    name: str, ranks: int, stages_per_rank: int, micro_batches: int
) -> tuple[tuple[tuple[tuple[int, int], ...], ...], ...]:
    """Return how many micro-batches of each of its stages a rank keeps at once, ``(stage, count)``.

    The largest such only.
    """
    if stages_per_rank == 1:  # torch's tables say the same, and take long to make for many ranks
        counts = (micro_batches if name == "gpipe" else min(micro_batches, ranks - rank) for rank in range(ranks))
        return tuple((((rank, count),),) for rank, count in enumerate(counts))
    found = []
    for row in actions(name, ranks, stages_per_rank, micro_batches):
        held = dict.fromkeys(sorted({stage for _, stage, _ in row}), 0)
        moments = set()
        for kind, stage, _ in row:
            # The gradients of weights are the last to need what forward saved.
            held[stage] += {"F": 1, "B": -1, "I": 0, "W": -1}[kind]
            moments.add(tuple(held.items()))
        found.append(tuple(m for m in sorted(moments) if not any(_less(m, other) for other in moments)))
    return tuple(found)


@functools.cache
def backward_moments(
    name: str, ranks: int, stages_per_rank: int, micro_batches: int
) -> tuple[tuple[BackwardAt, ...], ...]:
    """Of every rank, the moments of backward of its stages at which most micro-batches are kept."""
    if stages_per_rank == 1:
        return tuple(_of_one_stage(name, ranks - rank, micro_batches) for rank in range(ranks))
    found = []
    for row in actions(name, ranks, stages_per_rank, micro_batches):
        own = sorted({stage for _, stage, _ in row})
        held, begun = dict.fromkeys(own, 0), dict.fromkeys(own, False)
        moments = set()
        for kind, stage, _ in row:
            if kind != "F":
                moments.add(BackwardAt(own.index(stage), tuple(held.values()), tuple(begun.values())))
                begun[stage] |= kind != "I"
            held[stage] += {"F": 1, "B": -1, "I": 0, "W": -1}[kind]
        found.append(tuple(m for m in sorted(moments) if not any(_holds_less(m, other) for other in moments)))
    return tuple(found)


def _of_one_stage(name: str, stages_left: int, micro_batches: int) -> tuple[BackwardAt, ...]:
    first = micro_batches if name == "gpipe" else min(micro_batches, stages_left)
    later = first if first < micro_batches else first - 1
    accumulated = (BackwardAt(0, (later,), (True,)),) if later else ()
    return (BackwardAt(0, (first,), (False,)), *accumulated)


def _holds_less(one: BackwardAt, other: BackwardAt) -> bool:
    if one.stage != other.stage or not all(map(operator.le, one.held, other.held)):
        return False
    return one != other and all(map(operator.le, one.accumulated, other.accumulated))


def _less(held: tuple[tuple[int, int], ...], other: tuple[tuple[int, int], ...]) -> bool:
    return held != other and all(map(operator.le, held, other))  # of the same stages


def bubble_fraction(name: str, ranks: int, stages_per_rank: int, micro_batches: int) -> float:
    """Return share of a step in which a rank waits, for equal stages, free communication and backward = 2 x forward.

    Every action starts as soon as its rank and its inputs are free; I and W take as long as F each.
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
    """Return the micro-batches counted anew, per kind and stage.

    Torch's table of 1F1B starts a rank's forwards at its number.
    """
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
    """When the inputs of an action are there; None while they are not known to be."""
    if kind == "F":
        return 0.0 if stage == 0 else done.get(("F", stage - 1, part))
    if kind == "W":
        return 0.0  # its own I came before on the same rank
    return done.get(("F", stage, part)) if stage == last else done.get(("B", stage + 1, part))
