"""Export plans as JSON documents, a self-contained HTML page and a Perfetto trace; read documents back."""

from __future__ import annotations

import dataclasses
import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from meshwright.cost import Cluster, StepEvent, coalesced, step_events
from meshwright.errors import ConfigError
from meshwright.planner.explain.plan_difference import Difference, diff
from meshwright.planner.explain.plan_figures import (
    RunLength,
    every_step,
    plan_entry,
    short,
    time_entry,
    with_micro_batches,
)
from meshwright.planner.explain.plan_reasons import WhatIf, against, too_large, why
from meshwright.planner.plans import Plan, Subject
from meshwright.planner.search import Found
from meshwright.runtime.lazy import optional_library

FORMAT = "meshwright.plans"
COMPARISON_FORMAT = "meshwright.comparison"
SCHEMA_VERSION = 1
_DRAWN_EVENTS = 3000
_OF_EVENT = ("rank", "lane", "name", "start_s", "end_s", "critical")


def found_document(
    found: Found,
    *,
    model: Mapping[str, Any],
    objective: str = "tokens_per_s",
    what_ifs: Sequence[WhatIf] = (),
    subject: Subject | None = None,
    length: RunLength | None = None,
) -> dict[str, Any]:
    """Return a search's result with its reasons, as plain values.

    Args:
        found: The result, with at least one plan.
        model: Name and description of the model.
        objective: The objective that ranks the plans.
        what_ifs: Result of :func:`~meshwright.planner.explain.what_if`.
        subject: Given it, the difference to the second plan has the effect of each change.
        length: Of a whole run, to say what that takes.
    """
    best, reasons = found.plans[0], why(found, length)
    return {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "model": dict(model),
        "cluster": _cluster(best.forecast.cluster) if best.forecast is not None else None,
        "objective": objective,
        "search": {
            "num_considered": found.num_considered,
            "num_predicted": found.num_predicted,
            "seconds": found.seconds,
            "is_complete": found.is_complete,
            "out_of_time": found.out_of_time,
            "refused": [{"strategy": strategy, "reason": reason} for strategy, reason in found.refused],
        },
        "plans": [
            plan_entry(plan, length) | {"against_first": against(plan, best) if number else None}
            for number, plan in enumerate(found.plans)
        ],
        "too_large": [plan_entry(plan) | {"against_limit": too_large(plan)} for plan in found.too_large],
        "why": list(reasons.chosen),
        "what_if": [_what_if(each) for each in what_ifs],
        "differences": [dataclasses.asdict(diff(best, plan, subject)) for plan in found.plans[1:2]],
        "timeline": timeline_document(best),
    }


def _cluster(cluster: Cluster) -> dict[str, Any]:
    return {
        "device": cluster.device.name,
        "num_devices": cluster.num_devices,
        "devices_per_node": cluster.devices_per_node,
        "memory_bytes": cluster.device.memory_bytes,
        "host_memory_bytes": cluster.host_memory_bytes,
        "intra_bytes_per_s": cluster.intra.bytes_per_s,
        "inter_bytes_per_s": cluster.inter.bytes_per_s,
        "price_per_device_hour": cluster.device.price_per_hour,
    }


def _what_if(each: WhatIf) -> dict[str, Any]:
    time = time_entry(each.plan) if each.plan is not None else None
    return {
        "change": each.change,
        "outcome": each.outcome,
        "speed_up": each.speed_up,
        "summary": short(each.plan) if each.plan is not None else None,
        "step_time_s": time["step_time_s"] if time else None,
        "samples_per_s": time["samples_per_s"] if time else None,
    }


def timeline_document(plan: Plan) -> dict[str, Any] | None:
    """Return the step's timeline in few enough events to draw; None without a cluster."""
    if plan.forecast is None:
        return None
    events = step_events(every_step(plan), plan.forecast.cluster, plan.forecast.calibration)
    drawn = coalesced(events, _DRAWN_EVENTS)
    return {
        "summary": short(plan),
        "step_time_s": plan.forecast.time.step_time_s,
        "num_events": len(events),
        "events": [{name: getattr(event, name) for name in _OF_EVENT} for event in drawn],
    }


