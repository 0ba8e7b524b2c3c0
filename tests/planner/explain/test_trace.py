"""The trace has every rank and stream, the critical path apart, and ends with the step."""

import dataclasses
import json

import pytest

from meshwright.errors import ConfigError
from meshwright.planner.explain import trace
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


def test_without_a_cluster_there_is_nothing_to_trace():
    with pytest.raises(ConfigError, match="name a cluster"):
        trace(dataclasses.replace(found().plans[0], forecast=None))
