"""The terminal's table and reasons say what the plans say, on wide and narrow terminals."""

import dataclasses
import io

import pytest
from rich.console import Console

from meshwright.errors import readable_bytes
from meshwright.planner import plan_table
from meshwright.planner.explain import (
    changed_circumstances,
    diff,
    difference_table,
    mfu,
    ranked_table,
    reasons,
    what_if,
    why,
)
from tests.planner.explain.found import found, plan_of, subject, subject_of


def printed(renderable, width):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


def test_a_wide_table_has_all_figures_and_a_narrow_one_what_fits():
    wide = printed(ranked_table(found().plans, "Plans", 160), 160)
    used = f"{100 * mfu(found().plans[0]):.1f} %"
    for word in (used, "batch", "tokens/s", "per device", "MFU", "$/1e9 tokens", "allocated", "reserved", "bottleneck"):
        assert word in wide
    narrow = printed(ranked_table(found().plans, "Plans", 80), 80)
    assert "per device" not in narrow
    assert max(map(len, narrow.splitlines())) <= 80
    assert all(word in narrow for word in ("#", "strategy", "step", "tokens/s", "reserved", "bottleneck"))
    assert "1 x" in narrow  # how the batch is cut stands with the strategy


@pytest.mark.parametrize("width", [80, 100, 120, 140, 160])
def test_what_binds_is_always_there_to_read_and_strategies_have_room(width):
    lines = printed(ranked_table(found().plans, "Plans", width), width).splitlines()
    assert max(map(len, lines)) <= width
    header = next(line for line in lines if "strategy" in line)
    assert "bottleneck" in header
    assert ("batch" in header) != any("; 1 x" in line for line in lines)
    if width >= 100:
        assert header.index("strategy") + 30 <= header.index("batch")
    bound = {"compute", "bubble", "update", "communication"}
    assert any(word in line for line in lines for word in bound)


@pytest.mark.parametrize("width", [40, 50, 60, 70, 78])
def test_a_table_narrower_than_a_terminal_keeps_what_binds(width):
    lines = printed(ranked_table(found().plans, "Plans", width), width).splitlines()
    header = next(line for line in lines if "strategy" in line)
    assert "#" in header
    assert "bottleneck" in header
    assert "…" not in "".join(lines)
    assert any(word in line for line in lines for word in ("compute", "bubble", "update"))


def test_the_table_of_one_plan_has_its_time():
    text = printed(plan_table(found().plans[0]), 120)
    assert "computing" in text
    assert f"{found().plans[0].forecast.time.step_time_s:.2f} s" in text


def test_what_does_not_fit_is_bound_by_memory_and_without_a_cluster_there_is_no_time():
    assert "memory" in printed(ranked_table(found().too_large, width=160), 160).splitlines()[4]
    blind = printed(ranked_table([dataclasses.replace(found().plans[0], forecast=None)], width=160), 160)
    assert readable_bytes(found().plans[0].needed_bytes) in blind
    assert "tokens/s" not in blind.replace("strategy", "")


def test_reasons_are_cut_with_a_word():
    asked = what_if(subject_of, found())
    text = printed(reasons(why(found()), most=2), 120) + printed(changed_circumstances(asked), 120)
    assert "and 2 more (--json has all)" in text
    headings = ("Why this plan", "Why not the others", "What does not fit", "What is ruled out", "What if")
    assert [line for line in text.splitlines() if line.strip() in headings] == list(headings)


def test_a_difference_is_a_table():
    text = printed(difference_table(diff(plan_of(1), plan_of(0), subject())), 100)
    assert "~ 1 micro-batch of 4 -> 2 micro-batches of 2" in text
    assert "activations" in text
    assert "no difference" in printed(difference_table(diff(found().plans[0], found().plans[0])), 100)
