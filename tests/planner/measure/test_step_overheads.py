"""What steps add to their parts: found from steps that have run, and counted where it belongs."""

import dataclasses

import pytest

from meshwright.cost import Calibration, Cluster, Device, Op, Step, Traffic, simulate
from meshwright.cost.calibration import Constants, Efficiency
from meshwright.cost.device_time import Group, Network, collective_s
from meshwright.cost.step import Block, Parameter, Stages
from meshwright.cost.step_time import one_s
from meshwright.planner.measure import step_overheads as in_step
from meshwright.planner.measure.step_overheads import (
    Reference,
    Size,
    Timed,
    _of_half,
    _of_shards,
    _solved,
    reference,
    with_constants,
)
from meshwright.runtime import settings
from meshwright.strategy import Strategy

DEVICE = Device("CPU", 2**33, 40e9, 110e9, 9e9, efficiency="measured")
CONSTANTS = Constants(gap_s=0.0, step_s=0.0, shared=1.0, interference=0.0, host_s=0.0)
CLUSTER = Cluster(DEVICE, 2, 2, calibration=Calibration({"measured": Efficiency()}, CONSTANTS))
SHARDS = Traffic("all_to_all", "zero", 4_000_000, moment="backward", hidden=True, calls=2)
INLINE = Traffic("all_reduce", "zero", 4_000_000, moment="forward", hidden=False, calls=4)
TINY = Traffic("all_reduce", "zero", 4_000, moment="forward", hidden=False, calls=20)


def step_of(*traffic, moved=9_000_000):
    ops = (Op("move", num_bytes=moved),)
    blocks = (Block("blocks", 2, (Parameter("w", (8, 8), 4),), ops=ops),)
    return Step(blocks=blocks, axes=(("zero", 2),), traffic=traffic, on_cpu=True)


def time_of(*traffic, **constants):
    return simulate(step_of(*traffic), with_constants(CLUSTER, **constants))


def timed(seconds, *traffic, moved=9_000_000):
    return Timed(Reference(lambda: None, step_of(*traffic, moved=moved)), seconds)


def test_each_constant_lengthens_its_part_alone():
    plain = time_of(SHARDS, INLINE)
    for name, value, part, longer in (
        ("in_step", 2.0, "compute_s", plain.compute_s),
        ("sharded", 2.0, "exposed_s", plain.exposed_s),
        ("wait_s", 0.01, "inline_s", 4 * 0.01),
    ):
        slower = time_of(SHARDS, INLINE, **{name: value})
        assert getattr(slower, part) - getattr(plain, part) == pytest.approx(longer, rel=0.03), name
        for other in {"compute_s", "inline_s", "exposed_s"} - {part}:
            if (name, other) != ("in_step", "exposed_s"):  # more is hidden
                assert getattr(slower, other) == pytest.approx(getattr(plain, other), rel=0.02), (name, other)


def test_gathers_and_reductions_of_shards_take_their_own_seconds_instead_of_a_bare_collectives():
    step, known = step_of(SHARDS), with_constants(CLUSTER, sharded=1.5, shard_s=0.006).calibration
    bytes_s = collective_s("all_to_all", 4_000_000, Group(2, 2), Network(CLUSTER, Efficiency(), CONSTANTS), 0)
    network = Network(CLUSTER, Efficiency(), known.constants)
    assert one_s(step, SHARDS, network) == pytest.approx(1.5 * bytes_s + 2 * 0.006)


def test_messages_that_are_small_beside_others_are_not_waited_for():
    grown = time_of(INLINE, TINY, wait_s=0.01).inline_s - time_of(INLINE, TINY).inline_s
    assert grown == pytest.approx(4 * 0.01)
    assert time_of(TINY, wait_s=0.01).inline_s - time_of(TINY).inline_s == pytest.approx(20 * 0.01)


