"""Plans for the terminal: the ranked table, and the reasons below it."""

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
from meshwright.planner.explain.plan_figures import plan_entry
from meshwright.planner.explain.plan_reasons import WhatIf, Why, sentences
from meshwright.planner.plans import MEMORY_CLASSES, Plan, number, part_name, percent, seconds

_BINDS = {"tensor or sequence collectives": "blocks' collectives", "pipeline bubble": "bubble"}
_TOLD_S = 1e-6
_WIDE = 120
_DISPENSABLE = ("per device", "allocated", "$/1e9 tokens", "batch")  # on narrow terminals, in this order
_STRATEGY, _BINDING, _GAP = 34, 10, 2  # characters: a strategy in two or three lines, what binds, between columns
_LEAST_STRATEGY, _LEAST_BINDING, _BETWEEN = 18, 7, 3  # the same where not even these leave room
_LABELS = dict(MEMORY_CLASSES)


def ranked_table(plans: Sequence[Plan], title: str = "Plans", width: int = _WIDE) -> Table:
    """One row for each plan, in the order given.

    Args:
        plans: The plans.
        title: Above them.
        width: Characters of a line; on narrow ones some columns are left out.
    """
    return entries_table([plan_entry(plan) for plan in plans], title, width)


def entries_table(entries: Sequence[Mapping[str, Any]], title: str = "Plans", width: int = _WIDE) -> Table:
    """Return the same of plans as ``--json`` has them."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("#", justify="right")
    table.add_column("strategy", overflow="fold", min_width=_LEAST_STRATEGY)
    columns = _fitting({name: cells for name, cells in _columns(entries).items() if any(cells)}, width)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("binds", overflow="fold")
    for number_of_row, entry in enumerate(entries):
        cells = (column[number_of_row] for column in columns.values())
        style = "bold" if number_of_row == 0 else ""
        cut = "" if "batch" in columns else f"; {_cut(entry)}"
        table.add_row(str(number_of_row + 1), entry["summary"] + cut, *cells, _binds(entry), style=style)
    limits = {entry["memory"]["limit_bytes"] for entry in entries}
    if len(limits) == 1 and None not in limits:
        limit = readable_bytes(limits.pop())
        table.caption = f"a x b: a micro-batches of b samples; tensors can have {limit} of a device"
        table.caption_justify = "left"
    return table


def _fitting(columns: dict[str, list[str]], width: int) -> dict[str, list[str]]:
    """Return the columns that leave room for a strategy."""
    kept = dict(columns)
    for name in _DISPENSABLE:
        if _taken(kept, _GAP) + _STRATEGY + _BINDING + 4 * _GAP <= width:
            return kept
        kept.pop(name, None)
    while kept and _taken(kept, _BETWEEN) + _LEAST_STRATEGY + _LEAST_BINDING + 4 * _BETWEEN > width:
        kept.pop("MFU" if "MFU" in kept else [*kept][-1])
    return kept


def _taken(columns: Mapping[str, Sequence[str]], gap: int) -> int:
    return sum(max(map(len, (title, *cells))) + gap for title, cells in columns.items())


def _columns(entries: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the cells by column; a column without any is not shown."""
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
    for kind in ("allocated", "reserved"):
        found[kind] = [_most(entry, f"{kind}_bytes") for entry in entries]
    found["memory"] = [] if any(found["reserved"]) else [_needed(entry) for entry in entries]
    return found


def _cut(entry: Mapping[str, Any]) -> str:
    return f"{entry['num_micro_batches']} x {entry['micro_batch']}"


def _most(entry: Mapping[str, Any], kind: str) -> str:
    sizes = [rank[kind] for rank in entry["memory"]["ranks"] if rank[kind] is not None]
    return readable_bytes(max(sizes)) if sizes else ""


def _needed(entry: Mapping[str, Any]) -> str:
    return readable_bytes(entry["memory"]["needed_bytes"])


def _of(entry: Mapping[str, Any], figure: str) -> Any:
    return entry["time"][figure] if entry["time"] is not None else None


def _binds(entry: Mapping[str, Any]) -> str:
    if not entry["fits"]:
        return "memory"
    binds = _of(entry, "binds")
    return "" if binds is None else _BINDS.get(binds, binds)


def reasons(why: Why, what_ifs: Sequence[WhatIf] = (), most: int = 5) -> Group:
    """Return the reasons under their headings; of the longer lists the first few.

    Args:
        why: Of :func:`~meshwright.planner.explain.why`.
        what_ifs: Of :func:`~meshwright.planner.explain.what_if`.
        most: Lines under each heading.
    """
    parts: list[RenderableType] = []
    for heading, lines in sentences(why):
        shown = lines if lines is why.chosen else lines[:most]
        rest = [f"and {len(lines) - len(shown)} more (--json has all)"] if len(lines) > len(shown) else []
        parts += _section(heading, (*shown, *rest))
    if what_ifs:
        parts += _section("What if", [f"{each.change}: {each.outcome}" for each in what_ifs])
    return Group(*parts)


def _section(heading: str, lines: Iterable[str]) -> list[RenderableType]:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for line in lines:
        grid.add_row("-", Text(line))
    return [Text(heading, style="bold"), Padding(grid, (0, 0, 1, 1))]


def difference_table(difference: Difference) -> Group:
    """Return the changes from one plan to another, with what each does, and the sums by part and by class."""
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
        if abs(delta) > _TOLD_S:
            table.add_row(part_name(part), _more_s(delta), "")
    table.add_section()
    for name, size in difference.num_bytes.items():
        table.add_row(_LABELS.get(name, name), "", _more_bytes(size))
    return Group(title, table)


def _more_s(delta: float | None) -> str:
    return "" if delta is None else f"{'+' if delta >= 0 else '-'}{seconds(abs(delta))}"


def _more_bytes(delta: int) -> str:
    return f"{'+' if delta >= 0 else '-'}{readable_bytes(abs(delta))}"
