"""N replicas in one process, in fp64, with every outer rule written out as its paper has it."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tests import tiny

WIDTH = 7


def model():
    """Small, with shapes that divide into nothing, and a buffer that training moves."""
    torch.manual_seed(5)
    net = tiny.Mlp(sizes=(WIDTH, 11), depth=2)
    net.register_buffer("seen", torch.zeros(3))
    return net.double()


def batch(replica, step, samples=6):
    """What a replica trains on in a step."""
    generator = torch.Generator().manual_seed(1000 * replica + step)
    return torch.randn(samples, WIDTH, generator=generator, dtype=torch.float64)


def loss_of(net, inputs):
    """Any function of all parameters with curvature."""
    return net(inputs).square().sum(-1).sub(1).square().mean()


def local_gradients(net, replica, step):
    """Leaves the gradients of one replica's batch in ``net``, and counts in its buffer."""
    net.zero_grad()
    loss_of(net, batch(replica, step)).backward()
    net.seen += replica + 1


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.5)


def adamw(net):
    return torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)


class Simulation:
    """``size`` replicas trained in turn; ``rule(self)`` moves ``self.world`` (the global weights) at a block's end."""

    def __init__(self, size, inner, rule, sync_every, warmup=None, warmup_steps=0):
        self.nets = [model() for _ in range(size)]
        self.inner = [inner(net) for net in self.nets]
        self.make_inner = inner
        self.rule, self.sync_every = rule, sync_every
        self.warmup, self.warmup_steps = warmup, warmup_steps
        self.world = weights(self.nets[0])
        self.momentum = [torch.zeros_like(w) for w in self.world]
        self.steps = 0

    def train(self, steps):
        for _ in range(steps):
            self.step()
        return self

    def step(self):
        for replica, net in enumerate(self.nets):
            local_gradients(net, replica, self.steps)
        if self.warmup == "synchronous" and self.steps < self.warmup_steps:
            for each in zip(*(net.parameters() for net in self.nets), strict=True):
                mean = sum(p.grad for p in each) / len(each)
                for p in each:
                    p.grad = mean.clone()
        for inner in self.inner:
            inner.step()
        self.steps += 1
        if self.steps == self.warmup_steps:
            self._end_warmup()
        done = self.steps - self.warmup_steps
        if done > 0 and done % self.sync_every == 0:
            self.rule(self)

    def _end_warmup(self):
        if self.warmup in ("single", "broadcast"):
            for net, inner in zip(self.nets, self.inner, strict=True):
                net.load_state_dict(self.nets[0].state_dict())
                if self.warmup == "single":
                    inner.load_state_dict(copy.deepcopy(self.inner[0].state_dict()))
                else:
                    inner.state.clear()
        self.world = weights(self.nets[0])

    @property
    def gradient(self):
        """Per parameter: the mean of the replicas' weights minus the global ones (G of BMUF's paper)."""
        every = [weights(net) for net in self.nets]
        return [sum(each) / len(each) - world for world, each in zip(self.world, zip(*every, strict=True), strict=True)]

    def spread(self, buffers=True):
        """All replicas go on from the global weights."""
        for net in self.nets:
            with torch.no_grad():
                for parameter, world in zip(net.parameters(), self.world, strict=True):
                    parameter.copy_(world)
        if buffers:
            mean = sum(net.seen for net in self.nets) / len(self.nets)
            for net in self.nets:
                net.seen.copy_(mean)


def weights(net: nn.Module):
    return [parameter.detach().clone() for parameter in net.parameters()]


def weights_of_copies(optimizer):
    """The global weights of an outer optimizer."""
    return [weight.detach().clone() for weight in copies(optimizer)]


def copies(optimizer):
    return list(optimizer.synchronizer.copy.of.values())


def averaging(sim):
    """Local SGD: W ← mean."""
    sim.world = [world + g for world, g in zip(sim.world, sim.gradient, strict=True)]
    sim.spread()


def cbm(lr, momentum):
    """Δ ← η Δ + ζ G; W ← W + Δ."""

    def rule(sim):
        sim.momentum = [momentum * d + lr * g for d, g in zip(sim.momentum, sim.gradient, strict=True)]
        sim.world = [world + d for world, d in zip(sim.world, sim.momentum, strict=True)]
        sim.spread()

    return rule


def nbm(lr, momentum):
    """The paper's: with W(t) = W(t-1) + Δ(t), replicas go on from W(t) + η Δ(t)."""

    def rule(sim):
        if not hasattr(sim, "anchor"):
            sim.anchor = sim.world
        # G is taken from where the block began, the look-ahead point; Δ accumulates from the anchor.
        deltas = [momentum * d + lr * g for d, g in zip(sim.momentum, sim.gradient, strict=True)]
        sim.anchor = [a + d for a, d in zip(sim.anchor, deltas, strict=True)]
        sim.momentum = deltas
        sim.world = [a + momentum * d for a, d in zip(sim.anchor, deltas, strict=True)]
        sim.spread()

    return rule


def fairseq_nbm(lr, momentum):
    """S ← η S + ζ grad; param = global - S - η S; global = param."""

    def rule(sim):
        sim.momentum = [momentum * s + lr * -g for s, g in zip(sim.momentum, sim.gradient, strict=True)]
        sim.world = [world - s - momentum * s for world, s in zip(sim.world, sim.momentum, strict=True)]
        sim.spread()

    return rule


def slowmo(lr, momentum):
    """u ← β u + (x₀ - x̄) / γ; x ← x₀ - α γ u, γ the inner rate at the outer step."""

    def rule(sim):
        rate = sim.inner[0].param_groups[0]["lr"]
        sim.momentum = [momentum * u - g / rate for u, g in zip(sim.momentum, sim.gradient, strict=True)]
        sim.world = [world - lr * rate * u for world, u in zip(sim.world, sim.momentum, strict=True)]
        sim.spread()
        for inner in sim.inner:
            inner.param_groups[0]["lr"] *= 0.8

    return rule
