"""One plan as plain values."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from meshwright.cost import moments
from meshwright.planner.explain.figures import (
    every_step,
    mfu,
    model_flops_per_s,
    per_gpu,
    price_per_billion_tokens,
    short,
)
from meshwright.planner.explain.links import links
from meshwright.planner.plan import Plan
from meshwright.planner.words import time_parts

_OF_LINK = ("kind", "axis", "moment", "between_nodes", "bound_inside", "hidden")


def plan_entry(plan: Plan) -> dict[str, Any]:
    """One plan with all its figures."""
    return {
        "summary": short(plan),
        "strategy": json.loads(plan.strategy.to_json()),
        "axes": dict(plan.step.axes),
        "num_micro_batches": plan.step.num_micro_batches,
        "micro_batch": plan.micro_batch,
        "fits": plan.fits,
        "time": time_entry(plan),
        "memory": _memory(plan),
        "traffic": [
            {name: getattr(link, name) for name in _OF_LINK} | {"seconds_alone": link.seconds} for link in links(plan)
        ],
        "notices": list(plan.notices),
        "gaps": list(plan.gaps),
    }


def time_entry(plan: Plan) -> dict[str, Any] | None:
    """Seconds and what follows from them; None where no cluster is known."""
    known = plan.forecast
    if known is None:
        return None
    return {
        "step_time_s": known.time.step_time_s,
        "parts_s": time_parts(known.time),
        "binds": known.time.binds,
        "samples": known.samples,
        "tokens_per_sample": known.tokens_per_sample,
        "samples_per_s": known.samples_per_s,
        "tokens_per_s": known.tokens_per_s,
        "tokens_per_s_per_device": per_gpu(plan),
        "model_flops_per_s_per_device": model_flops_per_s(plan),
        "mfu": mfu(plan),
        "price_per_step_usd": known.price_per_step,
        "price_per_billion_tokens_usd": price_per_billion_tokens(plan),
    }


def _memory(plan: Plan) -> dict[str, Any]:
    steps = every_step(plan)
    peaks = plan.forecast.peaks if plan.forecast is not None else ()
    return {
        "limit_bytes": plan.limit_bytes,
        "needed_bytes": plan.needed_bytes,
        "host_limit_bytes": plan.host_limit_bytes,
        "host_bytes": plan.host_bytes,
        "ranks": [
            {
                "rank": rank,
                "moment": peaks[rank].moment if peaks else None,
                "allocated_bytes": peaks[rank].allocated_bytes if peaks else None,
                "reserved_bytes": peaks[rank].reserved_bytes if peaks else None,
                "moments": {name: _classes(held) for name, held in moments(step).items()},
            }
            for rank, step in enumerate(steps)
        ],
    }


def _classes(held: Any) -> dict[str, int]:
    """Without what is empty."""
    return {name: size for name, size in dataclasses.asdict(held).items() if size}
