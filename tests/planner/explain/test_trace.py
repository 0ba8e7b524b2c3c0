"""The trace has every rank and stream, the critical path apart, and ends with the step."""

import dataclasses
import json

import pytest

from meshwright.cost import find_cluster
from meshwright.errors import ConfigError
from meshwright.planner.explain import trace
from meshwright.planner.family_workload import FamilyWorkload
from meshwright.planner.model_shapes import Shape
from meshwright.strategy import Strategy
from tests.planner.explain.found import found


def test_a_pipelined_step_is_traced_by_rank():
    plan = next(plan for plan in found().plans if plan.steps)
    document = json.loads(json.dumps(trace(plan)))
    slices = [event for event in document["traceEvents"] if event["ph"] == "X"]
    names = {
        event["pid"]: event["args"]["name"] for event in document["traceEvents"] if event["name"] == "process_name"
    }
    assert names == {0: "critical path"} | {rank + 1: f"pipeline rank {rank}" for rank in range(4)}
    end = max(event["ts"] + event["dur"] for event in slices)
    assert end == pytest.approx(plan.forecast.time.step_time_s * 1e6, rel=1e-9)
    path = [event for event in slices if event["pid"] == 0]
    assert sum(event["dur"] for event in path) == pytest.approx(end, rel=0.2)
    assert len(path) == sum(event["args"]["critical"] for event in slices if event["pid"])
    assert {"compute", "send", "update"} <= {event["cat"] for event in slices}
    assert all(event["dur"] > 0 and event["ts"] >= 0 for event in slices)


@pytest.mark.parametrize(
    "methods",
    [
        [("parallel_mode", {"pipeline": 4, "data": 2}), "pipeline_parallel"],
        [("parallel_mode", {"pipeline": 4, "data": 2}), ("pipeline_parallel", {"schedule": "zbv"})],
        [("parallel_mode", {"tensor": 4, "data": 2}), "tensor_parallel"],
        [("parallel_mode", {"context": 4, "zero": 2}), "context_parallel", "fsdp"],
        [("parallel_mode", {"zero": 8}), "fsdp", ("offload", {"optimizer": 1.0, "parameters": 1.0})],
        [("parallel_mode", {"replica": 2, "zero": 4}), "fsdp", "outer"],
    ],
)
def test_nothing_lies_over_anything_else_on_its_thread(methods):
    subject = FamilyWorkload(Shape("gpt", 8, 1024, 16, 50304, 1024), find_cluster("h100x8"), 32)
    threads = {}
    plan = subject.plan(Strategy([*methods, "amp_native"]), 8 if "pipeline" in str(methods) else None)
    slices = [event for event in trace(plan)["traceEvents"] if event["ph"] == "X"]
    for event in sorted(slices, key=lambda each: each["ts"]):
        assert event["dur"] > 0
        thread = event["pid"], event["tid"]
        assert event["ts"] >= threads.get(thread, 0.0) - 1e-6, event
        threads[thread] = event["ts"] + event["dur"]
    assert max(threads.values()) == pytest.approx(plan.forecast.time.step_time_s * 1e6, rel=1e-9)


def test_without_a_cluster_there_is_nothing_to_trace():
    with pytest.raises(ConfigError, match="name a cluster"):
        trace(dataclasses.replace(found().plans[0], forecast=None))
