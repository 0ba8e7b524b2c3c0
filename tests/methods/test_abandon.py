"""A step that fails on every rank and is caught leaves nothing behind: training goes on as in one process."""

import pytest
import torch
from torch import nn

import meshwright as mw
from tests import tiny

BATCHES = torch.randn(10, 8, 7, generator=torch.Generator().manual_seed(5))
FAILING = {3, 6}


class Fails(torch.autograd.Function):
    """Passes on what it gets, and fails where and when it is asked to."""

    at = None

    @staticmethod
    def forward(ctx, x):
        if Fails.at == "forward":
            raise torch.OutOfMemoryError("forward")
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if Fails.at == "backward":
            raise torch.OutOfMemoryError("backward")
        return gradient


def loss_func(inputs, output):
    return (output - inputs[:, :3]).square().mean()


def build(width=13):
    torch.manual_seed(1)
    model = tiny.Mlp((7, width))
    model.layers[1].append(nn.Identity())
    model.layers[1][-1].register_forward_hook(lambda module, args, output: Fails.apply(output))
    return model


def train(strategy, at="backward", by_hand=False, width=13, **changes):
    """Every batch once; at some of them it takes two tries."""
    job = mw.accelerate(
        build(width), torch.optim.AdamW, None, loss_func, strategy=strategy, sample_batch=BATCHES[0],
        optim_args={"lr": 1e-2}, **changes,
    )  # fmt: skip

    def step(batch):
        if not by_hand:
            return job.step(batch)
        job.optim.zero_grad()
        job.loss_func(batch, job.model(batch)).backward()
        with torch.no_grad():
            job.model(batch)  # for some metric
        return job.optim.step()

    for number, batch in enumerate(BATCHES):
        own = batch[job.replica :: job.num_replicas]
        if number in FAILING:
            Fails.at = at
            with pytest.raises(torch.OutOfMemoryError, match=at):
                step(own)
            Fails.at = None
            if by_hand == "abandons":
                job.abandon()
        step(own)
    return {
        name.removeprefix("module."): (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in job.model.named_parameters()
    }


def plain_training(width):
    model = build(width)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in BATCHES:
        optim.zero_grad()
        loss_func(batch, model(batch)).backward()
        optim.step()
    return dict(model.named_parameters())


def check(found, width=13):
    expected = plain_training(width)
    for weights in found:
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[name].detach(), rtol=0, atol=1e-6)


STRATEGIES = [
    ["parallel_mode"],
    ["zero1"],
    ["zero2"],
    ["fsdp"],
    ["fsdp", ("offload", "all")],
    ["fsdp", "checkpoint"],
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_step_that_fails_in_backward_reaches_no_other(ranks, strategy):
    check(ranks(2).run(train, strategy))


@pytest.mark.parametrize("strategy", [["parallel_mode"], ["zero1"], ["fsdp"]], ids=str)
def test_a_step_that_fails_in_forward_reaches_no_other(ranks, strategy):
    check(ranks(2).run(train, strategy, "forward"))


def test_neither_do_micro_batches_of_it(ranks):
    check(ranks(2).run(train, ["zero1"], num_micro_batches=2))


@pytest.mark.parametrize(
    "strategy",
    [
        ["zero1"],
        ["fsdp"],
        pytest.param(["zero2"], marks=pytest.mark.long),
        pytest.param([("fsdp", {"reshard_after_forward": False})], marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_loop_by_hand_over_sharded_weights_need_not_know(ranks, strategy):
    check(ranks(2).run(train, strategy, by_hand=True))


@pytest.mark.parametrize("strategy", [["parallel_mode"], ["fsdp"]], ids=str)
def test_a_loop_by_hand_says_that_it_goes_on(ranks, strategy):
    check(ranks(2).run(train, strategy, by_hand="abandons"))


@pytest.mark.long
def test_replicas_of_split_models_average_again(ranks):
    strategy = [
        ("parallel_mode", {"tensor": 2, "data": 2}),
        ("tensor_parallel", {"plan": {"layers.*.0": "colwise_rep"}}),
    ]
    check(ranks(4).run(train, strategy, by_hand=True, width=12), width=12)
