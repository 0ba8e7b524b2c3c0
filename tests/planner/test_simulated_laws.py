"""Laws of the simulated step that hold whatever the model, the strategy and the cluster."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings, strategies as st

from meshwright.cost import find_device, make_cluster, peak, simulate, timeline
from meshwright.methods import cost_of
from meshwright.planner.family_ops import BLOCK, FamilyRun
from meshwright.planner.family_steps import family_step
from meshwright.planner.model_shapes import Shape
from meshwright.strategy import Strategy

SHAPES = st.builds(
    Shape,
    family=st.sampled_from(["gpt", "llama"]),
    layers=st.integers(2, 12),
    hidden=st.sampled_from([1024, 2048, 4096]),
    heads=st.sampled_from([8, 16]),
    vocab=st.sampled_from([32000, 50304]),
    seq=st.sampled_from([1024, 4096]),
)
ZERO = ("zero1", "zero2", "fsdp")


def steps(shape, *, zero="fsdp", ranks=8, micro_batch=1, micro_batches=1, recompute=False, tensor=1, pipeline=1):
    axes = [("tensor", tensor), ("zero", ranks), ("pipeline", pipeline)]
    axes = [(name, size) for name, size in axes if size > 1 or name == "zero"]
    methods = [("parallel_mode", {"axes": axes}), zero, ("amp_native", "bf16")]
    methods += ["tensor_parallel"] if tensor > 1 else []
    methods += ["pipeline_parallel"] if pipeline > 1 else []
    methods += [("checkpoint", BLOCK)] if recompute else []
    run = FamilyRun(micro_batch, micro_batches, seq=shape.seq)
    strategy = Strategy(methods)
    return [cost_of(strategy, step) for step in family_step(shape, run, axes, shard_axis="zero")]


def seconds(every, cluster):
    return simulate(every, cluster).step_time_s


def bytes_of(every):
    return max(peak(step).reserved_bytes for step in every)


@settings(max_examples=12, deadline=None)
@given(SHAPES, st.sampled_from([8, 16, 64]), st.sampled_from([1, 3]))
def test_a_higher_zero_level_holds_less(shape, ranks, micro_batches):
    held = [bytes_of(steps(shape, zero=zero, ranks=ranks, micro_batches=micro_batches)) for zero in ZERO]
    assert held == sorted(held, reverse=True)


@settings(max_examples=12, deadline=None)
@given(SHAPES, st.sampled_from(ZERO), st.sampled_from([8, 32]))
def test_more_work_takes_longer_and_holds_more(shape, zero, ranks):
    cluster = make_cluster("H100", ranks)
    one, two = (steps(shape, zero=zero, ranks=ranks, micro_batch=size) for size in (1, 2))
    assert seconds(one, cluster) < seconds(two, cluster) < 2.2 * seconds(one, cluster)
    assert bytes_of(one) < bytes_of(two)
    deeper = dataclasses.replace(shape, layers=shape.layers + 1)
    assert seconds(one, cluster) < seconds(steps(deeper, zero=zero, ranks=ranks), cluster)
    longer = steps(shape, zero=zero, ranks=ranks, micro_batches=4)
    assert seconds(one, cluster) < seconds(longer, cluster)


@settings(max_examples=12, deadline=None)
@given(SHAPES, st.sampled_from(ZERO))
def test_recomputation_trades_time_for_memory(shape, zero):
    cluster = make_cluster("A100", 8)
    plain, again = steps(shape, zero=zero, micro_batch=4), steps(shape, zero=zero, micro_batch=4, recompute=True)
    assert bytes_of(again) < bytes_of(plain)
    ratio = seconds(again, cluster) / seconds(plain, cluster)
    assert 1.0 < ratio < 1.4  # backward is two forwards; one more is a third of all, less what is outside the blocks


@settings(max_examples=12, deadline=None)
@given(SHAPES, st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.floats(1.1, 10))
def test_faster_hardware_never_slows(shape, tensor, pipeline, factor):
    every = steps(shape, ranks=8, tensor=tensor, pipeline=pipeline, micro_batches=4)
    cluster = make_cluster("A100", 8 * tensor * pipeline)
    before = seconds(every, cluster)
    for name in ("intra", "inter"):
        link = getattr(cluster, name)
        quicker = dataclasses.replace(link, bytes_per_s=link.bytes_per_s * factor, latency_s=link.latency_s / factor)
        assert seconds(every, dataclasses.replace(cluster, **{name: quicker})) <= before * (1 + 1e-9)
    for name in ("half_flops_per_s", "bandwidth_bytes_per_s"):
        better = dataclasses.replace(cluster.device, **{name: getattr(cluster.device, name) * factor})
        assert seconds(every, dataclasses.replace(cluster, device=better)) < before


def test_what_does_not_fit_may_fit_a_larger_device_and_never_the_other_way():
    needed = bytes_of(steps(Shape("llama", 32, 4096, 32, 32000, 4096), micro_batch=1))
    fits = [needed <= find_device(name).memory_bytes for name in ("L4", "A100-40", "A100-80", "H200", "MI300X")]
    assert fits == sorted(fits)
    assert True in fits


def test_the_parts_add_up_and_the_largest_binds():
    shape = Shape("llama", 16, 4096, 32, 32000, 4096)
    for every, ranks in ((steps(shape), 8), (steps(shape, pipeline=4, micro_batches=8), 32)):
        time = simulate(every, make_cluster("H100", ranks))
        parts = (
            time.compute_s
            + time.inline_s
            + time.exposed_s
            + time.copies_s
            + time.bubble_s
            + time.update_s
            + time.overhead_s
        )
        assert parts == pytest.approx(time.step_time_s)
        assert time.binds == "compute"
    assert time.bubble_s > 0
    slow = make_cluster("A100", 64, 8, node_gbps=10)
    assert simulate(steps(shape, ranks=64), slow).binds == "data collectives"


def test_events_of_a_micro_batch():
    events = timeline(steps(Shape("gpt", 4, 1024, 8, 32000, 1024))[0], make_cluster("A100", 8))
    assert {event.stream for event in events} == {"compute", "link"}
    names = [event.name for event in events]
    assert names.count("forward 3") == names.count("gather 3 again") == names.count("reduce 3") == 1
    assert any(event.critical for event in events)
    for stream in ("compute", "link"):
        own = [event for event in events if event.stream == stream]
        assert all(a.end_s <= b.start_s + 1e-12 for a, b in itertools.pairwise(own))


def test_a_step_that_knows_only_its_flops_is_simulated_too():
    step = steps(Shape("gpt", 4, 1024, 8, 32000, 1024))[0]
    bare = step.replace(blocks=tuple(dataclasses.replace(block, ops=()) for block in step.blocks))
    cluster = make_cluster("A100", 8)
    assert seconds([bare], cluster) == pytest.approx(seconds([step], cluster), rel=0.6)
