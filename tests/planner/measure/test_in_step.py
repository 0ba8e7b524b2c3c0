"""What steps add to their parts: measured on two ranks, and counted where it belongs."""

import dataclasses
import time

import pytest

from meshwright.cost import Calibration, Cluster, Device, Op, Step, Traffic, simulate
from meshwright.cost.efficiency import Constants, Efficiency
from meshwright.cost.step import Block, Parameter
from meshwright.planner.measure.in_step import _beyond
from meshwright.runtime import settings

DEVICE = Device("CPU", 2**33, 40e9, 110e9, 9e9, efficiency="measured")
CONSTANTS = Constants(gap_s=0.0, step_s=0.0, shared=1.0, interference=0.0, host_s=0.0)


def time_of(constants, *traffic):
    ops = (Op("move", num_bytes=9_000_000),)
    step = Step(
        blocks=(Block("blocks", 2, (Parameter("w", (8, 8), 4),), ops=ops),),
        axes=(("zero", 2),),
        traffic=traffic,
        on_cpu=True,
    )
    return simulate(step, Cluster(DEVICE, 2, 2), Calibration({"measured": Efficiency()}, constants))


def test_each_constant_stretches_its_part_alone():
    shards = Traffic("reduce_scatter", "zero", 4_000_000, moment="backward", hidden=True)
    inline = Traffic("all_reduce", "zero", 4_000_000, moment="forward", hidden=False)
    plain = time_of(CONSTANTS, shards, inline)
    for name, part in (("in_step", "compute_s"), ("waited", "inline_s"), ("sharded", "exposed_s")):
        slower = time_of(dataclasses.replace(CONSTANTS, **{name: 2.0}), shards, inline)
        others = {"compute_s", "inline_s", "exposed_s"} - {part}
        grown = getattr(slower, part) / getattr(plain, part)
        assert grown == pytest.approx(2.0, rel=0.02), (name, grown)
        for other in others - ({"exposed_s"} if name == "in_step" else set()):
            assert getattr(slower, other) == pytest.approx(getattr(plain, other), rel=0.02), (name, other)


def told():
    calls = []
    run = {seconds: (lambda s=seconds: (calls.append(s), time.sleep(s))) for seconds in (0.004, 0.016, 0.006)}
    beyond = _beyond(run[0.004], run[0.016], run[0.006], settings(), "wall")
    never_less = _beyond(run[0.016], run[0.004], run[0.006], settings(), "wall")
    return beyond, never_less, len(calls)


def test_what_a_collective_adds_is_a_ratio_of_turns(ranks):
    for beyond, never_less, calls in ranks(2).run(told):
        assert 1.0 <= beyond < 6.0
        assert never_less == 1.0
        assert calls == 2 * 3 * (1 + 5)