def comparison_document(entries: Sequence[Mapping[str, Any]], differences: Sequence[Difference]) -> dict[str, Any]:
    """Return plans with the difference of each to the first, as plain values."""
    return {
        "format": COMPARISON_FORMAT,
        "schema_version": SCHEMA_VERSION,
        "plans": [dict(entry) for entry in entries],
        "differences": [dataclasses.asdict(each) for each in differences],
    }


# --- Reading documents of ``--json``

_Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class _Part(BaseModel):
    """Base of the parts that are shown and compared; documents contain more."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Rank(_Part):
    allocated_bytes: _Int | None
    reserved_bytes: _Int | None
    moments: Annotated[dict[str, dict[str, _Int]], Field(min_length=1)]


class _Memory(_Part):
    limit_bytes: _Int | None
    needed_bytes: _Int
    ranks: Annotated[list[_Rank], Field(min_length=1)]


class _Time(_Part):
    step_time_s: float
    parts_s: dict[str, float]
    binds: str | None
    samples_per_s: float | None
    tokens_per_s: float | None
    tokens_per_s_per_device: float | None
    mfu: float | None
    price_per_billion_tokens_usd: float | None


class _Run(_Part):
    seconds: float


class _Plan(_Part):
    summary: str
    strategy: dict[str, Any]
    axes: dict[str, _Int]
    num_micro_batches: _Int
    micro_batch: _Int | float
    fits: bool
    time: _Time | None
    run: _Run | None = None  # earlier versions wrote none
    memory: _Memory


class _Document(_Part):
    model: dict[str, Any]
    plans: Annotated[list[_Plan], Field(min_length=1)]


def read_document(text: str, name: str) -> dict[str, Any] | None:
    """Read a document of ``--json``; None where the text is something else, such as a strategy.

    Args:
        text: Content of the file.
        name: Name of the file, for errors.

    Raises:
        ConfigError: When it is such a document, but damaged or of an unknown version.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        return None
    if found.get("schema_version") != SCHEMA_VERSION:
        raise _unreadable(name, f"schema_version {found.get('schema_version')!r}")
    try:
        _Document.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        raise _unreadable(name, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    return found


def _unreadable(name: str, got: str) -> ConfigError:
    return ConfigError(
        f"The plans in {name} cannot be read",
        expected=f"schema_version {SCHEMA_VERSION}, and at least one plan with its figures",
        got=got,
        fix="write the file again with meshwright plan --json",
    )


# --- The self-contained HTML page, which draws the JSON in it and loads nothing


def page(document: Mapping[str, Any]) -> str:
    """Return the HTML page of a document, whose element ``#plans`` contains the document unchanged.

    Args:
        document: Result of :func:`~meshwright.planner.explain.found_document`.

    Raises:
        ConfigError: When plotly, whose script draws the figures, is not installed.
    """
    parts = {
        "title": html.escape(_title(document)),
        "style": _part("page.css"),
        "plotly": _plotly(),
        # Only a closing tag could end the script element.
        "plans": json.dumps(document, indent=1).replace("<", "\\u003c"),
        "script": _part("page.js"),
    }
    return re.sub("%%([a-z]+)%%", lambda place: parts[place.group(1)], _part("page.html"))


def _title(document: Mapping[str, Any]) -> str:
    cluster = document["cluster"] or {}
    where = f" on {cluster['num_devices']} x {cluster['device']}" if cluster else ""
    return f"{document['model'].get('name', 'Model')}{where}"


def _part(name: str) -> str:
    return (resources.files("meshwright.planner.explain") / name).read_text()


def _plotly() -> str:
    fix = "pip install 'meshwright[report]', or leave --html out"
    library: Any = optional_library("plotly.offline", "Drawing the page's figures", fix)
    return library.get_plotlyjs()  # type: ignore[no-any-return]


# --- The simulated step in the Trace Event Format, for Perfetto and Chrome

_LANES = ("compute", "collective", "gather", "reduce", "send", "copy", "update", "host")
_COLORS = {
    "compute": "thread_state_running", "collective": "thread_state_iowait", "gather": "rail_load",
    "reduce": "rail_animation", "send": "rail_response", "update": "rail_idle", "copy": "generic_work",
}  # fmt: skip
_MICROSECONDS = 1e6
_CRITICAL = "critical path"


def trace(plan: Plan) -> dict[str, Any]:
    """Return a trace with a process per pipeline rank, a thread per stream, and a process for the critical path.

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
    """Let each event start after the one before: reductions that outlast backward overlap with it."""
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
