"""The whole simulated step as events: every rank of a pipeline, every stream, every micro-batch, and the critical path.

The same tasks that :func:`~meshwright.cost.step_time.simulate` counts, laid out in time; both end at the same moment.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from meshwright.cost.calibration import Calibration, fitted
from meshwright.cost.cluster import Cluster
from meshwright.cost.device_time import Network
from meshwright.cost.scheduling import Action, StageTimes, Task, makespan_s, order, pass_tasks, play, schedule
from meshwright.cost.step import Step
from meshwright.cost.step_time import (
    Rank,
    StepTime,
    hop_s,
    inline_s,
    last_rounds,
    once_s,
    played_s,
    rank_of,
    simulate,
    stage_times,
)

Lane = Literal["compute", "collective", "gather", "reduce", "send", "copy", "update", "host"]

_DETAILED_TASKS = 20_000  # of a step without a pipeline; micro-batches beyond are one event each
_ORDERS = ("gpipe", "1f1b", "interleaved")  # of others only the duration is known, in closed form


@dataclass(frozen=True)
class StepEvent:
    """A piece of a step as it ran.

    Args:
        rank: Rank of the pipeline; 0 without one.
        lane: The part that was busy. ``collective`` are those that blocks wait for; ``gather`` and ``reduce`` run
            beside computing; ``host`` is what happens once per step beside all that.
        name: Description for people.
        start_s: Seconds from the beginning of the step.
        end_s: The same.
        critical: Whether a shorter one would have ended the step earlier.
    """

    rank: int
    lane: Lane
    name: str
    start_s: float
    end_s: float
    critical: bool = False

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end_s - self.start_s


def step_events(
    steps: Step | Sequence[Step], cluster: Cluster, calibration: Calibration | None = None
) -> tuple[StepEvent, ...]:
    """Lay out a step as it runs on a cluster, in order of time.

    :func:`simulate` plays steps of many equal blocks or micro-batches in part and extrapolates. Here all of them are
    laid out, and stretched by the small difference, so that the last event ends at ``step_time_s``.

    Args:
        steps: The step of a rank after all ``cost`` twins; with a pipeline, of every rank of its axis.
        cluster: The cluster to run on.
        calibration: Speed of kernels and links; None: the cluster's own calibration, or else the fitted presets.
    """
    every = [steps] if isinstance(steps, Step) else list(steps)
    known = calibration or cluster.calibration or fitted()
    time = simulate(every, cluster, known)
    # By identity: comparing steps takes longer than playing some of them twice.
    distinct = {id(step): step for step in every}
    played = {number: rank_of(step, cluster, known) for number, step in distinct.items()}
    ranks = [played[id(step)] for step in every]
    busy = time.step_time_s - time.copies_s - time.update_s - time.overhead_s
    shares = [_inline_shares(step, played[id(step)], cluster, known) for step in every]
    if len(every) > 1:
        score, end = _pipelined(every, ranks, cluster, known)
    else:
        score, end = _replicated(ranks[0], every[0].num_micro_batches), busy
    events = score.events(end, shares)
    if len(every) > 1:
        per_rank = len(every[0].stages.ranks) // len(every) if every[0].stages is not None else 1
        rounds = last_rounds(len(every), per_rank, every[0].num_micro_batches)
        events += _last_reductions(ranks, end, busy, rounds)
    return tuple(sorted([*events, *_closing(ranks, time, busy)], key=lambda event: event.start_s))


def coalesced(events: Sequence[StepEvent], most: int) -> tuple[StepEvent, ...]:
    """Merge neighbours on each lane until about ``most`` events are left."""
    together = -(-len(events) // most)
    if together <= 1:
        return tuple(events)
    lanes: dict[tuple[int, Lane], list[StepEvent]] = {}
    for event in events:
        lanes.setdefault((event.rank, event.lane), []).append(event)
    groups = (lane[at : at + together] for lane in lanes.values() for at in range(0, len(lane), together))
    return tuple(sorted((_joined(group) for group in groups), key=lambda event: event.start_s))


def _joined(group: Sequence[StepEvent]) -> StepEvent:
    first, last = group[0], group[-1]
    name = first.name if len(group) == 1 else f"{first.name} … {last.name}"
    return dataclasses.replace(first, name=name, end_s=last.end_s, critical=any(each.critical for each in group))


@dataclass
class _Score:
    """Tasks with the rank and the lane of each."""

    tasks: list[Task] = field(default_factory=list)
    places: list[tuple[int, Lane]] = field(default_factory=list)

    def add(self, rank: int, lane: Lane, task: Task) -> int:
        self.tasks.append(task)
        self.places.append((rank, lane))
        return len(self.tasks) - 1

    def events(self, end_s: float, shares: Sequence[tuple[float, float]]) -> list[StepEvent]:
        """Play the tasks, ending at ``end_s``, and split off the share of computing that waits for collectives."""
        played = schedule(self.tasks)
        whole = max((event.end_s for event in played), default=0.0)
        stretch = end_s / whole if whole else 1.0
        found: list[StepEvent] = []
        for event, (rank, lane) in zip(played, self.places, strict=True):
            one = StepEvent(rank, lane, event.name, event.start_s * stretch, event.end_s * stretch, event.critical)
            found += _split(one, shares[rank]) if lane == "compute" else [one]
        return [event for event in found if event.seconds > 0]


def _split(event: StepEvent, shares: tuple[float, float]) -> Iterable[StepEvent]:
    share = shares[event.name.startswith("backward")]
    cut = event.end_s - event.seconds * share
    yield dataclasses.replace(event, end_s=cut)
    if share:
        yield dataclasses.replace(event, lane="collective", name=f"collectives of {event.name}", start_s=cut)


def _inline_shares(step: Step, rank: Rank, cluster: Cluster, known: Calibration) -> tuple[float, float]:
    """Return the shares of a rank's forward and backward in which its blocks wait for collectives."""
    network = Network(cluster, known.of(cluster.device.efficiency), known.constants)
    forward, backward = rank.passes.forward_total_s, rank.passes.backward_total_s
    waits = inline_s(step, network, "forward"), inline_s(step, network, "backward")
    return (waits[0] / forward if forward else 0.0, waits[1] / backward if backward else 0.0)


