"""Whatever the planner can write for a real model has a time as well."""

import torch
import torch.nn.functional as F

from meshwright.cost import make_cluster, peak, simulate
from meshwright.planner import Workload
from meshwright.strategy import Strategy
from tests import tiny

RANKS = 4
STRATEGIES = [
    ["parallel_mode"],
    ["zero1"],
    ["zero2", ("amp_native", "bf16")],
    ["fsdp", ("half", "bf16")],
    ["fsdp", "checkpoint"],
    [("parallel_mode", {"zero": 2, "data": 2}), "fsdp"],
    [("parallel_mode", {"tensor": 2, "data": 2}), "tensor_parallel"],
    [("parallel_mode", {"pipeline": 2, "data": 2}), "pipeline_parallel"],
    ["outer"],
]


def loss(model, ids):
    logits = model(ids)
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def test_every_strategy_has_a_time_and_a_peak():
    workload = Workload(
        tiny.plain(num_layers=4), torch.device("cpu"), torch.optim.AdamW,
        lambda n: torch.zeros(n, tiny.SEQ_LEN, dtype=torch.long), loss, 16, 4, RANKS, 3, limit_bytes=None,
    )  # fmt: skip
    cluster = make_cluster("A100", RANKS)
    times = []
    for methods in STRATEGIES:
        plan = workload.plan(Strategy(methods))
        time = simulate(plan.steps or plan.step, cluster)
        parts = (
            time.compute_s
            + time.inline_s
            + time.exposed_s
            + time.copies_s
            + time.bubble_s
            + time.update_s
            + time.overhead_s
        )
        assert abs(parts - time.step_time_s) < 1e-9
        assert time.compute_s > 0
        held = peak(plan.step)
        assert plan.memory.parameters + plan.memory.optimizer < held.allocated_bytes <= held.reserved_bytes
        times.append(time)
    plain, again = times[1], times[4]  # in one precision
    assert again.compute_s > plain.compute_s
    assert times[6].inline_s > 0
    assert times[7].bubble_s > 0
