"""Laws of the best plan, whatever the model: it gets no worse when something gets better."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings, strategies as st

from meshwright.cost import Link, find_cluster, make_cluster
from meshwright.errors import StrategyError
from meshwright.planner import FamilyWorkload, Shape, default_space
from meshwright.planner.search import search
from meshwright.planner.search.search_state import rank_of_plan
from meshwright.strategy import Strategy

SHAPES = st.builds(
    Shape,
    family=st.sampled_from(["gpt", "llama"]),
    layers=st.sampled_from([4, 8]),
    hidden=st.sampled_from([1024, 2048]),
    heads=st.just(16),
    vocab=st.just(32000),
    seq=st.sampled_from([1024, 2048]),
)
TIES = 2e-3  # predictions that differ by less than four digits are ties
QUICK = settings(max_examples=3, deadline=None)


def best(subject, **changes):
    space = default_space(subject)
    sizes = {axis: space.sizes[axis] for axis in ("tensor", "pipeline")}
    pipelines = space.axis_methods | {"pipeline": space.axis_methods["pipeline"][:1]}
    small = space.replace(sizes=sizes, axis_methods=pipelines, precision=space.precision[:1], hybrid=False, **changes)
    try:
        # By what plans are ranked by, seconds with surcharges: a simpler plan may be a little slower.
        return rank_of_plan(search(subject, space=small, top=1).plans[0], "tokens_per_s")[0]
    except StrategyError:
        return float("inf")


@pytest.mark.long
@QUICK
@given(SHAPES, st.sampled_from([1.0, 1.5, 3.0]), st.sampled_from([2, 4]))
def test_more_memory_never_hurts(shape, gib, devices):
    subject = FamilyWorkload(shape, make_cluster("A100", devices), 16)
    little, more = (dataclasses.replace(subject, limit_bytes=round(gib * times * 2**30)) for times in (1, 2))
    assert best(more) <= best(little) * (1 + TIES)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(Shape("gpt", 8, 1024, 16, 32000, 1024), marks=pytest.mark.long),
        Shape("llama", 4, 2048, 16, 32000, 1024),
    ],
)
def test_more_memory_never_hurts_where_offloading_does_better_than_what_fits_without(shape):
    subject = FamilyWorkload(shape, make_cluster("A100", 2), 16)
    limits = (round(gib * 2**30) for gib in (0.4, 0.6, 0.8, 1.0, 1.3, 1.7, 2.2, 3.0, 4.5, 8.0))
    steps = [best(dataclasses.replace(subject, limit_bytes=limit)) for limit in limits]
    assert steps[1] < float("inf")
    assert all(more <= less * (1 + TIES) for less, more in itertools.pairwise(steps))


@QUICK
@given(SHAPES, st.sampled_from(["intra", "inter"]), st.floats(1.5, 20), st.sampled_from([2, 4]))
def test_a_faster_link_never_slows_the_best(shape, name, factor, per_node):
    cluster = make_cluster("A100", 4, per_node)
    link = getattr(cluster, name)
    faster = dataclasses.replace(cluster, **{name: Link(link.bytes_per_s * factor, link.latency_s / factor)})
    before, after = (best(FamilyWorkload(shape, each, 16)) for each in (cluster, faster))
    assert after <= before * (1 + TIES)


@QUICK
@given(SHAPES, st.sampled_from([2, 4]), st.sampled_from([None, 1.0, 2.0]))
def test_more_devices_never_slow_a_batch_that_they_can_share(shape, devices, gib):
    # Not beyond what the batch has samples for: ranks divide layers then, and may send more than they save.
    limit = None if gib is None else round(gib * 2**30)
    few, many = (
        best(FamilyWorkload(shape, make_cluster("H100", number), 32, limit_bytes=limit))
        for number in (devices, 2 * devices)
    )
    assert many <= few * (1 + TIES)


@QUICK
@given(SHAPES, st.sampled_from(["half", "amp_native"]), st.sampled_from([1, 4]))
def test_a_higher_zero_level_and_a_smaller_micro_batch_hold_no_more(shape, precision, micro_batches):
    subject = FamilyWorkload(shape, find_cluster("h100x8"), 64)

    def held(level, number):
        return subject.plan(Strategy([*level, (precision, "bf16")]), number).needed_bytes

    sizes = [held(level, micro_batches) for level in ([], ["zero1"], ["zero2"], ["fsdp"])]
    assert sizes == sorted(sizes, reverse=True)
    by_micro_batch = [held(["zero2"], number) for number in (8, 4, 2)]
    assert by_micro_batch == sorted(by_micro_batch)