def _replicated(rank: Rank, micro_batches: int) -> _Score:
    """Lay out all micro-batches of a rank without a pipeline, one after the other."""
    score = _Score()
    before: tuple[int, ...] = ()
    for number in range(micro_batches):
        tasks = _micro_batch(rank, first=number == 0, last=number == micro_batches - 1)
        left = _DETAILED_TASKS - len(score.tasks) - len(tasks)
        if 0 < number < micro_batches - 1 and left < 0:
            whole = Task(f"micro-batch {number}", "compute", makespan_s(tasks), before)
            before = (score.add(0, "compute", whole),)
            continue
        label = f", micro-batch {number}" if micro_batches > 1 else ""
        before = _append(score, tasks, before, label)
    return score


@functools.lru_cache(maxsize=16)
def _micro_batch(rank: Rank, *, first: bool, last: bool) -> list[Task]:
    gather, reduce = rank.gathers_each or first, rank.reduces_each or last
    return pass_tasks(rank.last if last else rank.passes, gather=gather, reduce=reduce)


def _append(score: _Score, tasks: Sequence[Task], before: tuple[int, ...], label: str) -> tuple[int, ...]:
    """Add a micro-batch after the tasks before it; return the last task of each stream."""
    offset, latest = len(score.tasks), dict[str, int]()
    for task in tasks:
        after = tuple(offset + index for index in task.after) + (() if task.stream in latest else before)
        latest[task.stream] = score.add(0, _lane(task), Task(task.name + label, task.stream, task.seconds, after))
    return tuple(latest.values())


def _lane(task: Task) -> Lane:
    if task.stream == "link":
        return "gather" if task.name.startswith("gather") else "reduce"
    return task.stream  # type: ignore[return-value]


