"""Schedules played against time: tasks on the streams of a rank, and the actions of a pipeline over its ranks."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """A piece of work on one stream.

    Args:
        name: Description for people.
        stream: The stream that runs it: ``compute``, ``link``, ``copy``, or a rank's of these.
        seconds: Duration.
        after: Indices of the tasks that must have ended before; all of them stand earlier in the list.
    """

    name: str
    stream: str
    seconds: float
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Event:
    """A task as it ran."""

    name: str
    stream: str
    start_s: float
    end_s: float
    critical: bool = False  # whether a shorter one would have ended the whole earlier


def schedule(tasks: Sequence[Task]) -> list[Event]:
    """Run tasks as early as their streams and dependencies allow, and mark the critical path."""
    free: dict[str, tuple[float, int]] = {}  # per stream: when it is free, and which task it ran last
    starts: list[float] = []
    ends: list[float] = []
    cause: list[int] = []
    for index, task in enumerate(tasks):
        start, waits_for = free.get(task.stream, (0.0, -1))
        for other in task.after:
            if ends[other] > start:
                start, waits_for = ends[other], other
        starts.append(start)
        ends.append(start + task.seconds)
        cause.append(waits_for)
        free[task.stream] = ends[index], index
    critical = _critical(ends, cause)
    return [
        Event(task.name, task.stream, starts[index], ends[index], index in critical) for index, task in enumerate(tasks)
    ]


def makespan_s(tasks: Sequence[Task]) -> float:
    """Return when the last task ends; as :func:`schedule`, without events."""
    free: dict[str, float] = {}
    ends: list[float] = []
    for task in tasks:
        start = free.get(task.stream, 0.0)
        for other in task.after:
            if ends[other] > start:
                start = ends[other]
        free[task.stream] = start + task.seconds
        ends.append(start + task.seconds)
    return max(ends, default=0.0)


def _critical(ends: Sequence[float], cause: Sequence[int]) -> set[int]:
    found: set[int] = set()
    index = max(range(len(ends)), key=ends.__getitem__, default=-1)
    while index >= 0:
        found.add(index)
        index = cause[index]
    return found


# --- One micro-batch on one rank, with the gathers and reductions that run beside it.

_PLAYED = 8  # blocks; each further one takes as long as the last


@dataclass(frozen=True)
class Passes:
    """Seconds of one micro-batch by block; collectives that run beside computing stand apart."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    outside_forward_s: float
    outside_backward_s: float
    gather_forward_s: float  # per block
    gather_backward_s: float  # per block
    reduce_s: float  # per block
    gather_outside_s: float  # of what is outside the blocks
    reduce_outside_s: float
    interference: float
    shared: float = 0.0
    weights_s: float = 0.0  # of backward: gradients of weights, which can wait
    gathers_ahead: bool = True  # in backward: while the block before computes, and not after it

    @property
    def forward_total_s(self) -> float:
        """Seconds of computing in forward."""
        return sum(self.forward_s) + self.outside_forward_s

    @property
    def backward_total_s(self) -> float:
        """Seconds of computing in backward."""
        return sum(self.backward_s) + self.outside_backward_s

    @property
    def compute_s(self) -> float:
        """Seconds of computing in both."""
        return self.forward_total_s + self.backward_total_s

    @property
    def all_gathers_s(self) -> float:
        """Seconds of all gathers of forward and backward, were they alone."""
        return self.gather_outside_s + (self.gather_forward_s + self.gather_backward_s) * len(self.forward_s)

    @property
    def all_reductions_s(self) -> float:
        """Seconds of all reductions, were they alone."""
        return self.reduce_outside_s + self.reduce_s * len(self.forward_s)


def pass_s(passes: Passes, *, gather: bool, reduce: bool) -> float:
    """Return the seconds of the micro-batch.

    Of many blocks, the mean one is played a few times, and the rest is extrapolated.
    """
    count = len(passes.forward_s)
    if not (gather and passes.all_gathers_s) and not (reduce and passes.all_reductions_s):
        return passes.compute_s
    if count <= _PLAYED:
        return makespan_s(pass_tasks(passes, gather=gather, reduce=reduce))
    forward, backward = sum(passes.forward_s) / count, sum(passes.backward_s) / count

    def of(blocks: int) -> float:
        fewer = dataclasses.replace(passes, forward_s=(forward,) * blocks, backward_s=(backward,) * blocks)
        return makespan_s(pass_tasks(fewer, gather=gather, reduce=reduce))

    few = of(_PLAYED)
    return few + (count - _PLAYED) * (few - of(_PLAYED - 1))


