"""Seconds of what is offloaded: copies hide behind computing where they can, updates run at the speed of the host."""

import dataclasses

import pytest

from meshwright.cost import Link, copies, find_cluster, simulate
from meshwright.cost.device_time import offload_time
from meshwright.planner import FamilyWorkload, parse_family
from meshwright.strategy import Strategy

ON_HOST = {"optimizer": 1.0, "update_on": "host"}
SUBJECT = FamilyWorkload(parse_family("gpt2-xl"), find_cluster("a100-80x1"), 8, "bf16")


def planned(offload, cluster=None, micro_batches=1):
    subject = dataclasses.replace(SUBJECT, cluster=cluster or SUBJECT.cluster)
    return subject.plan(Strategy([("offload", offload)] if offload else []), micro_batches)


def test_states_in_host_memory_update_at_its_speed():
    plain, offloaded = (planned(keys).forecast.time for keys in (None, ON_HOST))
    elements = sum(count * p.numel for count, p in planned(None).step.every_parameter())
    # Weights, gradients and two moments in fp32: read, and all but gradients written; gradients thrice with clipping.
    moved = elements * (2 * 4 + 3 * 4 + 2 * 8)
    link = 2 * 4 * elements / 2 / SUBJECT.cluster.host_link.bytes_per_s  # to the host, and back at the same time
    expected = moved / SUBJECT.cluster.host_memory.bytes_per_s + link
    assert offloaded.update_s == pytest.approx(expected, rel=0.02)
    assert offloaded.update_s > 5 * plain.update_s
    assert offloaded.copies_s == 0.0


def test_states_that_visit_the_device_take_the_time_of_their_way():
    elements = sum(count * p.numel for count, p in planned(None).step.every_parameter())
    roomy = dataclasses.replace(SUBJECT.cluster, host_memory=Link(1e13, 1e-7))
    plain, offloaded = (planned(keys, roomy).forecast.time for keys in (None, "optimizer"))
    # Two moments come, and leave with the weights; the other direction and the update run beside.
    assert offloaded.update_s == pytest.approx(3 * 4 * elements / roomy.host_link.bytes_per_s, rel=0.01)
    fast = dataclasses.replace(roomy, host_link=Link(1e13, 1e-7))
    assert planned("optimizer", fast).forecast.time.update_s == pytest.approx(plain.update_s, rel=0.01)
    half = planned({"optimizer": 0.5}, roomy).forecast.time.update_s
    assert half == pytest.approx((offloaded.update_s + plain.update_s) / 2, rel=0.05)


def test_what_visits_the_device_is_there_in_a_few_buckets():
    plain, offloaded = (planned(keys).memory for keys in (None, "optimizer"))
    elements = sum(count * p.numel for count, p in planned(None).step.every_parameter())
    assert offloaded.visiting == pytest.approx(3 * 2 * 2**26, rel=1e-6)
    assert (offloaded.host_master, offloaded.gradients) == (4 * elements, plain.gradients)
    assert offloaded.host_optimizer + offloaded.optimizer == plain.optimizer
    small = planned({"optimizer": 1.0, "bucket_bytes": 2**20}).memory
    assert small.visiting == pytest.approx(3 * 2 * 2**20, rel=1e-6)
    assert planned(ON_HOST).memory.visiting == 0


def test_activations_hide_behind_computing_as_far_as_the_link_allows():
    slow = dataclasses.replace(SUBJECT.cluster, host_link=Link(1e8, 1e-5))
    fast = dataclasses.replace(SUBJECT.cluster, host_link=Link(1e12, 1e-5), host_memory=Link(1e12, 1e-7))
    plain = planned(None).forecast.time
    hidden, exposed = (planned("activation", cluster).forecast.time for cluster in (fast, slow))
    assert hidden.copies_s == 0.0
    assert hidden.step_time_s == pytest.approx(plain.step_time_s, rel=1e-6)
    size = planned("activation").step.activations.offloaded_bytes
    assert exposed.copies_s == pytest.approx(2 * size / 1e8 - exposed.compute_s, rel=1e-3)
    assert exposed.step_time_s == pytest.approx(plain.step_time_s + exposed.copies_s)


def test_neighbours_behind_one_switch_copy_at_half_the_speed():
    step = planned("activation").step
    alone, pair = (offload_time(step, find_cluster(f"a100-80x{count}")) for count in (1, 2))
    assert pair.forward_s == pytest.approx(2 * alone.forward_s, rel=1e-3)
    assert pair.backward_s == pytest.approx(2 * alone.backward_s, rel=1e-3)


def test_both_directions_at_once_are_bound_by_the_hosts_memory():
    step = planned({**ON_HOST, "gradients": 0.0}).step  # gradients leave as weights come back
    cluster = find_cluster("h100x8")
    moved = sum(copy.bytes_per_step for copy in copies(step) if copy.moment == "update")
    assert cluster.host_memory.bytes_per_s < 2 * cluster.host_share.bytes_per_s
    assert offload_time(step, cluster).update_s == pytest.approx(moved / cluster.host_memory.bytes_per_s, rel=1e-3)
    roomy = dataclasses.replace(cluster, host_memory=Link(1e12, 1e-7))
    assert offload_time(step, roomy).update_s == pytest.approx(moved / 2 / cluster.host_share.bytes_per_s, rel=1e-3)


def test_on_a_cpu_copies_take_its_memory():
    subject = dataclasses.replace(SUBJECT, cluster=find_cluster("cpux1"), dtype=None, limit_bytes=2**40)
    plain, offloaded = (
        simulate(subject.plan(Strategy(methods)).step, subject.cluster) for methods in ([], [("offload", "activation")])
    )
    assert offloaded.copies_s > 0
    assert offloaded.step_time_s == pytest.approx(plain.step_time_s + offloaded.copies_s)
