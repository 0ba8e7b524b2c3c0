"""Every preset against N replicas simulated in one process: fp64, 10 rounds, 1e-6 of the distance moved."""

import functools

import pytest
import torch

from meshwright.optim import BMUF, DiLoCo, LocalSGD, OuterOptimizer, OuterPolicy, PostLocalSGD, SlowMo
from tests.optim.outer import simulation as sim

H, ROUNDS = 3, 10


def _sgd(lr, momentum, nesterov=False):
    return lambda params: torch.optim.SGD(params, lr=lr, momentum=momentum, nesterov=nesterov)


def _engine(outer):
    return lambda inner, net: OuterOptimizer(inner, outer, OuterPolicy(sync_every=H), model=net)


def _bmuf(**options):
    arguments = {"global_sync_iter": H, "warmup_iterations": 0, "block_lr": 0.8, "block_momentum": 0.5, **options}
    return lambda inner, net: BMUF(inner, model=net, **arguments)


# name: (the optimizer of a replica, the rule written out, warm-up, the inner optimizer)
CASES = {
    "local_sgd": (lambda inner, net: LocalSGD(inner, H, model=net), sim.averaging, None, sim.adamw),
    "bmuf cbm": (_bmuf(), sim.cbm(0.8, 0.5), None, sim.sgd),
    "bmuf cbm as heavy ball": (_engine(_sgd(0.8, 0.5)), sim.cbm(0.8, 0.5), None, sim.sgd),
    "bmuf nbm": (_bmuf(use_nbm=True), sim.nbm(0.8, 0.5), None, sim.sgd),
    "bmuf nbm as nesterov": (_engine(_sgd(0.8, 0.5, True)), sim.nbm(0.8, 0.5), None, sim.sgd),
    "bmuf nbm of fairseq": (_bmuf(use_nbm=True, nbm_mode="fairseq"), sim.fairseq_nbm(0.8, 0.5), None, sim.sgd),
    "fairseq's as heavy ball": (_engine(_sgd(1.5 * 0.8, 0.5)), sim.fairseq_nbm(0.8, 0.5), None, sim.sgd),
    "slowmo": (lambda inner, net: SlowMo(inner, 0.4, H, 0.9, model=net), sim.slowmo(0.9, 0.4), None, sim.sgd),
    "diloco": (lambda inner, net: DiLoCo(inner, H, model=net), sim.nbm(0.7, 0.9), None, sim.adamw),
    "post_local_sgd": (
        lambda inner, net: PostLocalSGD(inner, 4, H, model=net), sim.averaging, "synchronous", sim.adamw,
    ),
    "bmuf warm-up broadcast": (_bmuf(warmup_iterations=4), sim.cbm(0.8, 0.5), "broadcast", sim.adamw),
    "bmuf warm-up single": (_bmuf(warmup_iterations=4, warmup="single"), sim.cbm(0.8, 0.5), "single", sim.adamw),
    "split over replicas": (
        lambda inner, net: DiLoCo(inner, H, model=net, split=True), sim.nbm(0.7, 0.9), None, sim.sgd,
    ),
    "in host memory, in small buckets": (
        lambda inner, net: DiLoCo(inner, H, model=net, offload=True, bucket_mb=1e-4), sim.nbm(0.7, 0.9), None, sim.sgd,
    ),
}  # fmt: skip


def _steps(warmup):
    return H * ROUNDS + (4 if warmup else 0)


@functools.cache
def simulated(name, size):
    _, rule, warmup, inner = CASES[name]
    done = sim.Simulation(size, inner, rule, H, warmup, 4 if warmup else 0).train(_steps(warmup))
    return [sim.weights(net) for net in done.nets], [net.seen for net in done.nets]


def trained(name):
    """This rank as one replica; returns its weights and buffer, and what it sent."""
    make, _, warmup, inner = CASES[name]
    net = sim.model()
    optimizer = make(inner(net), net)
    for step in range(_steps(warmup)):
        sim.local_gradients(net, optimizer.replicas.rank, step)
        optimizer.step()
        if name == "slowmo" and (step + 1) % H == 0:
            optimizer.param_groups[0]["lr"] *= 0.8
    return sim.weights(net), net.seen, optimizer.num_syncs, optimizer.replicas.bytes_sent


def trained_all(names):
    return {name: trained(name) for name in names}


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_every_preset_computes_its_rule(ranks, size):
    results = ranks(size).run(trained_all, list(CASES))
    start = sim.weights(sim.model())
    for name in CASES:
        expected, buffers = simulated(name, size)
        for replica, result in enumerate(results):
            weights, seen, num_syncs, _ = result[name]
            assert num_syncs == ROUNDS, name
            apart = sum((a - b).square().sum() for a, b in zip(weights, expected[replica], strict=True)).sqrt()
            moved = sum((a - b).square().sum() for a, b in zip(start, expected[replica], strict=True)).sqrt()
            assert apart < 1e-6 * moved, (name, float(apart / moved))
            torch.testing.assert_close(seen, buffers[replica], rtol=1e-12, atol=0)
        # Replicas that synchronise hold the same bits.
        assert all(torch.equal(a, b) for a, b in zip(results[0][name][0], results[-1][name][0], strict=True)), name


def test_splitting_sends_no_more_than_an_all_reduce(ranks):
    results = ranks(2).run(trained_all, ["diloco", "split over replicas"])
    whole, split = (sum(result[name][3] for result in results) for name in ("diloco", "split over replicas"))
    assert split < 1.3 * whole  # weights that do not divide evenly, and one number


def synchronous():
    """H = 1 with outer SGD(1): averages after every step are synchronous SGD; so are the steps of a warm-up."""
    found = {}
    for name, make in {
        "outer": lambda inner: LocalSGD(inner, 1),
        "warm-up": lambda inner: PostLocalSGD(inner, 10, 5),
    }.items():
        net = sim.model()
        inner = torch.optim.SGD(net.parameters(), lr=0.02)
        optimizer = make(inner)
        for step in range(10):
            sim.local_gradients(net, optimizer.replicas.rank, step)
            optimizer.step()
        found[name] = sim.weights(net)
    net = sim.model()
    inner = torch.optim.SGD(net.parameters(), lr=0.02)
    for step in range(10):
        inputs = torch.cat([sim.batch(replica, step) for replica in range(optimizer.replicas.size)])
        inner.zero_grad()
        sim.loss_of(net, inputs).backward()
        inner.step()
    return found, sim.weights(net)


def test_one_step_with_plain_averages_is_synchronous_training(ranks):
    found, expected = ranks(2).run(synchronous)[0]
    for weights in found.values():
        for one, other in zip(weights, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
