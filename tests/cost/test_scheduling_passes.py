"""What hides behind what in one micro-batch of sharded blocks."""

import dataclasses

import pytest

from meshwright.cost import DEVICES, Constants, Efficiency, Op
from meshwright.cost.device_time import Machine, forward_s
from meshwright.cost.scheduling import Passes, pass_s
from meshwright.cost.step_time import _block_s, _launched_s, _seconds, last_rounds

# Four blocks that compute 1 s forward and 2 s backward; gathering or reducing one takes as long as computing it.
PASSES = Passes((1.0,) * 4, (2.0,) * 4, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, interference=0.0)


def test_the_next_gather_does_not_wait_for_the_reduction_of_this_block():
    # Forward: the first gather, then all hide: 5 s. Backward: the first gather hides behind forward's end already.
    whole = pass_s(PASSES, gather=True, reduce=True)
    alone = pass_s(PASSES, gather=False, reduce=False)
    assert alone == 12.0
    assert whole <= alone + 3.0  # a gather at the start, and the last reduction at the end; the link is busy beside


def test_gathers_that_are_not_issued_ahead_are_waited_for():
    late = dataclasses.replace(PASSES, gathers_ahead=False)
    ahead_s, late_s = (pass_s(each, gather=True, reduce=True) for each in (PASSES, late))
    assert late_s - ahead_s >= 2.0  # three of backward's four gathers, but for what a busy link had cost before


def _block(ops, machine):
    pairs = zip(_seconds(ops, machine), _launched_s(ops, machine), strict=True)
    return tuple(_block_s(1.0, kernels, launches, 0.0, 0.0) for kernels, launches in pairs)


def test_a_block_is_no_faster_than_its_launches():
    machine = Machine(DEVICES["H100-SXM"], Efficiency(), Constants(gap_s=0.0, host_s=1e-4))
    short = (Op("move", num_bytes=1000, count=10),)
    assert _block(short, machine) == pytest.approx((1e-3, 1e-3))
    again = (dataclasses.replace(short[0], recomputed=True),)
    assert _block(again, machine) == pytest.approx((1e-3, 2e-3))
    # Of operators a module has several, so the host takes less for each.
    machine = dataclasses.replace(machine, constants=dataclasses.replace(machine.constants, operator_s=2e-5))
    forward = tuple(dataclasses.replace(op, traced=True, moment="forward") for op in again)
    backward = tuple(dataclasses.replace(op, traced=True, moment="backward") for op in short)
    assert _block((*forward, *backward), machine) == pytest.approx((2e-4, 4e-4))
    long = (Op("matmul", 8192, 8192, 8192),)
    assert _block(long, machine)[0] > 1e-3


def test_reductions_of_ranks_with_several_stages_begin_earlier():
    assert last_rounds(8, 1, 64) == 1.0
    assert last_rounds(8, 2, 64) == pytest.approx(4.5)
    assert last_rounds(8, 2, 2) == pytest.approx(1.5)  # no more micro-batches than there are


def test_launches_of_collectives_count_beside_those_of_kernels():
    # Kernels of 1 s with collectives of 2 s hide launches of 2 s, but not of 2 s and 4 s more for the collectives.
    assert _block_s(1.0, 1.0, 2.0, 2.0, 0.5) == 3.0
    assert _block_s(1.0, 1.0, 2.0, 2.0, 4.0) == 6.0
    assert _block_s(1.0, 1.0, 2.0, 2.0, 0.0) == 4.0


def test_products_with_rows_that_are_not_aligned_are_slow():
    machine = Machine(DEVICES["A100-80"], Efficiency(), Constants(misaligned=0.35))
    odd, even = (forward_s(Op("matmul", 4096, vocab, 1024), machine) for vocab in (50257, 50304))
    assert 2.0 < odd / even < 1 / 0.35
    wide = (forward_s(Op("matmul", 4096, vocab, 1024, dtype="fp32"), machine) for vocab in (50257, 50304))
    assert next(wide) < next(wide)