def _pipelined(
    steps: Sequence[Step], ranks: Sequence[Rank], cluster: Cluster, known: Calibration
) -> tuple[_Score, float]:
    """Lay out every rank's micro-batches in the order of the schedule; return also when the last backward ends.

    Ranks that share cores are laid out as if each had its own: the wait for a core is part of their computing time.
    """
    stages = steps[0].stages
    assert stages is not None
    per_rank, micro_batches = len(stages.ranks) // (max(stages.ranks) + 1), steps[0].num_micro_batches
    times, hop = [stage_times(each) for each in ranks], hop_s(steps[0], cluster, known)
    whole = played_s(steps[0], times, hop, known)
    if stages.schedule not in _ORDERS:
        return _back_to_back(times, whole, micro_batches), whole
    rows = order(stages.schedule, len(ranks), per_rank, micro_batches)
    score, done, last = _Score(), dict[Action, int](), len(stages.ranks) - 1
    latest: dict[int, int] = {}
    for rank, action, _ in play(rows, times, hop, per_rank):
        kind, stage, part = action
        seconds = (times[rank].forward_s if kind == "F" else times[rank].backward_s) / per_rank
        name = f"{'forward' if kind == 'F' else 'backward'} {part}" + (f" of stage {stage}" if per_rank > 1 else "")
        source = _source(action, last)
        after = () if source is None else (done[source],)
        if source is not None and source[1] != stage:
            sender = score.places[done[source]][0]
            send = Task(f"send {score.tasks[done[source]].name}", f"send {len(score.tasks)}", hop, after)
            after = (score.add(sender, "send", send),)
        done[action] = score.add(rank, "compute", Task(name, f"compute {rank}", seconds, after))
        waits = (*after, latest[rank]) if rank in latest else after
        latest[rank] = done[action]
        _beside(score, ranks[rank], rank, done[action], waits, per_rank)
    return score, whole


def _back_to_back(times: Sequence[StageTimes], whole: float, micro_batches: int) -> _Score:
    """Lay out ranks that begin one after the other and then never wait, for schedules without a bubble."""
    ranks, slowest = len(times), max(each.forward_s + each.backward_s for each in times)
    later = (whole - slowest * micro_batches) / max(ranks - 1, 1)
    score = _Score()
    for rank, row in enumerate(order("1f1b", ranks, 1, micro_batches)):
        after = (score.add(rank, "send", Task("wait for the first", f"send {rank}", rank * later)),)
        for kind, _, part in row:
            name, seconds = ("forward", times[rank].forward_s) if kind == "F" else ("backward", times[rank].backward_s)
            score.add(rank, "compute", Task(f"{name} {part}", f"compute {rank}", seconds, after))
    return score


def _source(action: Action, last: int) -> Action | None:
    """Return the action that an action waits for: on another stage, or its own forward."""
    kind, stage, part = action
    if kind == "F":
        return ("F", stage - 1, part) if stage else None
    return ("B", stage + 1, part) if stage < last else ("F", stage, part)


def _beside(score: _Score, own: Rank, rank: int, computed: int, waits: tuple[int, ...], per_rank: int) -> None:
    """Add the gathers or reductions of one micro-batch, beginning with the computing that they run beside."""
    task = score.tasks[computed]
    lane: Lane = "gather" if task.name.startswith("forward") else "reduce"
    if not (own.gathers_each if lane == "gather" else own.reduces_each):
        return
    whole = own.passes.all_gathers_s if lane == "gather" else own.passes.all_reductions_s
    seconds = min(whole / per_rank, task.seconds)
    score.add(rank, lane, Task(f"{lane} beside {task.name}", f"{lane} {rank}", seconds, waits))


def _last_reductions(ranks: Sequence[Rank], end: float, busy: float, rounds: float) -> list[StepEvent]:
    """List the gathers and reductions once a step: beside each rank's last backwards, and beyond them."""
    slowest = max(ranks, key=lambda each: once_s(each) - each.passes.backward_total_s * rounds)
    found = []
    for rank, each in enumerate(ranks):
        seconds = min(once_s(each), busy)
        start = max(0.0, end - each.passes.backward_total_s * rounds)
        critical = each is slowest and busy > end
        if seconds > 0:
            found.append(
                StepEvent(rank, "reduce", "gathers and reductions of the step", start, start + seconds, critical)
            )
    return found


def _closing(ranks: Sequence[Rank], time: StepTime, busy: float) -> list[StepEvent]:
    """List the exposed offload copies, the update of every rank, and the overhead."""
    longest, begin = max(each.update_s for each in ranks), busy + time.copies_s
    updates = [
        StepEvent(rank, "update", "update", begin, begin + each.update_s, each.update_s == longest)
        for rank, each in enumerate(ranks)
    ]
    rest = [
        event
        for rank in range(len(ranks))
        for event in (
            StepEvent(rank, "copy", "exposed offload copies", busy, begin, rank == 0),
            StepEvent(rank, "host", "launch, batch, loss", begin + longest, time.step_time_s, rank == 0),
        )
    ]
    return [event for event in (*updates, *rest) if event.seconds > 0]
