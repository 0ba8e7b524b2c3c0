"""The simulated step as a trace that Perfetto and Chrome read (Trace Event Format, JSON)."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshwright.cost import StepEvent, step_events
from meshwright.errors import ConfigError
from meshwright.planner.explain.figures import every_step, with_micro_batches
from meshwright.planner.plan import Plan

_LANES = ("compute", "collective", "gather", "reduce", "send", "copy", "update", "host")
_COLORS = {
    "compute": "thread_state_running", "collective": "thread_state_iowait", "gather": "rail_load",
    "reduce": "rail_animation", "send": "rail_response", "update": "rail_idle", "copy": "generic_work",
}  # fmt: skip
_MICROSECONDS = 1e6
_CRITICAL = "critical path"


def trace(plan: Plan) -> dict[str, Any]:
    """A process for every rank of the pipeline, a thread for each of its streams, and one for the critical path.

    Raises:
        ConfigError: When the plan has no forecast.
    """
    if plan.forecast is None:
        raise ConfigError(
            "There is no time to trace",
            expected="a plan for a cluster",
            got="a plan without a forecast",
            fix="name a cluster",
        )
    events = step_events(every_step(plan), plan.forecast.cluster, plan.forecast.calibration)
    path = _end_to_end([event for event in events if event.critical])
    ranks = len(every_step(plan))
    return {
        "traceEvents": [
            *_names(events, ranks),
            *(_slice(event, event.rank + 1, _LANES.index(event.lane)) for event in events),
            *(_slice(event, 0, 0, where=f"rank {event.rank}, {event.lane}") for event in path),
        ],
        "displayTimeUnit": "ms",
        "otherData": {
            "strategy": str(plan.strategy),
            "plan": with_micro_batches(plan),
            "step_time_s": plan.forecast.time.step_time_s,
            "simulated": "by Meshwright; nothing has run",
        },
    }


def _end_to_end(path: list[StepEvent]) -> list[StepEvent]:
    """Each from where the one before has ended: reductions that outlast the backward beside them are critical, too."""
    found: list[StepEvent] = []
    for event in sorted(path, key=lambda each: (each.start_s, each.end_s)):
        start = max(event.start_s, found[-1].end_s if found else 0.0)
        if event.end_s > start:
            found.append(dataclasses.replace(event, start_s=start))
    return found


def _names(events: tuple[StepEvent, ...], ranks: int) -> list[dict[str, Any]]:
    found = [_meta("process_name", 0, 0, _CRITICAL), _meta("thread_name", 0, 0, _CRITICAL)]
    for rank in range(ranks):
        found.append(_meta("process_name", rank + 1, 0, f"pipeline rank {rank}" if ranks > 1 else "every rank"))
        for lane in sorted({_LANES.index(event.lane) for event in events if event.rank == rank}):
            found.append(_meta("thread_name", rank + 1, lane, _LANES[lane]))
            found.append({**_meta("thread_sort_index", rank + 1, lane, ""), "args": {"sort_index": lane}})
    return found


def _meta(name: str, process: int, thread: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": {"name": text}}


def _slice(event: StepEvent, process: int, thread: int, where: str = "") -> dict[str, Any]:
    color = "terrible" if event.critical else _COLORS.get(event.lane)
    return {
        "ph": "X",
        "name": event.name,
        "cat": event.lane,
        "pid": process,
        "tid": thread,
        "ts": event.start_s * _MICROSECONDS,
        "dur": event.seconds * _MICROSECONDS,
        "args": {"critical": event.critical, **({"where": where} if where else {})},
        **({"cname": color} if color else {}),
    }
