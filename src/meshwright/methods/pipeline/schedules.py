"""Describe torch's pipeline schedules: names, rules, the rank of each stage, micro-batches in flight, the bubble.

Torch's own tables of actions are the source for what a rank computes when; closed forms replace them where building
the tables would take long.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from meshwright.cost import BackwardAt
from meshwright.cost.activations import BackwardPart
from meshwright.errors import StrategyError

M = TypeVar("M")
_ACTION = re.compile(r"(\d+)(SEND_F|SEND_B|RECV_F|RECV_B|[FBIW])(\d+)")
Action = tuple[str, int, int]
"""What a rank does: the kind, the stage, and the micro-batch."""

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zbv", "dualpipev"]


@dataclass(frozen=True)
class Schedule:
    """Properties of one schedule."""

    torch_name: str
    v_shaped: bool = False  # rank r holds stage r and its mirror image: the first rank has the first and the last
    splits_backward: bool = False  # gradients of inputs and of weights are computed apart
    needs_full: bool = False  # needs at least as many micro-batches as stages


SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule("GPipe"),  # Huang et al. 2019
    "1f1b": Schedule("1F1B", needs_full=True),  # Narayanan et al. 2019 (PipeDream-Flush)
    "interleaved": Schedule("Interleaved1F1B"),  # Narayanan et al. 2021, §2.2
    "zbv": Schedule("ZBVZeroBubble", v_shaped=True, splits_backward=True),  # Qi et al. 2024
    "dualpipev": Schedule("DualPipeV", v_shaped=True, splits_backward=True, needs_full=True),  # DeepSeek-AI 2025
}

# Names in torch, PiPPy and ATorch's examples, in lower case.
_SPELLINGS = {"interleaved1f1b": "interleaved", "zbvzerobubble": "zbv", "zero_bubble_v": "zbv", "fill_drain": "gpipe"}


def schedule_name(value: Any) -> Any:
    """Translate other systems' spellings of a schedule to Meshwright's; leave anything but strings alone."""
    return _SPELLINGS.get(value.lower(), value.lower()) if isinstance(value, str) else value


def stage_ranks(name: str, ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Return the pipeline rank of every stage."""
    if SCHEDULES[name].v_shaped:
        return (*range(ranks), *reversed(range(ranks)))
    return tuple(range(ranks)) * stages_per_rank


def check_micro_batches(name: str, ranks: int, stages: int, micro_batches: int) -> None:
    """Refuse a number of micro-batches that a schedule cannot run with.

    Raises:
        StrategyError: With the numbers that it can run with.
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
    """Return a mock that torch's schedules accept as a stage; made once, since that is slower than their tables."""
    from unittest import mock

    from torch.distributed.pipelining.stage import PipelineStage

    return mock.create_autospec(PipelineStage, instance=True)


def _torch_order(schedule: type[Any], ranks: int, stages_per_rank: int, micro_batches: int) -> list[list[Any]]:
    """Return torch's table of actions, as its ``get_schedule_ops`` does."""
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti

    stage = _any_stage()
    stage.group_rank, stage.group_size, stage.submod = 0, ranks, None
    stage.num_stages = ranks * stages_per_rank
    several = issubclass(schedule, PipelineScheduleMulti)
    made: Any = schedule([stage] * stages_per_rank if several else stage, micro_batches)  # type: ignore[arg-type]
    return [getattr(made, "pipeline_order_with_comms", made.pipeline_order)[rank] for rank in range(ranks)]


@functools.cache
def actions(name: str, ranks: int, stages_per_rank: int, micro_batches: int) -> list[list[Action]]:
    """List what every rank computes, in order, as ``(kind, stage, micro-batch)``.

    Kinds: F forward, B backward, I and W the backward of inputs and of weights. The result is cached: do not change it.
    """
    rows = _actions_and_messages(name, ranks, stages_per_rank, micro_batches)
    return [[action for action in row if len(action[0]) == 1] for row in rows]


@functools.cache
def _actions_and_messages(name: str, ranks: int, stages_per_rank: int, micro_batches: int) -> list[list[Action]]:
    """List the same with the calls that send and receive hidden states and gradients, where torch's table has them."""
    # Imported here since it takes long, and most runs have no pipeline.
    from torch.distributed.pipelining.schedules import get_schedule_class

    return listed(_torch_order(get_schedule_class(SCHEDULES[name].torch_name), ranks, stages_per_rank, micro_batches))


