"""Plans as plain values: what ``--json`` prints, and what the page shows. Its keys are stable; see docs/planner.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.cost import Cluster, coalesced, step_events
from meshwright.planner.explain.difference import Difference, diff
from meshwright.planner.explain.entry import plan_entry, time_entry
from meshwright.planner.explain.figures import every_step, short
from meshwright.planner.explain.what_if import WhatIf
from meshwright.planner.explain.why import against, too_large, why
from meshwright.planner.plan import Plan, Subject
from meshwright.planner.search import Found

FORMAT = "meshwright.plans"
COMPARISON_FORMAT = "meshwright.comparison"
SCHEMA_VERSION = 1
_DRAWN_EVENTS = 3000


def found_document(
    found: Found,
    *,
    model: Mapping[str, Any],
    objective: str = "tokens_per_s",
    what_ifs: Sequence[WhatIf] = (),
    subject: Subject | None = None,
) -> dict[str, Any]:
    """A search's result with its reasons, as plain values.

    Args:
        found: With at least one plan.
        model: What was planned for: name and whatever describes it.
        objective: What the plans are ranked by.
        what_ifs: Of :func:`~meshwright.planner.explain.what_if`.
        subject: Given it, the difference to the second plan is told change by change.
    """
    best, reasons = found.plans[0], why(found)
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
            "refused": [{"strategy": strategy, "reason": reason} for strategy, reason in found.refused],
        },
        "plans": [
            plan_entry(plan) | {"against_first": against(plan, best) if number else None}
            for number, plan in enumerate(found.plans)
        ],
        "too_large": [plan_entry(plan) | {"against_limit": too_large(plan)} for plan in found.too_large],
        "why": list(reasons.chosen),
        "what_if": [_what_if(each) for each in what_ifs],
        "differences": [_difference(diff(best, plan, subject)) for plan in found.plans[1:2]],
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


def _difference(difference: Difference) -> dict[str, Any]:
    return dataclasses.asdict(difference)


def timeline_document(plan: Plan) -> dict[str, Any] | None:
    """The step laid out in time, in few enough events to draw; None where no cluster is known."""
    if plan.forecast is None:
        return None
    events = step_events(every_step(plan), plan.forecast.cluster, plan.forecast.calibration)
    drawn = coalesced(events, _DRAWN_EVENTS)
    return {
        "summary": short(plan),
        "step_time_s": plan.forecast.time.step_time_s,
        "num_events": len(events),
        "events": [
            {
                "rank": event.rank,
                "lane": event.lane,
                "name": event.name,
                "start_s": event.start_s,
                "end_s": event.end_s,
                "critical": event.critical,
            }
            for event in drawn
        ],
    }


def comparison_document(entries: Sequence[Mapping[str, Any]], differences: Sequence[Difference]) -> dict[str, Any]:
    """Plans beside each other, with the difference of each to the first."""
    return {
        "format": COMPARISON_FORMAT,
        "schema_version": SCHEMA_VERSION,
        "plans": [dict(entry) for entry in entries],
        "differences": [_difference(each) for each in differences],
    }
