"""Models born sharded hold the ordinary build's weights, bit for bit, and train as it does, under every layout."""

from __future__ import annotations

import pytest
import torch

import meshwright as mw
from tests import tiny
from tests.methods.split_runs import whole_weights
from tests.methods.test_parity import BATCH, STEPS
from tests.parity import models
from tests.parity.layouts import Layout, mesh, scheduled
from tests.parity.runs import batches, optimizer

LAYOUTS = {
    "data": Layout(2, []),
    "zero1": Layout(2, ["zero1"]),
    "zero2": Layout(2, ["zero2"]),
    "fsdp": Layout(2, ["fsdp"]),
    "half": Layout(2, ["fsdp", ("half", "bf16")]),
    "offload": Layout(2, ["fsdp", ("offload", "all")]),
    "tensor": Layout(2, ["tensor_parallel", mesh(tensor=2)]),
    "pipeline": Layout(2, [mesh(pipeline=2), scheduled("1f1b")], 4, 4),
    "hybrid": Layout(4, ["fsdp", mesh(data=2, zero=2)]),
    "fsdp 4": Layout(4, ["fsdp"]),
    "tensor x zero": Layout(4, ["tensor_parallel", "fsdp", mesh(tensor=2, zero=2)]),
    "pipeline x zero": Layout(4, [mesh(pipeline=2, zero=2), "fsdp", scheduled("1f1b")], 4, 4),
    "tensor x pipeline": Layout(4, [mesh(tensor=2, pipeline=2), "tensor_parallel", scheduled("interleaved")], 4, 4),
}
KINDS = ("plain", "gpt2", "llama", "qwen2", "bert", "t5")


def both(name, layout):
    return [train(name, layout, born=born) for born in (False, True)]


def train(name, layout, *, born):
    case = LAYOUTS[layout]
    optim_class, args = optimizer("adamw", case.layers)

    def build():
        return models.build(name, case.layers)

    torch.manual_seed(1)
    result = mw.accelerate(
        build if born else build(), optim_class, tiny.Tokens(), models.loss_func, strategy=case.strategy,
        optim_args=args, prepare_input=models.prepare_for(name), model_input_format=models.input_format(name),
        dataloader_args={"batch_size": BATCH}, num_micro_batches=case.micro_batches,
    )  # fmt: skip
    before = {key: value.clone() for key, value in whole_weights(result.model).items()}
    losses = [result.step(batch).loss.item() for batch, _ in zip(batches_of(result), range(STEPS), strict=False)]
    return before, losses, whole_weights(result.model)


def batches_of(result):
    return iter(result.dataloader)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", KINDS)
def test_equals_the_ordinary_build(name, layout, ranks):
    for ordinary, born in ranks(LAYOUTS[layout].world).run(both, name, layout):
        for wanted, got in ((ordinary[0], born[0]), (ordinary[2], born[2])):
            assert wanted.keys() == got.keys()
            assert all(torch.equal(wanted[key], got[key]) for key in wanted)
        assert ordinary[1] == born[1]
