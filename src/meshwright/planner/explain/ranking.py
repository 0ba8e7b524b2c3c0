"""Plans for the terminal: the ranked table, and the reasons below it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from meshwright.planner.explain.difference import Difference
from meshwright.planner.explain.figures import (
    mfu,
    number,
    part_name,
    per_gpu,
    percent,
    price_per_billion_tokens,
    seconds,
    short,
)
from meshwright.planner.explain.what_if import WhatIf
from meshwright.planner.explain.why import Why, sentences
from meshwright.planner.plan import Plan
from meshwright.planner.sizes import readable_bytes
from meshwright.planner.table import MEMORY_CLASSES

_BINDS = {"tensor or sequence collectives": "blocks' collectives", "pipeline bubble": "bubble"}
_LABELS = dict(MEMORY_CLASSES)


def ranked_table(plans: Sequence[Plan], title: str = "Plans") -> Table:
    """One row for each plan, in the order given."""
    priced = any(price_per_billion_tokens(plan) is not None for plan in plans)
    tokens = any(per_gpu(plan) is not None for plan in plans)
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("#", justify="right")
    table.add_column("strategy", overflow="fold", min_width=24)
    names = ("batch", "step", "tokens/s" if tokens else "samples/s", "per GPU", "MFU", "allocated", "reserved")
    for name in (*names, *(("USD/1e9 tokens",) if priced else ())):
        table.add_column(name, justify="right", no_wrap=name != "USD/1e9 tokens")
    table.add_column("binds", overflow="fold")
    for rank, plan in enumerate(plans, 1):
        table.add_row(str(rank), short(plan), *_cells(plan, priced=priced), style="bold" if rank == 1 else "")
    limits = {plan.limit_bytes for plan in plans}
    if len(limits) == 1 and None not in limits:
        table.caption = (
            f"batch: micro-batches x samples; tensors can have {readable_bytes(limits.pop() or 0)} of a device"
        )
        table.caption_justify = "left"
    return table


def _cells(plan: Plan, *, priced: bool) -> Iterable[str]:
    known, rate, used, price = plan.forecast, per_gpu(plan), mfu(plan), price_per_billion_tokens(plan)
    yield f"{plan.step.num_micro_batches} x {plan.micro_batch}"
    if known is None:
        yield from ("", "", "", "", readable_bytes(plan.needed_bytes), "", *(("",) if priced else ()), "")
        return
    whole = known.tokens_per_s if known.tokens_per_s is not None else known.samples_per_s
    yield seconds(known.time.step_time_s)
    yield number(whole)
    yield number(rate if rate is not None else whole / known.cluster.num_devices)
    yield percent(used, 1) if used is not None else ""
    yield readable_bytes(known.peak.allocated_bytes)
    yield readable_bytes(max(peak.reserved_bytes for peak in known.peaks))
    if priced:
        yield f"{price:,.0f}" if price is not None else ""
    yield _BINDS.get(known.time.binds, known.time.binds) if plan.fits else "memory"


def reasons(why: Why, what_ifs: Sequence[WhatIf] = (), most: int = 5) -> Group:
    """Reasons under their headings; of the longer lists the first few.

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
    """The changes from one plan to another, with what each does, and the sums by part and by class."""
    table = Table(box=box.SIMPLE_HEAD, title=f"{difference.first}  ->  {difference.second}", title_justify="left")
    table.add_column("change", overflow="fold")
    table.add_column("step", justify="right")
    table.add_column("memory", justify="right")
    for effect in difference.effects:
        table.add_row(Text(effect.change), _more_s(effect.step_time_s), _more_bytes(effect.needed_bytes))
    if not difference.effects:
        table.add_row(Text("\n".join(difference.changes) or "nothing"), "", "")
    if difference.seconds:
        table.add_section()
    for part, delta in difference.seconds.items():
        if abs(delta) > 1e-6:
            table.add_row(part_name(part), _more_s(delta), "")
    table.add_section()
    for name, delta in difference.num_bytes.items():
        table.add_row(_LABELS.get(name, name), "", _more_bytes(delta))
    return Group(table)


def _more_s(delta: float | None) -> str:
    return "" if delta is None else f"{'+' if delta >= 0 else '-'}{seconds(abs(delta))}"


def _more_bytes(delta: int) -> str:
    return f"{'+' if delta >= 0 else '-'}{readable_bytes(abs(delta))}"
