"""Replicas of several ranks against the same replicas in one process: other methods inside, and both twins.

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
from meshwright.store import CheckpointStore, TrainingState
from meshwright.strategy import Strategy
from tests import tiny
from tests.methods import split_runs
from tests.methods.test_ema import averaged
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
    data, seen = tiny.Tokens(), []
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
            seen += [dict(world)] * H
    return before, world, averaged(seen, H)


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
    step = result.plan.steps[result._job.index("pipeline")] if result.plan.steps else result.plan.step
    predicted = memory(step, result._job.coordinate)
    for kind, size in measured_state(result.model, optim).items():
        assert getattr(predicted, kind) == size, (kind, getattr(predicted, kind), size, strategy)
    check_traffic(result, step)
    average = None
    if "ema" in result.strategy:
        with result.ema.weights():
            average = full_weights(result.model)
    return full_weights(result.model), average


def check_traffic(result, step):
    """Predicted payloads are those that the replicas sent (rank 0 holds the largest shards), but for headers."""
    optim = result.optim
    payloads = [t.bytes_per_step for t in step.traffic if t.axis == "replica"]
    assert all(t.every == H for t in step.traffic if t.axis == "replica")
    if mw.rank() == 0:
        sent = optim.replicas.bytes_sent / optim.num_syncs
        assert sent == pytest.approx(sum(payloads) * (1 if len(payloads) == 1 else 0.5), rel=0.05)


EMA = ("ema", {"decay": 0.9})
CASES = {
    "fsdp": ("plain", "zero", ["fsdp", EMA], {}, 4),
    "fsdp, offload": ("plain", "zero", ["fsdp", EMA, ("offload", {"optimizer": 0.6, "parameters": 0.3})], {}, 4),
    "offload, split": ("plain", "data", ["offload"], {"split": True}, 4),
    "pipeline": ("plain", "pipeline", ["pipeline_parallel", EMA], {"clip_pseudo_grad": 1e3}, 2),
    "gpipe, offload": (
        "plain", "pipeline", [("pipeline_parallel", {"schedule": "gpipe"}), "offload"], {"anomaly_threshold": 9.0}, 2,
    ),
    "fsdp, recompute, split": ("plain", "zero", ["fsdp", "checkpoint"], {"split": True}, 4),
    "data": ("plain", "data", [], {"offload": True}, 4),
    "tensor": ("llama", "tensor", ["tensor_parallel"], {}, 2),
}  # fmt: skip


@pytest.mark.parametrize(
    "case", ["fsdp", "tensor", "pipeline", *(pytest.param(name, marks=pytest.mark.long) for name in CASES)]
)
def test_replicas_of_several_ranks(ranks, case):
    name, axis, methods, options, parts = CASES[case]
    results = ranks(4).run(replicas_of_two, name, axis, methods, options)
    before, *every = simulated(name, parts)
    tolerance = 1e-5 if name == "llama" else 1e-9  # Llama's norms compute in fp32 whatever the weights are
    for found in results:
        for weights, expected in zip(found, every, strict=True):
            for key in weights or ():
                moved, apart = (expected[key] - before[key]).norm(), (weights[key] - expected[key]).norm()
                assert apart < tolerance * moved, (key, float(apart), float(moved))
    assert every[0].keys() == set().union(*(weights for weights, _ in results))


CUT = {"clip_pseudo_grad": 0.05, "sync_every": 1, "rule": "local_sgd"}


def clipped(axes, methods, options):
    """The weights after steps whose pseudo-gradients are all cut, by the norm of the whole model."""
    return full_weights(train("plain", [("parallel_mode", axes), *methods, ("outer", {**CUT, **options})]).model)


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"split": True}])
def test_pseudo_gradients_of_stages_are_cut_by_the_norm_of_all(ranks, options):
    expected = ranks(2).run(clipped, {"replica": 2}, [], {})[0]
    every = ranks(4).run(clipped, {"pipeline": 2, "replica": 2}, ["pipeline_parallel"], options)
    before = dict(build("plain").named_parameters())
    for weights in every:
        for key, value in weights.items():
            assert (value - expected[key]).norm() < 1e-9 * (expected[key] - before[key]).norm(), key
    assert expected.keys() == set().union(*every)


def saved_and_loaded(axes, methods, folder):
    """Train 3 steps, save, train on; load what was saved, and train on alike: both weights."""
    strategy = [("parallel_mode", axes), *methods, ("outer", OUTER)]
    result = train("plain", strategy, steps=3)
    batches = [batch for _, batch in zip(range(3), result.dataloader, strict=False)]
    CheckpointStore(folder).save(TrainingState(result.model, result.optim))
    for batch in batches:
        result.step(batch)
    again = train("plain", strategy, steps=0)
    CheckpointStore(folder).load(TrainingState(again.model, again.optim))
    for batch in batches:
        again.step(batch)
    with result.ema.weights(), again.ema.weights():
        averages = full_weights(result.model), full_weights(again.model)
    return full_weights(result.model), full_weights(again.model), averages


@pytest.mark.parametrize(
    ("axes", "methods"),
    [
        ({"pipeline": 2, "replica": 2}, ["pipeline_parallel", EMA]),
        pytest.param({"zero": 2, "replica": 2}, ["fsdp", EMA, "offload"], marks=pytest.mark.long),
    ],
)
def test_checkpoints_in_the_middle_of_a_block(ranks, tmp_path, axes, methods):
    for one, other, averages in ranks(4).run(saved_and_loaded, axes, methods, tmp_path):
        assert all(torch.equal(one[key], other[key]) for key in one)
        assert all(torch.equal(averages[0][key], averages[1][key]) for key in one)


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