def test_constants_are_found_from_seconds():
    true = with_constants(CLUSTER, in_step=1.2, wait_s=0.004, sharded=1.5, shard_s=0.006)
    inline = timed(0.0, INLINE)
    inline = dataclasses.replace(inline, seconds=inline.predicted_s(true))
    found = _solved(with_constants(CLUSTER, in_step=1.2), "wait_s", (0.0, 1.0), inline)
    assert found.calibration.constants.wait_s == pytest.approx(0.004, rel=1e-3)

    slower_s = 0.05  # computing, in every step

    def of(*traffic):
        each = timed(0.0, *traffic)
        return dataclasses.replace(each, seconds=each.predicted_s(true) + slower_s)

    many = dataclasses.replace(SHARDS, calls=40)
    large = dataclasses.replace(SHARDS, bytes_per_step=400_000_000)
    shards, alone = [of(large), of(many)], [of(), of()]
    constants = _of_shards(with_constants(CLUSTER, in_step=1.2), shards, alone).calibration.constants
    assert (constants.sharded, constants.shard_s) == (pytest.approx(1.5, rel=0.01), pytest.approx(0.006, rel=0.01))


def test_what_no_value_explains_is_the_nearest_bound():
    never = _solved(CLUSTER, "sharded", (0.2, 8.0), timed(1e-9, SHARDS)).calibration.constants.sharded
    assert never == pytest.approx(0.2, rel=1e-3)


def test_half_precision_lengthens_its_products_alone():
    half, wide = (dataclasses.replace(step_of(), blocks=(product_in(dtype),)) for dtype in ("half", "fp32"))
    slow = with_constants(CLUSTER, half_in_step=1.5)
    assert simulate(half, slow).compute_s == pytest.approx(1.5 * simulate(half, CLUSTER).compute_s)
    assert simulate(wide, slow).compute_s == simulate(wide, CLUSTER).compute_s
    timed_steps = [Timed(Reference(lambda: None, half), simulate(half, slow).compute_s) for _ in range(2)]
    assert _of_half(CLUSTER, timed_steps).calibration.constants.half_in_step == pytest.approx(1.5, rel=1e-3)


def test_a_constant_that_changes_no_step_stays_as_it_is():
    # On CPUs without bf16 products, steps in half precision run in fp32.
    wide = Timed(Reference(lambda: None, dataclasses.replace(step_of(), blocks=(product_in("fp32"),))), 1.0)
    assert _of_half(CLUSTER, [wide, wide]).calibration.constants == CLUSTER.calibration.constants


def product_in(dtype):
    return Block("blocks", 2, (Parameter("w", (8, 8), 4),), ops=(Op("matmul", 512, 512, 512, dtype=dtype),))


def test_ranks_wait_longer_the_more_they_are():
    waits = with_constants(CLUSTER, wait_s=0.01).calibration.constants
    assert [waits.waits_s(ranks) for ranks in (1, 2, 4, 8)] == pytest.approx([0.0, 0.01, 0.02, 0.03])


def test_ranks_that_take_turns_on_a_core_leave_it_to_others_in_bubbles():
    stages = Stages(ranks=(0, 1), ranges=((0, 1), (1, 2)), num_blocks=2, here=0, boundary_bytes=0, schedule="gpipe")
    each = [dataclasses.replace(step_of(moved=90_000_000), axes=(("pipeline", 2),), stages=stages)] * 2
    own, shared = (simulate(each, with_constants(CLUSTER, per_core=cores)) for cores in (1.0, 2.0))
    assert own.bubble_s > own.compute_s / 2
    assert shared.bubble_s < own.bubble_s / 10
    assert shared.compute_s == own.compute_s


def steps():
    small = Size(128, 2, 32, 2, 8)
    sharded = Strategy([("parallel_mode", {"zero": 2}), "fsdp"])
    split = Strategy([("parallel_mode", {"tensor": 2}), "tensor_parallel"])
    kinds = (None, sharded, split)
    built = [reference(kind, small, settings()) for kind in kinds]
    built.append(reference(None, small, settings(), in_half=True))
    return [(each.seconds, each.predicted_s(CLUSTER)) for each in in_step._in_turns(built, settings(), "wall", 3)]


def test_the_reference_trains_under_its_strategies(ranks):
    for rank in ranks(2).run(steps):
        assert all(0 < seconds < 10 and predicted > 0 for seconds, predicted in rank)
