"""Lay out plans for the terminal: the ranked table, the reasons below it, and differences."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from meshwright.errors import readable_bytes
from meshwright.planner.explain.plan_difference import Difference
from meshwright.planner.explain.plan_figures import RunLength, plan_entry
from meshwright.planner.explain.plan_reasons import WhatIf, Why, sentences
from meshwright.planner.plans import MEMORY_CLASSES, Plan, building_rows, duration, number, part_name, percent, seconds

_BOTTLENECKS = {
    "tensor or sequence collectives": "layers' collectives",
    "data collectives": "communication",
    "copies between memories": "offload copies",
    "pipeline bubble": "bubble",
}
_LEAST_S = 1e-6  # what takes less, or differs by less, is not shown
_WIDE = 120
# Left out on narrow terminals, in this order.
_DISPENSABLE = ("bubble", "comm.", "per device", "allocated", "$/1e9 tokens", "batch")
# Characters for a strategy in two or three lines, for the bottleneck, and between columns; and the least of each.
_STRATEGY, _BINDING, _GAP = 34, 12, 2
_LEAST_STRATEGY, _LEAST_BINDING, _LEAST_GAP = 18, 10, 3
_LABELS = dict(MEMORY_CLASSES)


def ranked_table(
    plans: Sequence[Plan], title: str = "Plans", width: int = _WIDE, length: RunLength | None = None
) -> Table:
    """Return a table with one row per plan, in the given order.

    Args:
        plans: The plans.
        title: The title above them.
        width: Characters per line; narrow tables have fewer columns.
        length: Of a whole run, for a column with its time.
    """
    return entries_table([plan_entry(plan, length) for plan in plans], title, width)


def entries_table(entries: Sequence[Mapping[str, Any]], title: str = "Plans", width: int = _WIDE) -> Table:
    """Return the table of plans of ``--json``."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("#", justify="right")
    table.add_column("strategy", overflow="fold", min_width=_LEAST_STRATEGY)
    columns = _fitting({name: cells for name, cells in _columns(entries).items() if any(cells)}, width)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bottleneck", overflow="fold")
    for number_of_row, entry in enumerate(entries):
        cells = (column[number_of_row] for column in columns.values())
        style = "bold" if number_of_row == 0 else ""
        cut = "" if "batch" in columns else f"; {_cut(entry)}"
        table.add_row(str(number_of_row + 1), entry["summary"] + cut, *cells, _bottleneck(entry), style=style)
    limits = {entry["memory"]["limit_bytes"] for entry in entries}
    if len(limits) == 1 and None not in limits:
        limit = readable_bytes(limits.pop())
        shares = "; comm.: communication not overlapped" if "comm." in columns else ""
        table.caption = f"a x b: a micro-batches of b samples{shares}; memory that a plan may take of a device: {limit}"
        table.caption_justify = "left"
    return table


def _fitting(columns: dict[str, list[str]], width: int) -> dict[str, list[str]]:
    """Return the columns that leave room for a strategy."""
    shown = dict(columns)
    for name in _DISPENSABLE:
        if _width(shown, _GAP) + _STRATEGY + _BINDING + 4 * _GAP <= width:
            return shown
        shown.pop(name, None)
    while shown and _width(shown, _LEAST_GAP) + _LEAST_STRATEGY + _LEAST_BINDING + 4 * _LEAST_GAP > width:
        shown.pop("MFU" if "MFU" in shown else [*shown][-1])
    return shown


def _width(columns: Mapping[str, Sequence[str]], gap: int) -> int:
    return sum(max(map(len, (title, *cells))) + gap for title, cells in columns.items())


