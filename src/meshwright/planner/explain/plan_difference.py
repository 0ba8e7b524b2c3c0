"""Compare two plans: their differences, and the effect of each on time and memory."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.methods import Method, Phase, besides_mesh
from meshwright.planner.explain.plan_figures import on_device, plan_entry
from meshwright.planner.plans import Plan, Subject
from meshwright.strategy import Strategy
from meshwright.strategy.value import METHOD_CONFIGS

_MESH = "mesh"


@dataclass(frozen=True)
class Effect:
    """Effect of one change, after those before it.

    Args:
        change: Lines of ``-``, ``+`` or ``~``.
        step_time_s: Change of the step's seconds; None without a cluster.
        needed_bytes: Change of the memory in bytes.
    """

    change: str
    step_time_s: float | None
    needed_bytes: int


@dataclass(frozen=True)
class Difference:
    """Differences of two plans.

    Args:
        first: The first plan in one line.
        second: The second plan in one line.
        changes: Lines of ``-``, ``+`` or ``~`` that lead from the first to the second.
        seconds: Change by part of the step.
        num_bytes: Change by class of memory at the peak.
        effects: Effect of each change, where the plans between could be predicted; they add up to the whole.
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
        first: The plan to start from.
        second: The plan to compare with it.
        subject: The subject of both. Given it, the changes are applied one after the other and each is predicted;
            changes that are invalid alone are applied together.
    """
    found = entries_diff(plan_entry(first), plan_entry(second))
    return dataclasses.replace(found, effects=_effects(first, second, subject)) if subject is not None else found


def entries_diff(first: Mapping[str, Any], second: Mapping[str, Any]) -> Difference:
    """Compare two plans of ``--json``, without the effect of each change."""
    times: dict[str, float] = {}
    if first["time"] is not None and second["time"] is not None:
        ours, theirs = first["time"]["parts_s"], second["time"]["parts_s"]
        times = {part: theirs.get(part, 0.0) - ours.get(part, 0.0) for part in dict.fromkeys((*ours, *theirs))}
    before, after = _classes(first), _classes(second)
    sizes = {name: after.get(name, 0) - before.get(name, 0) for name in dict.fromkeys((*before, *after))}
    return Difference(
        first=f"{first['summary']}; {_cut(first)}",
        second=f"{second['summary']}; {_cut(second)}",
        changes=_changes(first, second),
        seconds=times,
        num_bytes={name: size for name, size in sizes.items() if size},
    )


def _classes(entry: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes by class on the device at the highest peak of any rank."""
    every = (on_device(sizes) for rank in entry["memory"]["ranks"] for sizes in rank["moments"].values())
    return max(every, key=lambda sizes: sum(sizes.values()))


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
    """Apply the changes from the first to the second plan group by group, and predict each."""
    found: list[Effect] = []
    here = first
    strategy, parts = first.strategy, first.step.num_micro_batches
    for names in _groups(first.strategy, second.strategy):
        strategy = functools.reduce(functools.partial(_with_method_of, second.strategy), names, strategy)
        there = _planned(subject, strategy, parts)
        if there is not None:
            found.append(_effect(here, there))
            here = there
    found.append(_effect(here, second))  # changes that are invalid alone, and the micro-batches
    return tuple(effect for effect in found if effect.change)


def _with_method_of(goal: Strategy, strategy: Strategy, name: str) -> Strategy:
    method = goal.get(name)
    return strategy.without(name) if method is None else strategy.with_method(method)


def _planned(subject: Subject, strategy: Strategy, num_micro_batches: int) -> Plan | None:
    try:
        return subject.plan(strategy, num_micro_batches)
    except MeshwrightError:
        return None  # the change is valid only with the next one


def _effect(here: Plan, there: Plan) -> Effect:
    time = None
    if here.forecast is not None and there.forecast is not None:
        time = there.forecast.time.step_time_s - here.forecast.time.step_time_s
    return Effect(
        "\n".join(_changes(plan_entry(here), plan_entry(there))), time, there.needed_bytes - here.needed_bytes
    )


def _groups(first: Strategy, second: Strategy) -> Sequence[list[str]]:
    """Group the methods that differ: those of the mesh, and those of each phase, which exclude each other."""
    groups: dict[object, list[str]] = {}
    names = [name for name in dict.fromkeys((*first.names, *second.names)) if first.get(name) != second.get(name)]
    shards = [{name for name in each.names if _shards(name)} for each in (first, second)]
    for name in names:
        # A change to or from sharding needs the change of its axis.
        with_mesh = bool(shards[0]) != bool(shards[1]) and _shards(name)
        groups.setdefault(_MESH if with_mesh else _group(name), []).append(name)
    return list(groups.values())


def _shards(name: str) -> bool:
    return bool(getattr(METHOD_CONFIGS[name], "shards", False))


def _group(name: str) -> object:
    method = METHOD_CONFIGS[name]
    if not issubclass(method, Method):
        return name
    return _MESH if method.phase == Phase.MESH or method.axis is not None else method.phase
