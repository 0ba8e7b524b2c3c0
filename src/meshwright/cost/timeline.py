"""Tasks on streams: each stream runs its tasks in order, a task waits for those it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """One piece of work.

    Args:
        name: What it is, for people.
        stream: What runs it: ``compute``, ``link``, ``copy``, or a rank's of these.
        seconds: How long it takes.
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
    """Runs tasks as early as their streams and what they wait for allow; marks the critical path."""
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
    """When the last of them ends."""
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