def pass_tasks(passes: Passes, *, gather: bool, reduce: bool) -> list[Task]:
    """Return the micro-batch as tasks on the streams ``compute`` and ``link``.

    Two blocks are whole at once: a gather waits for the computation of the block before the last.
    """
    tasks: list[Task] = []
    _add_forward(tasks, passes, gathers=gather and passes.gather_forward_s > 0)
    sends = passes.reduce_s if reduce else 0.0
    _add_backward(tasks, passes, gathers=gather and passes.gather_backward_s > 0, sends_s=sends)
    return tasks


def _add_forward(tasks: list[Task], passes: Passes, *, gathers: bool) -> None:
    slowed = _slowed(passes, passes.gather_forward_s if gathers else 0.0, sum(passes.forward_s))
    before = _add(tasks, "gather outside", "link", passes.gather_outside_s) if gathers else -1
    computed: list[int] = []
    for index, seconds in enumerate(passes.forward_s):
        ready = before
        if gathers:
            waits = computed[index - 2] if index >= 2 else -1
            ready = _add(tasks, f"gather {index}", "link", passes.gather_forward_s, waits)
        computed.append(_add(tasks, f"forward {index}", "compute", seconds * slowed, ready))
    _add(tasks, "forward outside", "compute", passes.outside_forward_s, before)


def _add_backward(tasks: list[Task], passes: Passes, *, gathers: bool, sends_s: float) -> None:
    beside = (passes.gather_backward_s if gathers and passes.gathers_ahead else 0.0) + sends_s
    slowed = _slowed(passes, beside, sum(passes.backward_s))
    done = _add(tasks, "backward outside", "compute", passes.outside_backward_s)
    order = list(reversed(range(len(passes.forward_s))))
    ready = _add(tasks, f"gather {order[0]} again", "link", passes.gather_backward_s) if gathers and order else -1
    for index, following in itertools.zip_longest(order, order[1:]):
        # The next gather is issued before the reduction of this block: on one link it would else wait for it.
        name = f"gather {following} again"
        after = -1
        if gathers and following is not None and passes.gathers_ahead:
            after = _add(tasks, name, "link", passes.gather_backward_s, done)
        done = _add(tasks, f"backward {index}", "compute", passes.backward_s[index] * slowed, ready)
        if gathers and following is not None and not passes.gathers_ahead:
            after = _add(tasks, name, "link", passes.gather_backward_s, done)
        if sends_s:
            _add(tasks, f"reduce {index}", "link", sends_s, done)
        ready = after
    if sends_s:
        _add(tasks, "reduce outside", "link", passes.reduce_outside_s, done)


def _add(tasks: list[Task], name: str, stream: str, seconds: float, *after: int) -> int:
    """Add a task and return its index; -1 among those that it waits for is none."""
    tasks.append(Task(name, stream, seconds, tuple(index for index in after if index >= 0)))
    return len(tasks) - 1


def _slowed(passes: Passes, per_block_s: float, compute_s: float) -> float:
    """Return the slowdown of computing beside a collective, which shares memory and multiprocessors with it."""
    if compute_s <= 0:
        return 1.0
    busy = per_block_s * len(passes.forward_s) / compute_s
    return 1 + passes.interference * min(1.0, busy) + passes.shared * busy


# --- A pipeline: the order in which each rank computes, played with each rank's own times.

Action = tuple[str, int, int]  # F or B, the stage, the micro-batch
SPLIT_BACKWARD = ("zbv", "dualpipev")  # schedules that leave gradients of weights for later

