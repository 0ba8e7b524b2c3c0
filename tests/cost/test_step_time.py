"""Seconds of the simulated step, by hand."""

import dataclasses

import pytest

from meshwright.cost import Block, Op, Parameter, Step, find_cluster, fitted, simulate

NUMEL = 4096 * 4096
PARAMETER = Parameter("w", (4096, 4096), 4)
BLOCKS = (
    Block("blocks", 3, (PARAMETER,), ops=(Op("matmul", 4096, 4096, 4096),)),
    Block("outside", 1, (dataclasses.replace(PARAMETER, trainable=False),), ops=(Op("matmul", 4096, 4096, 4096),)),
)


def compute_s(gathered, world=1, micro_batches=1, whole_gradients=False):
    step = Step(
        BLOCKS, (("zero", world),), shard_axis="zero", gathered=gathered, num_micro_batches=micro_batches,
        compute_itemsize=2, reduce_itemsize=4, whole_gradients=whole_gradients,
    )  # fmt: skip
    return simulate(step, find_cluster(f"h100x{world}")).compute_s


def test_shards_of_a_single_rank_are_cast_and_copied():
    cluster = find_cluster("h100x1")
    rate = cluster.device.bandwidth_bytes_per_s * fitted().of(cluster.device.efficiency).memory
    gather = 4 + 2 + 2 + 2  # cast to half, and copied to where it computes
    inside, outside = 3 * (2 * gather + 2 + 4), gather  # frozen, and whole until the end of backward
    expected = (inside + outside) * NUMEL / rate
    assert compute_s("unit") - compute_s("nothing") == pytest.approx(expected, rel=0.01)
    # Gathered once a step, and reduced once.
    once = compute_s("model", micro_batches=4, whole_gradients=True) - compute_s("nothing", micro_batches=4)
    assert once == pytest.approx((3 * (gather + 2 + 4) + gather) * NUMEL / rate, rel=0.01)
    assert compute_s("unit", world=2) == compute_s("nothing", world=2)  # in the seconds of collectives
