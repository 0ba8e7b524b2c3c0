"""The step laid out in time ends when the simulation says, whatever the strategy."""

import dataclasses
import itertools

import pytest

from meshwright.cost import coalesced, make_cluster, simulate, step_events
from meshwright.cost.calibration import fitted
from meshwright.methods import cost_of
from meshwright.planner.family_ops import FamilyRun
from meshwright.planner.family_steps import family_step
from meshwright.planner.model_shapes import Shape
from meshwright.strategy import Strategy

SHAPE = Shape("llama", 16, 2048, 16, 32000, 2048)
LAYOUTS = {
    "data": ({"data": 16}, [], 2),
    "zero1": ({"zero": 16}, ["zero1"], 3),
    "fsdp": ({"zero": 16}, ["fsdp"], 1),
    "fsdp, micro-batches": ({"zero": 16}, ["fsdp"], 4),
    "tensor": ({"tensor": 4, "zero": 4}, ["tensor_parallel", "fsdp"], 2),
    "gpipe": ({"zero": 4, "pipeline": 4}, ["zero1", ("pipeline_parallel", {"schedule": "gpipe"})], 4),
    "1f1b": ({"tensor": 2, "zero": 2, "pipeline": 4}, ["tensor_parallel", "fsdp", "pipeline_parallel"], 16),
    "interleaved": (
        {"zero": 4, "pipeline": 4},
        ["zero1", ("pipeline_parallel", {"schedule": "interleaved", "num_stages_per_rank": 2})],
        8,
    ),
    "zbv": ({"zero": 4, "pipeline": 4}, ["zero1", ("pipeline_parallel", {"schedule": "zbv"})], 8),
}


def steps(axes, methods, micro_batches):
    axes = list(axes.items())
    strategy = Strategy([("parallel_mode", {"axes": axes}), ("amp_native", "bf16"), *methods])
    shards = next((axis for axis, _ in axes if axis == "zero"), None)
    pipeline = strategy.get("pipeline_parallel")
    ranks = pipeline.ranks_of_stages(dict(axes)["pipeline"]) if pipeline else ()
    run = FamilyRun(1, micro_batches, seq=SHAPE.seq)
    described = family_step(SHAPE, run, axes, shard_axis=shards, stage_ranks=ranks)
    return [cost_of(strategy, step) for step in described]


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_last_event_ends_with_the_step(name):
    every, cluster = steps(*LAYOUTS[name]), make_cluster("A100", 16)
    time = simulate(every, cluster)
    events = step_events(every, cluster)
    assert max(event.end_s for event in events) == pytest.approx(time.step_time_s, rel=1e-9)
    assert min(event.start_s for event in events) == 0.0
    assert {event.rank for event in events} == set(range(len(every)))
    lanes: dict = {}
    for event in events:
        lanes.setdefault((event.rank, event.lane), []).append(event)
    for (_, lane), own in lanes.items():  # a lane does one thing at a time, but for sends to different ranks
        if lane != "send":
            assert all(a.end_s <= b.start_s + 1e-9 for a, b in itertools.pairwise(own)), lane
    busy = [
        sum(e.seconds for e in events if e.rank == r and e.lane in ("compute", "collective")) for r in range(len(every))
    ]
    # Slowed down beside collectives, but never faster than alone.
    assert time.compute_s + time.inline_s <= max(busy) * (1 + 1e-6)
    assert (time.inline_s > 0) == any(event.lane == "collective" for event in events)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zbv"])
def test_ranks_that_share_cores_end_with_the_step_too(name):
    known = fitted()
    shared = dataclasses.replace(known, constants=dataclasses.replace(known.constants, per_core=2.0))
    cluster = dataclasses.replace(make_cluster("A100", 16), calibration=shared)
    every = steps(*LAYOUTS[name])
    time = simulate(every, cluster)
    assert time.step_time_s != simulate(every, cluster, known).step_time_s
    assert max(event.end_s for event in step_events(every, cluster)) == pytest.approx(time.step_time_s, rel=1e-9)


@pytest.mark.parametrize("name", ["fsdp, micro-batches", "1f1b"])
def test_the_critical_path_has_no_hole(name):
    events = step_events(steps(*LAYOUTS[name]), make_cluster("A100", 16))
    end = 0.0
    for event in sorted((event for event in events if event.critical), key=lambda event: event.start_s):
        assert event.start_s <= end + 1e-9, event
        end = max(end, event.end_s)
    assert end == max(event.end_s for event in events)


def test_neighbours_become_one():
    events = step_events(steps(*LAYOUTS["1f1b"]), make_cluster("A100", 16))
    fewer = coalesced(events, 60)
    assert 30 < len(fewer) < 100 < len(events)
    assert {(event.rank, event.lane) for event in fewer} == {(event.rank, event.lane) for event in events}
    assert max(event.end_s for event in fewer) == max(event.end_s for event in events)
    assert coalesced(events, len(events)) == events
