"""The difference of two plans: every change, and effects that add up to the whole."""

import pytest

from meshwright.planner.explain import diff, entries_diff, plan_entry
from tests.planner.explain.found import found, plan_of, subject


@pytest.mark.parametrize("other", range(1, 5))
def test_effects_add_up(other):
    first, second = found().plans[0], found().plans[other]
    difference = diff(first, second, subject())
    whole = second.forecast.time.step_time_s - first.forecast.time.step_time_s
    assert sum(effect.step_time_s for effect in difference.effects) == pytest.approx(whole, abs=1e-12)
    assert sum(difference.seconds.values()) == pytest.approx(whole, abs=1e-12)
    assert sum(effect.needed_bytes for effect in difference.effects) == second.needed_bytes - first.needed_bytes
    held = second.forecast.peak.allocated_bytes - first.forecast.peak.allocated_bytes
    assert sum(difference.num_bytes.values()) == held


def test_changes_are_named_once():
    difference = diff(plan_of(1), plan_of(2), subject())
    assert len(difference.changes) == 1
    assert difference.changes[0].startswith("+ checkpoint")
    assert [effect.change for effect in difference.effects] == list(difference.changes)
    (effect,) = difference.effects
    assert effect.step_time_s > 0 > effect.needed_bytes
    lines = diff(plan_of(1), plan_of(3)).changes
    assert {"~ axis zero 16 -> 2", "~ axis tensor 1 -> 8", "+ tensor_parallel"} <= set(lines)


def test_written_plans_differ_as_living_ones():
    first, second = found().plans[0], found().plans[3]
    assert entries_diff(plan_entry(first), plan_entry(second)) == diff(first, second)
    assert diff(first, first, subject()).effects == ()
    assert diff(first, first).changes == ()
