"""The context ring, and ops whose backward is listed."""

import dataclasses

import pytest

from meshwright.cost import Block, Op, Step, Traffic, fitted, make_cluster, pass_flops, simulate
from meshwright.cost.device_time import Machine, Network, backward_s, forward_s, ring_s

CLUSTER = make_cluster("A100", 4)
KNOWN = fitted()
EFFICIENCY = KNOWN.of(CLUSTER.device.efficiency)
NETWORK = Network(CLUSTER, EFFICIENCY, KNOWN.constants)
MACHINE = Machine(CLUSTER.device, EFFICIENCY, KNOWN.constants, CLUSTER.num_devices)
ATTENTION = Op("attention", 1024, 4096, 64, 16)


def step(size, *ops):
    block = Block("block", 2, (), (), ops)
    sent = Traffic("send", "context", size, "forward", calls=4, per_micro_batch=True, hidden=False)
    return Step((block,), (("context", 4),), num_micro_batches=2, traffic=(sent,))


def test_attention_hides_what_is_passed_on():
    alone = ring_s(step(10**10), NETWORK, "forward")
    assert alone > 10**10 / 2 / CLUSTER.intra.bytes_per_s
    assert ring_s(step(10**10), NETWORK, "backward") == 0
    assert ring_s(step(10**10, ATTENTION), NETWORK, "forward") == pytest.approx(
        alone - 2 * forward_s(ATTENTION, MACHINE)
    )
    assert ring_s(step(10**4, ATTENTION), NETWORK, "forward") == 0
    times = [simulate(step(size, ATTENTION), CLUSTER) for size in (10**4, 10**10)]
    assert times[1].inline_s > times[0].inline_s == 0
    assert times[1].step_time_s - times[0].step_time_s == pytest.approx(times[1].inline_s)


def test_ops_of_backward_are_what_follows_by_rule():
    both = Op("matmul", 64, 128, 256)
    forward = dataclasses.replace(both, moment="forward")
    listed = [Op("matmul", 64, 256, 128, moment="backward"), Op("matmul", 256, 128, 64, moment="backward")]
    assert forward_s(forward, MACHINE) == forward_s(both, MACHINE)
    assert backward_s(forward, MACHINE) == 0 == forward_s(listed[0], MACHINE)
    assert sum(backward_s(op, MACHINE) for op in listed) == pytest.approx(backward_s(both, MACHINE))
    assert sum(pass_flops(op)[1] for op in listed) == pass_flops(both)[1] == 2 * both.flops
    again = dataclasses.replace(forward, recomputed=True)
    assert backward_s(again, MACHINE) == forward_s(both, MACHINE)
    attention = dataclasses.replace(ATTENTION, moment="backward")
    assert backward_s(attention, MACHINE) == backward_s(ATTENTION, MACHINE)
    assert pass_flops(attention) == (0, round(2.5 * ATTENTION.flops))