def _columns(entries: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the cells by column; empty columns are not shown."""
    tokens = any(_of(entry, "tokens_per_s") is not None for entry in entries)
    rate = "tokens/s" if tokens else "samples/s"
    figures: dict[str, tuple[str, Callable[[float], str]]] = {
        "step": ("step_time_s", seconds),
        rate: (rate.replace("/", "_per_"), number),
        "per device": ("tokens_per_s_per_device", number),
        "MFU": ("mfu", functools.partial(percent, digits=1)),
        "$/1e9 tokens": ("price_per_billion_tokens_usd", number),
    }
    found = {"batch": [_cut(entry) for entry in entries]}
    for name, (figure, text) in figures.items():
        values = [_of(entry, figure) for entry in entries]
        found[name] = ["" if value is None else text(value) for value in values]
    runs = [entry.get("run") for entry in entries]  # documents of earlier versions have none
    found["whole run"] = ["" if run is None else duration(run["seconds"]) for run in runs]
    found["comm."] = [_share(entry, "inline_s", "exposed_s") for entry in entries]
    found["bubble"] = [_share(entry, "bubble_s") for entry in entries]
    for kind in ("allocated", "reserved"):
        found[kind] = [_most(entry, f"{kind}_bytes") for entry in entries]
    found["memory"] = (
        [] if any(found["reserved"]) else [readable_bytes(entry["memory"]["needed_bytes"]) for entry in entries]
    )
    return found


def _cut(entry: Mapping[str, Any]) -> str:
    return f"{entry['num_micro_batches']} x {entry['micro_batch']}"


def _most(entry: Mapping[str, Any], kind: str) -> str:
    sizes = [rank[kind] for rank in entry["memory"]["ranks"] if rank[kind] is not None]
    return readable_bytes(max(sizes)) if sizes else ""


def _of(entry: Mapping[str, Any], figure: str) -> Any:
    return entry["time"][figure] if entry["time"] is not None else None


def _share(entry: Mapping[str, Any], *parts: str) -> str:
    """Return the share of some parts in the step; empty if there are none."""
    if entry["time"] is None:
        return ""
    spent = sum(entry["time"]["parts_s"].get(part, 0.0) for part in parts)
    return percent(spent / entry["time"]["step_time_s"]) if spent > _LEAST_S else ""


def _bottleneck(entry: Mapping[str, Any]) -> str:
    if not entry["fits"]:
        return "memory"
    largest = _of(entry, "binds")
    return "" if largest is None else _BOTTLENECKS.get(largest, largest)


def reasons(why: Why, most: int = 5, building: Plan | None = None) -> Group:
    """Lay out reasons under their headings, with the first few of longer lists.

    Args:
        why: Result of :func:`~meshwright.planner.explain.why`.
        most: Maximum number of lines under each heading.
        building: A plan, to say below what building its model takes.
    """
    parts: list[RenderableType] = []
    for heading, lines in sentences(why):
        shown = lines if lines is why.chosen else lines[:most]
        rest = [f"and {len(lines) - len(shown)} more (--json has all)"] if len(lines) > len(shown) else []
        parts += _section(heading, (*shown, *rest))
    if building is not None:
        parts += _section("Building the model", [f"{what}: {figure}" for what, figure in building_rows(building)])
    return Group(*parts)


def changed_circumstances(what_ifs: Sequence[WhatIf]) -> Group:
    """Lay out the results of :func:`~meshwright.planner.explain.what_if`; nothing where there are none."""
    return Group(*(_section("What if", [f"{each.change}: {each.outcome}" for each in what_ifs]) if what_ifs else []))


def _section(heading: str, lines: Iterable[str]) -> list[RenderableType]:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for line in lines:
        grid.add_row("-", Text(line))
    return [Text(heading, style="bold"), Padding(grid, (0, 0, 1, 1))]


def difference_table(difference: Difference) -> Group:
    """Lay out the changes from one plan to another with their effects, and the sums by part and by class."""
    title = Text(f"From {difference.first}\n  to {difference.second}", style="italic")
    if not difference.changes:
        return Group(title, Text("no difference"))
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("change", overflow="fold")
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("memory", justify="right", no_wrap=True)
    for effect in difference.effects:
        table.add_row(Text(effect.change), _more_s(effect.step_time_s), _more_bytes(effect.needed_bytes))
    if not difference.effects:
        table.add_row(Text("\n".join(difference.changes)), "", "")
    table.add_section()
    for part, delta in difference.seconds.items():
        if abs(delta) > _LEAST_S:
            table.add_row(part_name(part), _more_s(delta), "")
    table.add_section()
    for name, size in difference.num_bytes.items():
        table.add_row(_LABELS.get(name, name), "", _more_bytes(size))
    return Group(title, table)


def _more_s(delta: float | None) -> str:
    return "" if delta is None else f"{'+' if delta >= 0 else '-'}{seconds(abs(delta))}"


def _more_bytes(delta: int) -> str:
    return f"{'+' if delta >= 0 else '-'}{readable_bytes(abs(delta))}"
