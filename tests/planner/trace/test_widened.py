"""bf16 on CPUs that lack it is predicted as it runs: products in fp32, of factors that are widened for them."""

import pytest
import torch
from torch import nn

from meshwright.nn import bf16_on_cpu as half_linear
from meshwright.planner.workload import Workload
from meshwright.strategy import Strategy


def products(strategy, lacks, monkeypatch):
    monkeypatch.setattr(half_linear, "has_bf16_products", lambda: not lacks)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32))
    classes = [type(module) for module in model]
    workload = Workload(
        model, torch.device("cpu"), torch.optim.SGD, lambda samples: torch.ones(samples, 64),
        lambda model, inputs: model(inputs).float().sum(), 64, 1, 1, 0, None,
    )  # fmt: skip
    step = workload.plan(Strategy(strategy)).step
    assert [type(module) for module in model] == classes
    ops = [op for block in step.blocks for op in block.ops]
    return {op.dtype for op in ops if op.kind == "matmul"}, sum(op.num_bytes for op in ops), step.flops


@pytest.mark.parametrize("strategy", [[("amp_native", "bf16")], [("half", "bf16")]])
def test_products_are_those_that_run(strategy, monkeypatch):
    narrow, moved, flops = products(strategy, False, monkeypatch)
    wide, moved_wide, flops_wide = products(strategy, True, monkeypatch)
    assert (narrow, wide) == ({"half"}, {"fp32"})
    assert moved_wide > moved
    assert flops_wide == flops


def test_what_is_compiled_is_left_alone(monkeypatch):
    assert products([("amp_native", "bf16"), "compile"], True, monkeypatch)[0] == {"half"}
