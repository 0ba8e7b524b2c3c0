"""fairseq's trainer over BMUF: every method that it calls, in its order, against replicas simulated in one process."""

import functools
import types

import pytest
import torch

from meshwright import runtime
from meshwright.errors import ConfigError
from meshwright.fairseq.optim.bmuf import FairseqBMUF
from meshwright.optim import BMUF, GuardedOptimizer, MasterWeights
from tests.optim.outer import simulation as sim

STEPS, LIMIT, SAMPLES = 16, 0.2, 4.0
SETTINGS = {"block_lr": 0.8, "block_momentum": 0.5, "global_sync_iter": 3, "warmup_iterations": 4, "use_nbm": True}
CONFIG = types.SimpleNamespace(**SETTINGS, average_sync=False)
AVERAGING = types.SimpleNamespace(**SETTINGS, average_sync=True)


class OfFairseq:
    """As fairseq's optimizers hold torch's."""

    def __init__(self, net):
        self.optimizer = sim.sgd(net)


class Scaled(torch.optim.SGD):
    """What the trainer does between backward and step, for the simulation."""

    def step(self, closure=None):
        every = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter in every:
            parameter.grad.mul_(1 / SAMPLES)
        torch.nn.utils.clip_grad_norm_(every, LIMIT)
        return super().step(closure)


@functools.cache
def simulated(size):
    def inner(net):
        return Scaled(net.parameters(), lr=0.02, momentum=0.5)

    done = sim.Simulation(size, inner, sim.fairseq_nbm(0.8, 0.5), 3, "broadcast", 4).train(STEPS)
    return [sim.weights(net) for net in done.nets]


def train_step(optimizer, net, replica, step):
    """One update in the order of fairseq's trainer."""
    optimizer.zero_grad()
    optimizer.backward(sim.loss_of(net, sim.batch(replica, step)))
    optimizer.all_reduce_grads(net)
    optimizer.multiply_grads(1 / SAMPLES)
    norm = optimizer.clip_grad_norm(LIMIT, aggregate_norm_fn=None)
    assert torch.isfinite(norm).all()
    optimizer.step()


def trained_by_fairseq():
    """Sixteen updates in one go, and with rank 0's checkpoint loaded on all ranks at the end of a block."""
    found = []
    for config, saves_after in ((CONFIG, None), (AVERAGING, None), (AVERAGING, 10)):
        net = sim.model()
        optimizer = FairseqBMUF(config, OfFairseq(net))
        for step in range(STEPS):
            train_step(optimizer, net, runtime.rank(), step)
            if step + 1 == saves_after:
                state = [optimizer.state_dict() if runtime.rank() == 0 else None]
                torch.distributed.broadcast_object_list(state)
                overrides = optimizer.optimizer_config
                optimizer = FairseqBMUF(config, OfFairseq(net))
                optimizer.load_state_dict(optimizer.broadcast_global_state_dict(state[0]), overrides)
        found.append((sim.weights(net), optimizer.num_syncs, optimizer.get_num_updates()))
    return found


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_the_trainers_loop_computes_fairseqs_rule(ranks, size):
    results, start = ranks(size).run(trained_by_fairseq), sim.weights(sim.model())
    for replica, (whole, averaging, resumed) in enumerate(results):
        assert whole[1:] == (4 if size > 1 else 0, STEPS)
        expected = simulated(size)[replica] if size > 1 else whole[0]
        moved = sum((a - b).square().sum() for a, b in zip(start, expected, strict=True)).sqrt()
        apart = sum((a - b).square().sum() for a, b in zip(whole[0], expected, strict=True)).sqrt()
        assert apart < 1e-6 * moved
        # Their states are equal where blocks end, so rank 0's are all of them.
        assert all(torch.equal(a, b) for a, b in zip(averaging[0], resumed[0], strict=True))
        assert size == 1 or not all(torch.equal(a, b) for a, b in zip(averaging[0], whole[0], strict=True))
        assert resumed[2] == STEPS


def inside(scale_by):
    """Weights after a step whose gradients are halved in one of three ways; with and without copies in fp32."""
    every = []
    for half in (False, True):
        net = sim.model().to(torch.bfloat16 if half else torch.float64)
        inner = torch.optim.SGD(net.parameters(), lr=0.5)
        if half:
            master = MasterWeights(net.parameters())
            of_masters = master.optimizer(lambda params: torch.optim.SGD(params, lr=0.5), net.parameters())
            inner = GuardedOptimizer(of_masters, master=master)
        optimizer = BMUF(inner, warmup_iterations=0)
        optimizer.backward(sim.loss_of(net, sim.batch(0, 0).to(net.first.weight.dtype)))
        if scale_by == "multiply_grads":
            optimizer.multiply_grads(0.5)
            optimizer.step()
        elif scale_by == "scale":
            assert optimizer.supports_step_with_scale
            optimizer.step(scale=2.0)
        else:
            optimizer.set_lr(0.25)
            optimizer.step()
        every += sim.weights(net)
    return every


def test_gradients_are_scaled_also_in_master_weights(ranks):
    wanted = ranks(1).run(inside, "lr")[0]
    for way in ("multiply_grads", "scale"):
        for own, other in zip(ranks(1).run(inside, way)[0], wanted, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-8)


class KeepsCopies(OfFairseq):
    """fairseq's ``FP16Optimizer``."""

    fp32_optimizer = None


def surface():
    """What else is asked of an optimizer, and what is refused."""
    net = sim.model()
    optimizer = FairseqBMUF(CONFIG, OfFairseq(net))
    assert optimizer.cfg is CONFIG
    assert optimizer.optimizer_config["momentum"] == 0.5
    assert "params" not in optimizer.optimizer_config
    for feature in ("groups", "flat_params", "memory_efficient_fp16"):
        assert not getattr(optimizer, f"supports_{feature}")
    other = sim.sgd(net)
    sim.local_gradients(net, 0, 0)
    other.step()
    optimizer.load_state_dict(other.state_dict(), optimizer_overrides={"lr": 0.125})  # all that fairseq saves
    assert (optimizer.get_lr(), optimizer.get_num_updates()) == (0.125, 0)
    weight = net.first.weight
    assert torch.equal(optimizer.optimizer.state[weight]["momentum_buffer"], other.state[weight]["momentum_buffer"])
    called = []
    net.all_reduce_grads = lambda: called.append(True)
    optimizer.all_reduce_grads(net)
    assert called == [True]
    with pytest.raises(ConfigError, match="takes no groups"):
        optimizer.step(groups=["encoder"])
    with pytest.raises(ConfigError, match="no scale beside a closure"):
        optimizer.step(lambda: None, scale=2.0)
    for bad in (KeepsCopies(net), net, None):
        with pytest.raises(ConfigError, match="cannot synchronise the weights of this optimizer"):
            FairseqBMUF(CONFIG, bad)
    with pytest.raises(ConfigError, match="distributed_world_size is not"):
        FairseqBMUF(types.SimpleNamespace(distributed_world_size=3), sim.sgd(net))


def test_the_rest_of_fairseqs_surface(ranks):
    ranks(2).run(surface)
