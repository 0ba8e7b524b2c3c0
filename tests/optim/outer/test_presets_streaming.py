"""Fragments in turn, delayed and merged, against the same written out in one process; and few bits on the wire."""

import functools

import pytest
import torch

from meshwright.errors import ConfigError
from meshwright.optim import DiLoCo, StreamingDiLoCo
from meshwright.optim.outer.sync_policy import OuterPolicy, SyncSchedule, divided
from tests.optim.outer import simulation as sim

H, P, DELAY, ALPHA, STEPS = 6, 2, 2, 0.25, 30


def fragments_of(parameters):
    return [parameters[:3], parameters[3:]]


@functools.cache
def simulated(size):
    """Fragment p is sent after steps (p + 1) H / P, + H, …; the mean of then arrives τ steps later."""
    nets = [sim.model() for _ in range(size)]
    inner = [sim.adamw(net) for net in nets]
    world = sim.weights(nets[0])
    momentum = [torch.zeros_like(w) for w in world]
    places = fragments_of(list(range(len(world))))
    sent = {}
    for step in range(1, STEPS + 1):
        for replica, net in enumerate(nets):
            sim.local_gradients(net, replica, step - 1)
            inner[replica].step()
        every = [list(net.parameters()) for net in nets]
        for p, members in enumerate(places):
            if (arrived := sent.pop((p, step - DELAY), None)) is not None:
                for place, change in zip(members, arrived, strict=True):
                    momentum[place] = 0.9 * momentum[place] + change
                    world[place] = world[place] - 0.7 * (change + 0.9 * momentum[place])
                    with torch.no_grad():
                        for parameters in every:
                            parameters[place].copy_(ALPHA * parameters[place] + (1 - ALPHA) * world[place])
        for p, members in enumerate(places):
            if (step - (p + 1) * H // P) % H == 0 and step >= (p + 1) * H // P:
                means = [sum(parameters[place].detach() for parameters in every) / size for place in members]
                sent[p, step] = [world[place] - mean for place, mean in zip(members, means, strict=True)]
    return [sim.weights(net) for net in nets]


def streamed(quantise):
    net = sim.model()
    fragments = fragments_of(list(net.parameters()))
    optimizer = StreamingDiLoCo(sim.adamw(net), H, fragments, DELAY, ALPHA, quantise, model=net)
    for step in range(STEPS):
        sim.local_gradients(net, optimizer.replicas.rank, step)
        optimizer.step()
    weights, world = sim.weights(net), sim.weights_of_copies(optimizer)
    optimizer.synchronize()
    assert optimizer.synchronizer.replicas_are_equal
    assert not optimizer.synchronizer.settle(), "nothing is under way"
    return weights, optimizer.replicas.bytes_sent, world, sim.weights(net), optimizer.num_syncs


def streamed_in_all(kinds):
    return {kind: streamed(kind) for kind in kinds}


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_fragments_delay_and_merge(ranks, size):
    results = ranks(size).run(streamed_in_all, [None, "int8", "int4"])
    start, expected = sim.weights(sim.model()), simulated(size)

    def apart(kind):
        pairs = [
            (a, b)
            for rank, result in enumerate(results)
            for a, b in zip(result[kind][0], expected[rank], strict=True)
        ]  # fmt: skip
        return sum((a - b).square().sum() for a, b in pairs).sqrt()

    moved = sum((a - b).square().sum() for each in expected for a, b in zip(start, each, strict=True)).sqrt()
    assert apart(None) < 1e-6 * moved
    assert 1e-6 * moved < apart("int8") < 0.02 * moved
    assert apart("int8") < apart("int4") < 0.2 * moved
    for kind in results[0]:
        for world in (2, 3):  # global weights, and those after the last synchronisation, are the same bits everywhere
            assert all(
                torch.equal(a, b)
                for result in results
                for a, b in zip(result[kind][world], results[0][kind][world], strict=True)
            )
    sent = {kind: results[0][kind][1] for kind in results[0]}
    assert results[0][None][4] == 10 + P  # sent after 3, 6, …, 30 steps, the last taken at the end; and all once more
    # fp64 weights travel as fp64 in full, and as fp32 would in few bits.
    assert sent["int8"] < 0.25 * sent[None]
    assert sent["int4"] < 0.16 * sent[None]


def test_what_is_due():
    rhythm = SyncSchedule(sync_every=6, warmup_steps=4, num_fragments=3, delay=1)
    due = {step: list(rhythm.due(step)) for step in range(14) if list(rhythm.due(step))}
    assert due == {
        6: [("send", 0)], 7: [("apply", 0)], 8: [("send", 1)], 9: [("apply", 1)], 10: [("send", 2)],
        11: [("apply", 2)], 12: [("send", 0)], 13: [("apply", 0)],
    }  # fmt: skip
    assert [step for step in range(12) if list(SyncSchedule(3, 2).due(step))] == [5, 8, 11]
    assert list(SyncSchedule(8, delay=5).due(8 + 2)) == [("advance", 0)]


@pytest.mark.parametrize(
    ("sizes", "cut"),
    [([10, 10, 10, 10], [2, 2]), ([100, 1, 1, 1], [1, 3]), ([1, 1, 1, 100], [3, 1]), ([5, 50, 5], [1, 1, 1])],
)
def test_parameters_are_cut_evenly(sizes, cut):
    parameters = [torch.zeros(size) for size in sizes]
    found = divided(parameters, len(cut))
    assert [len(fragment) for fragment in found] == cut
    assert [p for fragment in found for p in fragment] == parameters


def test_bad_fragments():
    net = sim.model()
    parameters = list(net.parameters())
    with pytest.raises(ConfigError, match="do not divide"):
        DiLoCo(sim.sgd(net), 10, fragments=4)
    with pytest.raises(ConfigError, match="more fragments than parameters"):
        DiLoCo(sim.sgd(net), 100, fragments=100)
    with pytest.raises(ConfigError, match="each once"):
        DiLoCo(sim.sgd(net), 10, fragments=[parameters[:2], parameters[1:]])
    with pytest.raises(ConfigError, match="Unknown quantise"):
        OuterPolicy(quantise="int3")
