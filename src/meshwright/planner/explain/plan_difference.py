"""What differs between two plans, and what each change does to time and memory."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.methods import Method, Phase, besides_mesh
from meshwright.planner.explain.plan_figures import plan_entry
from meshwright.planner.plans import Plan, Subject
from meshwright.strategy import Strategy
from meshwright.strategy.method_config import METHOD_CONFIGS

_MESH = "mesh"


@dataclass(frozen=True)
class Effect:
    """What one change does, after those before it.

    Args:
        change: Lines of ``-``, ``+`` or ``~``.
        step_time_s: Seconds more, or less; None where no cluster is known.
        needed_bytes: Bytes of memory more, or less.
    """

    change: str
    step_time_s: float | None
    needed_bytes: int


@dataclass(frozen=True)
class Difference:
    """What differs between two plans.

    Args:
        first: The first in one line.
        second: The other.
        changes: Lines of ``-``, ``+`` or ``~``: how to get from the first to the second.
        seconds: By part of the step, what the second takes more (negative: less).
        num_bytes: By class of memory at the peak, what the second holds more.
        effects: Change by change, where the plans could be predicted one by one; they add up to the whole.
    """

    first: str
    second: str
    changes: tuple[str, ...]
    seconds: dict[str, float]
    num_bytes: dict[str, int]
    effects: tuple[Effect, ...] = ()


def diff(first: Plan, second: Plan, subject: Subject | None = None) -> Difference:
    """Compare two plans for one model.

    Args:
        first: The one.
        second: The other.
        subject: What both are for; given it, the changes are made one after the other and each is predicted. Changes
            that cannot be made alone are made together.
    """
    found = entries_diff(plan_entry(first), plan_entry(second))
    return dataclasses.replace(found, effects=_effects(first, second, subject)) if subject is not None else found


def entries_diff(first: Mapping[str, Any], second: Mapping[str, Any]) -> Difference:
    """Return the same of two plans as ``--json`` has them, without the effect of each change."""
    times: dict[str, float] = {}
    if first["time"] is not None and second["time"] is not None:
        ours, theirs = first["time"]["parts_s"], second["time"]["parts_s"]
        times = {part: theirs.get(part, 0.0) - ours.get(part, 0.0) for part in dict.fromkeys((*ours, *theirs))}
    held, other = _classes(first), _classes(second)
    sizes = {name: other.get(name, 0) - held.get(name, 0) for name in dict.fromkeys((*held, *other))}
    return Difference(
        first=f"{first['summary']}; {_cut(first)}",
        second=f"{second['summary']}; {_cut(second)}",
        changes=_changes(first, second),
        seconds=times,
        num_bytes={name: size for name, size in sizes.items() if size},
    )


def _classes(entry: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes on the device at the peak of the rank that holds most."""
    every = [
        (held, sum(_on_device(held).values())) for rank in entry["memory"]["ranks"] for held in rank["moments"].values()
    ]
    return _on_device(max(every, key=lambda each: each[1])[0])


def _on_device(held: Mapping[str, int]) -> dict[str, int]:
    return {name: size for name, size in held.items() if not name.startswith(("host_", "disk_"))}


def _changes(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[str, ...]:
    ours, theirs = first["axes"], second["axes"]
    lines = [
        f"~ axis {name} {ours.get(name, 1)} -> {theirs.get(name, 1)}"
        for name in dict.fromkeys((*ours, *theirs))
        if ours.get(name, 1) != theirs.get(name, 1)
    ]
    without = [Strategy(besides_mesh(Strategy(json.dumps(entry["strategy"])))) for entry in (first, second)]
    lines += without[0].diff(without[1]).splitlines()
    if _cut(first) != _cut(second):
        lines.append(f"~ {_cut(first)} -> {_cut(second)}")
    return tuple(lines)


def _cut(entry: Mapping[str, Any]) -> str:
    count = entry["num_micro_batches"]
    return f"{count} micro-batch{'' if count == 1 else 'es'} of {entry['micro_batch']}"


def _effects(first: Plan, second: Plan, subject: Subject) -> tuple[Effect, ...]:
    """Walk from the first to the second, one group of changes after the other."""
    found: list[Effect] = []
    here = first
    strategy, parts = first.strategy, first.step.num_micro_batches
    for names in _groups(first.strategy, second.strategy):
        strategy = functools.reduce(functools.partial(_taken_over, second.strategy), names, strategy)
        there = _planned(subject, strategy, parts)
        if there is not None:
            found.append(_effect(here, there))
            here = there
    found.append(_effect(here, second))  # what could not be made alone, and how the batch is cut
    return tuple(effect for effect in found if effect.change)


def _taken_over(goal: Strategy, strategy: Strategy, name: str) -> Strategy:
    method = goal.get(name)
    return strategy.without(name) if method is None else strategy.with_method(method)


def _planned(subject: Subject, strategy: Strategy, num_micro_batches: int) -> Plan | None:
    try:
        plan = subject.plan(strategy, num_micro_batches)
    except MeshwrightError:
        return None  # the change needs the next one, too
    return plan


def _effect(here: Plan, there: Plan) -> Effect:
    time = None
    if here.forecast is not None and there.forecast is not None:
        time = there.forecast.time.step_time_s - here.forecast.time.step_time_s
    return Effect(
        "\n".join(_changes(plan_entry(here), plan_entry(there))), time, there.needed_bytes - here.needed_bytes
    )


def _groups(first: Strategy, second: Strategy) -> Sequence[list[str]]:
    """Names of methods that differ; those of the mesh together, and those of one phase, of which only one can be."""
    groups: dict[object, list[str]] = {}
    names = [name for name in dict.fromkeys((*first.names, *second.names)) if first.get(name) != second.get(name)]
    shards = [{name for name in each.names if _shards(name)} for each in (first, second)]
    for name in names:
        moved = bool(shards[0]) != bool(shards[1]) and _shards(name)  # sharding comes and goes with its axis
        groups.setdefault(_MESH if moved else _group(name), []).append(name)
    return list(groups.values())


def _shards(name: str) -> bool:
    return bool(getattr(METHOD_CONFIGS[name], "shards", False))


def _group(name: str) -> object:
    method = METHOD_CONFIGS[name]
    if not issubclass(method, Method):
        return name
    return _MESH if method.phase == Phase.MESH or method.axis is not None else method.phase
