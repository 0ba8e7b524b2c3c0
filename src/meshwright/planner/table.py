"""The plan as a table: memory per rank by class, predicted, and beside it what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from meshwright.cost import copies
from meshwright.planner.sizes import readable_bytes
from meshwright.planner.words import number, part_name, seconds, time_parts

if TYPE_CHECKING:
    from rich.table import Table

    from meshwright.planner.forecast import Forecast
    from meshwright.planner.plan import Plan

MEMORY_CLASSES = (  # fields of Memory, and what people call them
    ("parameters", "parameters"),
    ("master", "fp32 master weights"),
    ("gradients", "gradients"),
    ("optimizer", "optimizer state"),
    ("outer", "global weights and outer state"),
    ("average", "averaged weights"),
    ("buffers", "buffers"),
    ("activations", "activations"),
    ("recomputation", "activations recomputed"),
    ("returned", "activations brought back"),
    ("gathered", "gathered while computing"),
    ("updating", "held while updating"),
    ("host_parameters", "on the host: parameters"),
    ("host_master", "on the host: copies to update"),
    ("host_gradients", "on the host: gradients"),
    ("host_optimizer", "on the host: optimizer state"),
    ("host_activations", "on the host: activations"),
    ("host_average", "on the host: averaged weights"),
    ("disk_master", "on disk: copies to update"),
    ("disk_optimizer", "on disk: optimizer state"),
)
_ALWAYS = {"parameters", "gradients", "optimizer", "activations", "buffers"}


def plan_table(plan: Plan, measured: Mapping[str, int] | None = None) -> Table:
    """Builds the table of a plan.

    Args:
        plan: The plan.
        measured: Bytes by class, as measured; adds a column.
    """
    from rich import box  # imported where a table is wanted: most ranks print none
    from rich.table import Table

    axes = " x ".join(f"{name} {size}" for name, size in plan.step.axes)
    methods = [str(method) for method in plan.strategy.methods if method.method_name != "parallel_mode"]
    title = f"Plan: {' + '.join(methods) or 'data parallel'} on {axes}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("memory per rank")
    table.add_column("predicted", justify="right")
    if measured is not None:
        table.add_column("measured", justify="right")
    for field, label in MEMORY_CLASSES:
        size = getattr(plan.memory, field)
        if size or field in _ALWAYS:
            table.add_row(label, _cell(size), *_measured_cell(measured, field))
    table.add_section()
    table.add_row("total", readable_bytes(plan.needed_bytes), *(() if measured is None else ("",)))
    if plan.limit_bytes is not None:
        table.add_row("limit", readable_bytes(plan.limit_bytes), *(() if measured is None else ("",)))
    if plan.forecast is not None:
        _add_time(table, plan.forecast, () if measured is None else ("",))
    for copy in copies(plan.step):
        what = f"copies from {copy.source} to {copy.target} in {copy.moment}, per step"
        table.add_row(what, readable_bytes(copy.bytes_per_step), *(() if measured is None else ("",)))
    if plan.step.traffic:
        table.add_section()
        for traffic in plan.step.traffic:
            when = "per step" if traffic.every == 1 else f"every {traffic.every} steps"
            what = f"{traffic.kind} over {traffic.axis} in {traffic.moment}, {when}"
            table.add_row(what, readable_bytes(traffic.bytes_per_step), *(() if measured is None else ("",)))
    return table


def _add_time(table: Table, forecast: Forecast, beside: tuple[str, ...]) -> None:
    """Where a step's seconds go, and what it reaches."""
    table.add_section()
    for part, spent in time_parts(forecast.time).items():
        if spent:
            table.add_row(part_name(part), seconds(spent), *beside)
    table.add_row("step", seconds(forecast.time.step_time_s), *beside)
    if forecast.tokens_per_s is not None:
        table.add_row("tokens/s", number(forecast.tokens_per_s), *beside)
    table.add_section()


def _cell(size: int | None) -> str:
    return "unknown" if size is None else readable_bytes(size)


def _measured_cell(measured: Mapping[str, int] | None, field: str) -> tuple[str, ...]:
    if measured is None:
        return ()
    return (readable_bytes(measured[field]) if field in measured else "",)