def listed(order: Iterable[Iterable[Any]]) -> list[list[Action]]:
    """Return torch's table of what every rank does, as plain values."""
    # torch prints an action as 2F0, and two that overlap as (2F0;1B3)…
    printed = [" ".join(str(action) for action in row if action is not None) for row in order]
    return [[(kind, int(stage), int(part)) for stage, kind, part in _ACTION.findall(row)] for row in printed]


def answered(rows: Sequence[Sequence[Action]], ranks: Sequence[int]) -> list[dict[Action, list[Action]]]:
    """Return for every rank which of its messages have arrived when it has another one.

    A rank that sends has computed with what it needed before, so that it has received that. Messages are ``F`` and
    ``B``, hidden states and gradients, with a stage and a micro-batch: the stage that sends them, or that computes with
    the one that has arrived.

    Args:
        rows: What every rank does, with its messages.
        ranks: The rank of every stage.
    """
    found: list[dict[Action, list[Action]]] = [{} for _ in rows]
    for here, row in enumerate(rows):
        taken: dict[int, list[Action]] = {}  # by the rank that sent it
        for kind, stage, number in row:
            if kind.startswith("SEND_"):
                to = stage + (1 if kind == "SEND_F" else -1)
                if arrived := taken.pop(ranks[to], None):
                    found[ranks[to]][kind[-1], to, number] = arrived
            elif kind in "FBI":
                way, before = ("F", stage - 1) if kind == "F" else ("B", stage + 1)
                if 0 <= before < len(ranks) and ranks[before] != here:
                    taken.setdefault(ranks[before], []).append((way, before, number))
    return found


def live_peaks(
    name: str, ranks: int, stages_per_rank: int, micro_batches: int, stage_sizes: Sequence[int]
) -> tuple[int, ...]:
    """Return the most that every rank saves for backward at one time.

    Args:
        name: The schedule.
        ranks: Size of the pipeline axis.
        stages_per_rank: Stages on every rank.
        micro_batches: Micro-batches of a step.
        stage_sizes: What one micro-batch saves in every stage, in any unit; the result is in the same.
    """
    return tuple(
        max(sum(count * stage_sizes[stage] for stage, count in moment) for moment in row)
        for row in in_flight_peaks(name, ranks, stages_per_rank, micro_batches)
    )


def most_in_flight(name: str, ranks: int, stages_per_rank: int, micro_batches: int) -> int:
    """Return the largest of :func:`live_peaks` for stages that save one unit each."""
    if SCHEDULES[name].v_shaped:
        return 2 * min(micro_batches, ranks)
    if stages_per_rank == 1:
        return micro_batches if name == "gpipe" else min(micro_batches, ranks)
    per_round = micro_batches // max(1, micro_batches // ranks)
    return min(stages_per_rank * micro_batches, 2 * (ranks - 1) + (stages_per_rank - 1) * per_round + 1)


def steady_micro_batches(name: str, ranks: int) -> int:
    """Return the number of micro-batches from which on the moments with most of them in flight stay the same.

    With twice the ranks no less are in flight, but the schedule ends before a rank has gradients of all of its stages.
    """
    return 3 * ranks if name == "interleaved" else 2 * ranks + 1


@functools.cache
def in_flight_peaks(
    name: str, ranks: int, stages_per_rank: int, micro_batches: int
) -> tuple[tuple[tuple[tuple[int, int], ...], ...], ...]:
    """Return for every rank the moments with most micro-batches in flight, as ``(stage, count)`` of its stages.

    Moments at which another one has as many or more of every stage are left out.
    """
    if stages_per_rank == 1:  # torch's tables agree, but take long to build for many ranks
        counts = (micro_batches if name == "gpipe" else min(micro_batches, ranks - rank) for rank in range(ranks))
        return tuple((((rank, count),),) for rank, count in enumerate(counts))
    found = []
    for row in actions(name, ranks, stages_per_rank, micro_batches):
        in_flight = dict.fromkeys(sorted({stage for _, stage, _ in row}), 0)
        moments = set()
        for kind, stage, _ in row:
            in_flight[stage] += _CHANGE[kind]
            moments.add(tuple(in_flight.items()))
        found.append(_largest(moments, _less))
    return tuple(found)


