"""Every strategy against one plain process: the ground truth of all that is distributed here.

The same ten global batches, the same initial weights. SGD with momentum: final weights differ by less than 1e-5 of the
distance they moved. AdamW: losses within 1e-4 (weights are not compared: a gradient that is zero in exact arithmetic,
a key bias for one, is rounding noise that Adam turns into full steps). bf16: losses within 1 % of fp32.
``--parity=all`` (``make parity``) trains every combination; without it every strategy trains one of the models, on 2
or on 4 ranks, and checkpoint, precision and optimizer are spread over these.

On the way the twins are held against each other: predicted bytes of state are those that every rank holds.
"""

import functools

import pytest
import torch

import meshwright as mw
from meshwright.cost import memory
from meshwright.planner import measured_state
from tests import tiny

STEPS, BATCH = 10, 8
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-3, "fused": True}),
    "bf16": (torch.optim.AdamW, {"lr": 1e-3, "fused": True}),
}
STRATEGIES = {
    "data": [],
    "zero1": ["zero1"],
    "zero2": ["zero2"],
    "fsdp": ["fsdp"],
    "hsdp": ["fsdp", ("parallel_mode", ([("zero", 2), ("data", 1)], None))],
}


@functools.cache
def reference(name, mode):
    """Losses, initial and final weights of a plain loop in one process, in fp32."""
    model = tiny.build(name)
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    optim_class, args = OPTIMIZERS[mode]
    optim = optim_class(model.parameters(), **args)
    data = tiny.Tokens()
    order = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0, seed=0)
    losses = []
    for ids in torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=order):
        inputs = tiny.prepare_for(name)(ids, "cpu")
        output = model(inputs) if name == "plain" else model(**inputs)
        loss = tiny.loss_func(inputs, output)
        optim.zero_grad()
        loss.backward()
        optim.step()
        losses.append(loss.item())
        if len(losses) == STEPS:
            break
    return losses, before, {key: value.detach() for key, value in model.named_parameters()}


def full_weights(model):
    inner = model.module if hasattr(model, "module") else model
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in inner.named_parameters()
    }


def train(name, methods, mode):
    """Ten steps on this world; returns losses, and on rank 0 the whole weights."""
    strategy = [*methods, *([("amp_native", "bf16")] if mode == "bf16" else [])]
    optim_class, args = OPTIMIZERS[mode]
    result = mw.accelerate(
        tiny.build(name), optim_class, tiny.Tokens(), tiny.loss_func, strategy=strategy, optim_args=args,
        prepare_input=tiny.prepare_for(name), model_input_format=tiny.input_format(name),
        dataloader_args={"batch_size": BATCH},
    )  # fmt: skip
    losses = [result.step(batch).loss.item() for _, batch in zip(range(STEPS), result.dataloader, strict=False)]
    predicted = memory(result.plan.step, result._job.coordinate)
    for kind, size in measured_state(result.model, result.optim).items():
        assert getattr(predicted, kind) == size, (kind, getattr(predicted, kind), size, strategy)
    weights = full_weights(result.model)
    return losses, weights if mw.rank() == 0 else None


def pytest_generate_tests(metafunc):
    everything = metafunc.config.getoption("--parity") == "all"
    cases = [
        (world, strategy, name)
        for row, strategy in enumerate(STRATEGIES)
        for column, name in enumerate(tiny.MODELS)
        if everything or row % len(tiny.MODELS) == column
        for world in ((2, 4) if everything else (4 if (row + column // 2) % 2 else 2,))
    ]
    metafunc.parametrize(("world", "strategy", "name"), cases)


def test_parity(ranks, request, world, strategy, name):
    every = [(checkpoint, mode) for checkpoint in ([], ["checkpoint"]) for mode in OPTIMIZERS]
    if request.config.getoption("--parity") == "some":
        spread = [([], "sgd"), (["checkpoint"], "bf16"), (["checkpoint"], "sgd"), ([], "adamw")]
        first = list(tiny.MODELS).index(name) + list(STRATEGIES).index(strategy)
        every = [spread[first // 2 % 4]]
    for checkpoint, mode in every:
        results = ranks(world).run(train, name, [*STRATEGIES[strategy], *checkpoint], mode)
        losses, weights = results[0]
        expected_losses, before, expected = reference(name, mode)
        assert all(other[0] == losses for other in results)
        assert losses == pytest.approx(expected_losses, rel=1e-2 if mode == "bf16" else 1e-4)
        if mode == "sgd":
            check_weights(weights, before, expected)


def check_weights(weights, before, expected):
    moved = torch.stack([(expected[key] - before[key]).norm() for key in before])
    apart = torch.stack([(weights[key] - expected[key]).norm() for key in before])
    assert apart.norm() < 1e-5 * moved.norm()
    real = moved > 1e-3 * moved.norm()  # below: parameters that do not move, such as a key bias
    # Norms are near 1: the smallest step of one such weight is 4e-5 of what a whole norm moves.
    rounding = torch.stack([expected[key].abs().max() for key in before]) * torch.finfo(torch.float32).eps
    allowed = 3e-5 * moved + rounding
    assert (apart[real] < allowed[real]).all(), dict(zip(before, (apart / moved).tolist(), strict=True))