_PLAYED_ACTIONS = 100_000
_SETTLED_ROUNDS = 1  # rounds over the ranks, after which every further micro-batch takes the same


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one rank's part of one micro-batch.

    Args:
        forward_s: All its stages, forward.
        backward_s: All its stages, backward.
        weights_s: Of it, gradients of weights that can wait; None: unknown, and as long as forward.
    """

    forward_s: float
    backward_s: float
    weights_s: float | None = None

    @property
    def waiting_s(self) -> float:
        """Return the seconds of backward that can wait."""
        # Without recomputation each product of forward has one for its weight.
        return min(self.forward_s, self.backward_s / 2) if self.weights_s is None else self.weights_s


@functools.cache
def order(schedule: str, ranks: int, stages_per_rank: int, micro_batches: int) -> list[list[Action]]:
    """Return the actions of every rank, in order.

    ``gpipe`` (Huang et al. 2019), ``1f1b`` (Narayanan et al. 2019) and ``interleaved`` (Narayanan et al. 2021, §2.2).
    Schedules that split backward (``zbv``, ``dualpipev``) have no order here, see :func:`pipeline_s`.
    """
    return [_row(schedule, rank, ranks, stages_per_rank, micro_batches) for rank in range(ranks)]


def pipeline_s(
    schedule: str, times: Sequence[StageTimes], hop_s: float, stages_per_rank: int, micro_batches: int
) -> float:
    """Return the seconds from the first forward to the last backward.

    Args:
        schedule: Its name.
        times: Times of every rank of the pipeline.
        hop_s: Seconds from one stage to the next.
        stages_per_rank: Stages of a rank.
        micro_batches: Micro-batches of a step. Beyond a few rounds each takes as long as those before.
    """
    ranks = len(times)
    slowest = max(each.forward_s + each.backward_s for each in times)
    if ranks == 1:
        return slowest * micro_batches
    # With so many ranks: as if all were the slowest.
    if ranks * ranks * stages_per_rank > _PLAYED_ACTIONS:
        return slowest * micro_batches + (ranks - 1) * (slowest / stages_per_rank + 2 * hop_s)
    if schedule in SPLIT_BACKWARD:
        return _split_s(schedule, times, hop_s, stages_per_rank, micro_batches)
    settled = micro_batches if schedule == "gpipe" else settled_after(schedule, ranks, micro_batches)

    def played(number: int) -> float:
        rows = order(schedule, ranks, stages_per_rank, number)
        return max(end for _, _, end in play(rows, times, hop_s, stages_per_rank))

    whole = played(settled)
    if settled == micro_batches:
        return whole
    each = _per_round(schedule, ranks, micro_batches)
    # Hops that the ranks wait for count, too.
    rate = max((whole - played(settled - each)) / each, slowest)
    return whole + (micro_batches - settled) * rate


def _split_s(
    schedule: str, times: Sequence[StageTimes], hop_s: float, stages_per_rank: int, micro_batches: int
) -> float:
    """Return the seconds of schedules that split backward: gradients of weights fill a rank's idle time."""
    ranks, slowest = len(times), max(times, key=lambda each: each.forward_s + each.backward_s)
    busy = slowest.forward_s + slowest.backward_s
    # Gradients of inputs travel down the pipeline at their own pace, and weights' fill what they leave: read off the
    # engine's tables, played with other ratios than I = W = F of Qi et al. 2024, Table 2 and DeepSeek-AI 2025, Table 2.
    weights = slowest.waiting_s / stages_per_rank
    inputs = slowest.backward_s / stages_per_rank - weights
    idle = max(inputs, 2 * (inputs - weights)) if schedule == "zbv" else max(inputs, 2 * inputs - weights)
    full = busy * micro_batches + (ranks - 1) * (idle + 2 * hop_s)
    # That takes enough micro-batches to fill all stages. Few of them follow the first one through all stages and back,
    # and no rank has anything to do meanwhile but gradients of weights; the first rank's last ones come at the end.
    if micro_batches >= 2 * ranks:
        return full
    there_and_back = sum(each.forward_s + each.backward_s - each.waiting_s for each in times)
    few = there_and_back + (micro_batches - 1) * max(each.backward_s for each in times) + times[0].waiting_s
    return max(full, few + 2 * stages_per_rank * (ranks - 1) * hop_s)


def settled_after(schedule: str, ranks: int, micro_batches: int) -> int:
    """Return the number of micro-batches after which every further round takes as long as the last."""
    each = _per_round(schedule, ranks, micro_batches)
    return min(micro_batches, (_SETTLED_ROUNDS + 1) * each + micro_batches % each)


def _per_round(schedule: str, ranks: int, micro_batches: int) -> int:
    """Return the micro-batches that go through one stage of a rank before the next stage's turn.

    Torch makes rounds equal.
    """
    return micro_batches // max(1, micro_batches // ranks) if schedule == "interleaved" else ranks


def play(
    rows: Sequence[Sequence[Action]], times: Sequence[StageTimes], hop_s: float, stages_per_rank: int
) -> list[tuple[int, Action, float]]:
    """Play an order against time; return ``(rank, action, when it ends)``, as they end."""
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
    """Return when an action's input exists; None while what makes it has not been played."""
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
    """Return a rank's forwards and its backwards: round by round, stage after stage."""
    forwards: list[Action] = []
    backwards: list[Action] = []
    for first in range(0, micro_batches, per_round):
        parts = range(first, min(first + per_round, micro_batches))
        for turn in range(per_rank):
            forwards += [("F", turn * ranks + rank, part) for part in parts]
            backwards += [("B", (per_rank - 1 - turn) * ranks + rank, part) for part in parts]
    return forwards, backwards


def play_on_cores(
    rows: Sequence[Sequence[Action]], times: Sequence[StageTimes], hop_s: float, stages_per_rank: int, cores: int
) -> float:
    """Return the seconds until the last action ends when ranks take turns on fewer cores.

    The rank that is ready first takes the core that is free first.

    Args:
        rows: Actions of every rank, in order.
        times: Times of every rank with a core of its own.
        hop_s: Seconds from one stage to the next.
        stages_per_rank: Stages of a rank.
        cores: Cores of all ranks together.

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
