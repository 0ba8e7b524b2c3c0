import dataclasses

import pytest

from meshwright.cost import Constants, Efficiency, fitted, make_cluster
from meshwright.cost.device_time import Group, Network, collective_s, group_of

FREE = Constants(call_s=0.0, hop=0.0)
PLAIN = Efficiency(intra=1.0, inter=1.0)


def network(devices=16, constants=FREE):
    cluster = make_cluster("A100", devices)  # 300 GB/s inside a node, 25 GB/s a device between nodes
    quick = dataclasses.replace(cluster.intra, latency_s=0.0)
    return Network(dataclasses.replace(cluster, intra=quick), PLAIN, constants)


def test_ranks_lie_on_nodes_with_the_first_axis_innermost():
    axes = (("tensor", 4), ("zero", 8), ("pipeline", 2))
    assert group_of(axes, ("tensor",), 8) == Group(4, 4)
    assert group_of(axes, ("zero",), 8) == Group(8, 2)
    assert group_of(axes, ("pipeline",), 8) == Group(2, 1)
    assert group_of(axes, ("zero",), 8).nodes == 4


def test_an_axis_may_have_the_ranks_of_the_one_before_it():
    # Two ranks share each sample, and all eight the state: the eight lie on one node.
    axes = (("sequence", 2), ("zero", 8), ("pipeline", 2))
    assert group_of(axes, ("zero",), 8, ("sequence",)) == Group(8, 8)
    assert group_of(axes, ("zero",), 8) == Group(8, 4)
    assert group_of(axes, ("pipeline",), 8, ("sequence",)) == Group(2, 1)


def test_a_ring_inside_a_node_by_hand():
    group = Group(8, 8)
    assert collective_s("all_gather", 8e9, group, network()) == pytest.approx(7e9 / 300e9)
    assert collective_s("reduce_scatter", 8e9, group, network()) == pytest.approx(7e9 / 300e9)
    assert collective_s("all_reduce", 8e9, group, network()) == pytest.approx(2 * 7e9 / 300e9)
    assert collective_s("all_to_all", 8e9, group, network()) == pytest.approx(7e9 / 300e9)  # 1e9 for each of 7


def test_between_nodes_all_cards_of_the_group_carry_it():
    # Each of 2 nodes takes the half it lacks, through 8 cards, or through the one that a group across nodes has.
    assert collective_s("all_gather", 8e9, Group(16, 8), network()) == pytest.approx(max(4e9 / 200e9, 7.5e9 / 300e9))
    assert collective_s("all_gather", 8e9, Group(2, 1), network()) == pytest.approx(4e9 / 25e9)
    assert collective_s("send", 1e9, Group(2, 1), network()) == pytest.approx(1e9 / 25e9)


def test_a_broadcast_brings_the_whole_to_every_rank():
    assert collective_s("broadcast", 6e9, Group(2, 2), network()) == pytest.approx(6e9 / 300e9)
    assert collective_s("broadcast", 6e9, Group(8, 8), network()) == pytest.approx(6e9 / 300e9)
    assert collective_s("broadcast", 6e9, Group(2, 1), network()) == pytest.approx(6e9 / 25e9)


def test_hops_of_a_ring_and_of_a_tree():
    slow = network(constants=Constants(call_s=0.0, hop=1.0))
    gathered = collective_s("all_gather", 1.0, Group(64, 1), slow, calls=3)
    assert gathered == pytest.approx(3 * 64 * 1.2e-5, rel=1e-3)
    reduced = collective_s("all_reduce", 1.0, Group(64, 1), slow)
    assert reduced == pytest.approx(2 * 2 * 6 * 1.2e-5, rel=1e-3)  # 6 levels up and down, there and back
    assert reduced < 2 * gathered / 3


@pytest.mark.parametrize(
    ("ranks", "seconds"),
    [
        (2, {1: 44e-6, 8: 87e-6, 64: 405e-6, 1024: 5.44e-3}),
        (4, {1: 51e-6, 8: 117e-6, 64: 544e-6, 1024: 7.26e-3}),
        (8, {1: 93e-6, 8: 134e-6, 64: 580e-6, 1024: 8.19e-3}),
    ],
)
def test_all_reduces_in_a_node_of_a100_take_what_nccl_was_measured_to_take(ranks, seconds):
    # vTrain's trace/a100, of files of MiB; what presets say, not what was fitted to these.
    links = Network(make_cluster("A100", 8), fitted().of("A100"), fitted().constants)
    for mib, measured in seconds.items():
        told = collective_s("all_reduce", mib * 2**20, Group(ranks, ranks), links)
        assert told == pytest.approx(measured, rel=0.26)


def test_a_rack_has_no_longer_chain_than_a_node():
    rack = Network(make_cluster("GB200", 72), PLAIN, FREE)
    of_rack, of_eight = (collective_s("all_reduce", 8.0, Group(size, size), rack) for size in (64, 8))
    assert of_rack == pytest.approx(of_eight, rel=1e-3)


def test_one_rank_and_no_bytes_cost_nothing():
    assert collective_s("all_reduce", 1e9, Group(1, 1), network()) == 0
    assert collective_s("all_reduce", 0, Group(8, 8), network()) == 0