# Micro-batches in flight after an action; the gradients of weights are the last to need what forward saved.
_CHANGE = {"F": 1, "B": -1, "I": 0, "W": -1}
_HALFWAY = {"B": 0, "I": 1, "W": -1}  # the same of those with the gradients of inputs alone
_PARTS: dict[str, BackwardPart] = {"B": "both", "I": "inputs", "W": "weights"}


@functools.cache
def backward_moments(
    name: str, ranks: int, stages_per_rank: int, micro_batches: int
) -> tuple[tuple[BackwardAt, ...], ...]:
    """Return for every rank the moments during backward with most micro-batches in flight."""
    if stages_per_rank == 1:
        return tuple(_of_one_stage(name, ranks - rank, micro_batches) for rank in range(ranks))
    found, rank_of = [], stage_ranks(name, ranks, stages_per_rank)
    rows = _actions_and_messages(name, ranks, stages_per_rank, micro_batches)
    for here, (row, arrived) in enumerate(zip(rows, answered(rows, rank_of), strict=True)):
        own = sorted({stage for _, stage, _ in row})
        posted: set[tuple[bool, int, int]] = set()
        in_flight, begun, sent = dict.fromkeys(own, 0), dict.fromkeys(own, False), dict.fromkeys(own, 0)
        halfway, after = dict.fromkeys(own, 0), -1
        moments = set()
        for kind, stage, number in row:
            if kind.startswith("RECV_"):
                posted.add((kind == "RECV_F", stage, number))
            if len(kind) > 1:
                continue
            posted.discard((kind == "F", stage, number))
            for way, of, _ in arrived.get(("F" if kind == "F" else "B", stage, number), ()) if kind != "W" else ():
                sent[of] -= way == "B"
            if kind != "F":
                held = tuple(in_flight.values()), tuple(begun.values()), tuple(sent.values())
                parts = _PARTS[kind], tuple(halfway.values())
                moments.add(BackwardAt(own.index(stage), *held, *parts, after, len(posted)))
                begun[stage] |= kind != "I"
                sent[stage] += kind != "W" and stage > 0 and rank_of[stage - 1] != here
                halfway[stage] += _HALFWAY[kind]
            after = own.index(stage) if kind == "F" else -1
            in_flight[stage] += _CHANGE[kind]
        found.append(_largest(moments, _is_covered))
    return tuple(found)


def _of_one_stage(name: str, stages_left: int, micro_batches: int) -> tuple[BackwardAt, ...]:
    first = micro_batches if name == "gpipe" else min(micro_batches, stages_left)
    later = first if first < micro_batches else first - 1
    accumulated = (BackwardAt(0, (later,), (True,)),) if later else ()
    return (BackwardAt(0, (first,), (False,)), *accumulated)


def _largest(moments: Collection[M], is_below: Callable[[M, M], bool]) -> tuple[M, ...]:
    """Return the moments that are below no other, sorted.

    ``is_below`` is a partial order in which what is below comes first when sorted. So each is compared with the largest
    that come behind it alone, which are few where a schedule repeats itself.
    """
    kept: list[M] = []
    for each in sorted(moments, reverse=True):  # type: ignore[type-var]
        if not any(is_below(each, other) for other in kept):
            kept.append(each)
    return tuple(reversed(kept))


def _is_covered(one: BackwardAt, other: BackwardAt) -> bool:
    if (one.stage, one.part, one.halfway, one.after) != (other.stage, other.part, other.halfway, other.after):
        return False
    if not all(map(operator.le, one.held, other.held)):
        return False
    one_more, other_more = ((*each.accumulated, *each.sent, each.posted) for each in (one, other))
    are_less = map(operator.le, one_more, other_more)
    return one != other and all(are_less)


def _less(moment: tuple[tuple[int, int], ...], other: tuple[tuple[int, int], ...]) -> bool:
    return moment != other and all(map(operator.le, moment, other))  # of the same stages
