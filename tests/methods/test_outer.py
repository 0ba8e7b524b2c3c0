"""Replicas of several ranks against the same replicas in one process: FSDP and tensor parallel inside, and both twins.

Two replicas, each with half of every global batch; 10 steps of SGD with momentum in blocks of 2, DiLoCo's outer step.
In fp64 every final weight differs by less than 1e-9 of the distance it moved.
"""

import copy
import functools

import pytest
import torch

import meshwright as mw
from meshwright.cost import memory
from meshwright.errors import ConfigError, StrategyError
from meshwright.methods import resolve
from meshwright.optim import OuterOptimizer
from meshwright.planner import measured_state
from meshwright.strategy import Strategy
from tests import tiny
from tests.methods import split_runs
from tests.methods.test_parity import full_weights

STEPS, BATCH, H = 10, 8, 2
SGD = {"lr": 0.1, "momentum": 0.9}
OUTER = {"rule": "diloco", "sync_every": H, "lr": 0.7, "momentum": 0.6}


def build(name):
    return (split_runs.build if name == "llama" else tiny.build)(name).double()


@functools.cache
def simulated(name, parts):
    """Two replicas in one process; every ``parts``-th sample of a global batch goes to the same rank of ``parts``."""
    nets = [build(name) for _ in range(2)]
    optims = [torch.optim.SGD(net.parameters(), **SGD) for net in nets]
    before = {key: value.detach().clone() for key, value in nets[0].named_parameters()}
    world, momentum = copy.deepcopy(before), {key: torch.zeros_like(value) for key, value in before.items()}
    data = tiny.Tokens()
    order = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0, seed=0)
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=order)
    for step, ids in zip(range(1, STEPS + 1), loader, strict=False):
        for replica, (net, optim) in enumerate(zip(nets, optims, strict=True)):
            ranks = range(replica * parts // 2, (replica + 1) * parts // 2)
            inputs = tiny.prepare_for(name)(ids[[i for i in range(BATCH) if i % parts in ranks]], "cpu")
            output = net(inputs) if name == "plain" else net(**inputs)
            optim.zero_grad()
            tiny.loss_func(inputs, output).backward()
            optim.step()
        if step % H == 0:
            with torch.no_grad():
                for key in world:
                    change = world[key] - sum(net.get_parameter(key) for net in nets) / 2
                    momentum[key] = 0.6 * momentum[key] + change
                    world[key] = world[key] - 0.7 * (change + 0.6 * momentum[key])
                    for net in nets:
                        net.get_parameter(key).copy_(world[key])
    return before, world


def train(name, strategy, steps=STEPS, **options):
    result = mw.accelerate(
        build(name), torch.optim.SGD, tiny.Tokens(), tiny.loss_func, strategy=strategy, optim_args=SGD,
        prepare_input=tiny.prepare_for(name), model_input_format=tiny.input_format(name),
        dataloader_args={"batch_size": BATCH}, **options,
    )  # fmt: skip
    for _, batch in zip(range(steps), result.dataloader, strict=False):
        result.step(batch)
    return result


def replicas_of_two(name, axis, methods, options):
    """Two replicas of two ranks; returns whole weights, and checks the twins."""
    strategy = [("parallel_mode", {axis: 2, "replica": 2}), *methods, ("outer", {**OUTER, **options})]
    result = train(name, strategy)
    optim = result.optim
    assert isinstance(optim, OuterOptimizer)
    assert optim.num_syncs == STEPS // H
    predicted = memory(result.plan.step, result._job.coordinate)
    for kind, size in measured_state(result.model, optim).items():
        assert getattr(predicted, kind) == size, (kind, getattr(predicted, kind), size, strategy)
    check_traffic(result)
    return full_weights(result.model)


def check_traffic(result):
    """Predicted payloads are those that the replicas sent (rank 0 holds the largest shards), but for headers."""
    optim = result.optim
    payloads = [t.bytes_per_step for t in result.plan.step.traffic if t.axis == "replica"]
    assert all(t.every == H for t in result.plan.step.traffic if t.axis == "replica")
    if mw.rank() == 0:
        sent = optim.replicas.bytes_sent / optim.num_syncs
        assert sent == pytest.approx(sum(payloads) * (1 if len(payloads) == 1 else 0.5), rel=0.05)


CASES = {
    "fsdp": ("plain", "zero", ["fsdp"], {}, 4),
    "fsdp, recompute, split": ("plain", "zero", ["fsdp", "checkpoint"], {"split": True}, 4),
    "data": ("plain", "data", [], {"offload": True}, 4),
    "tensor": ("llama", "tensor", ["tensor_parallel"], {}, 2),
}


@pytest.mark.parametrize("case", ["fsdp", "tensor", *(pytest.param(name, marks=pytest.mark.long) for name in CASES)])
def test_replicas_of_several_ranks(ranks, case):
    name, axis, methods, options, parts = CASES[case]
    results = ranks(4).run(replicas_of_two, name, axis, methods, options)
    before, expected = simulated(name, parts)
    tolerance = 1e-5 if name == "llama" else 1e-9  # Llama's norms compute in fp32 whatever the weights are
    for weights in results:
        for key, value in expected.items():
            moved, apart = (value - before[key]).norm(), (weights[key] - value).norm()
            assert apart < tolerance * moved, (key, float(apart), float(moved))


def test_a_strategy_with_outer_names_its_axis():
    alone = resolve(Strategy(["outer"]), world=4)
    assert alone.axes == (("replica", 4),)
    assert str(resolve(Strategy([("outer", "slowmo")]), 2).strategy).endswith("outer(rule='slowmo')")
    for config in ({"rule": "local_sgd"}, {"rule": "post_local_sgd", "warmup_steps": 3}, "streaming_diloco"):
        written = Strategy([("outer", config)])
        assert Strategy(written.to_json()) == written == Strategy(str(written))
    with pytest.raises(StrategyError, match="outer has no mesh axis to work on"):
        resolve(Strategy([("parallel_mode", {"data": 4}), "outer"]), world=4)
    with pytest.raises(StrategyError, match="no method works on it"):
        resolve(Strategy([("parallel_mode", {"replica": 2, "data": 2})]), world=4)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"rule": "local_sgd", "lr": 1.0}, "has no 'lr'"),
        ({"rule": "post_local_sgd"}, "number of its synchronous steps"),
        ({"rule": "dilocco"}, "rule"),
        ({"rule": "slowmo", "nesterov": True}, "has no 'nesterov'"),
    ],
)
def test_keys_a_rule_has_no_use_for(config, words):
    with pytest.raises(StrategyError, match=words):
        Strategy([("outer", config)])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"sync_every": 0}, "sync_every is not a number of steps"),
        ({"sync_every": 10, "fragments": 3}, "fragments do not divide"),
        ({"sync_every": 10, "fragments": 2, "delay": 5}, "arrive after the next one"),
        ({"split": True, "quantise": "int8"}, "exclude each other"),
        ({"merge_alpha": 1.0}, "merge_alpha is out of range"),
        ({"clip_pseudo_grad": -1.0}, "clip_pseudo_grad is out of range"),
    ],
)
def test_numbers_that_do_not_fit(ranks, config, words):
    ranks(1).run(refused, ConfigError, words, ("outer", config), torch.optim.SGD)


def test_an_outer_step_needs_an_inner_one(ranks):
    ranks(1).run(refused, StrategyError, "no optimizer to work with", "outer", None)


def refused(error, words, method, optim_func):
    model = tiny.build("plain")
    with pytest.raises(error, match=words):
        mw.accelerate(model, optim_func, strategy=[method])
    assert all(type(p) is torch.nn.Parameter for p in model.parameters())  # nothing was changed
