"""A calibration finds the machine that made the measurements, and writes what a plan can be made from."""

import dataclasses

import pytest
import torch

from meshwright.cost import (
    Calibration,
    Cluster,
    Constants,
    Device,
    Efficiency,
    Link,
    Op,
    Step,
    Traffic,
    read_cluster,
    simulate,
    write_cluster,
)
from meshwright.cost.device_time import Machine, forward_s
from meshwright.cost.scheduling import Passes, pass_s
from meshwright.errors import ConfigError
from meshwright.planner.measure.calibration_fit import Links, fit_kernels, fit_links, kernel_residuals, link_residuals
from meshwright.planner.measure.calibration_probes import kernel_probes, num_probes
from meshwright.planner.measure.timing import LinkSample, Timing, fitted_factor

DEVICE = Device("CPU", 2**33, 40e9, 110e9, 9e9, efficiency="measured", cache_bytes=2**21)
EFFICIENCY = Efficiency(
    matmul=0.8, attention=0.5, memory=0.9, attention_backward=0.4, attention_fp32=0.3, attention_backward_fp32=0.7,
    update=1.1, cached=4.0, intra=1.0, all_reduce=0.5, all_gather=0.4, reduce_scatter=0.25, all_to_all=0.6, send=1.0,
)  # fmt: skip
CONSTANTS = Constants(
    gap_s=1.2e-5,
    product_s=4e-5,
    narrow=0.4,
    function_s=1.5e-9,
    call_s=1.5e-4,
    hop=1.0,
    p2p_s=5e-5,
    reduce_scatter_s=6e-4,
    power=0.0,
)
TRUE = Machine(DEVICE, EFFICIENCY, CONSTANTS)


def timing(seconds):
    return Timing(7 * seconds, seconds)  # the clock on the wall was disturbed


def kernels():
    for sample in kernel_probes(torch.device("cpu")):
        machine = TRUE
        if sample.part == "update":  # as cost.update has it
            machine = dataclasses.replace(
                TRUE, efficiency=dataclasses.replace(EFFICIENCY, memory=0.9 * 1.1, cached=1.0)
            )
        yield dataclasses.replace(sample, timing=timing(sample.predicted_s(machine)), run=None)


def test_kernels_that_follow_the_model_are_found_again():
    samples = list(kernels())
    assert len(samples) == num_probes(torch.device("cpu"))
    found = fit_kernels(samples, dataclasses.replace(DEVICE, cache_bytes=0), CONSTANTS, "cpu")
    assert found.device.cache_bytes == DEVICE.cache_bytes
    for rate in (
        lambda machine: machine.constants.gap_s,
        lambda machine: machine.bytes_per_s,
        lambda machine: machine.constants.function_s,
        lambda machine: machine.matmul_flops_per_s("fp32"),
        lambda machine: machine.matmul_flops_per_s("half"),
        lambda machine: machine.bytes_per_s * machine.efficiency.cached,
    ):
        assert rate(found) == pytest.approx(rate(TRUE), rel=0.02)
    # Each shape's own overhead blurs the exponent a little: what counts is the seconds.
    worst = {each.part: each.worst for each in kernel_residuals(samples, found, "cpu")}
    assert max(worst.values()) < 0.12
    assert max(worst[part] for part in ("gap", "memory", "functions", "fp32 products", "half products")) < 0.02
    assert found.efficiency.matmul <= 1
    assert found.efficiency.memory <= 1
    by_wall = fit_kernels(samples, dataclasses.replace(DEVICE, cache_bytes=0), CONSTANTS, "wall")
    assert by_wall.constants.gap_s == pytest.approx(7 * found.constants.gap_s)


def collectives(links, tier):
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"):
        for power in (8, 12, 18, 20, 22, 24):
            bare = LinkSample(tier, kind, 2**power, Timing(1.0, 1.0))
            yield dataclasses.replace(bare, timing=timing(links.predicted_s(bare)))


@pytest.mark.parametrize("tiers", [("intra",), ("intra", "inter"), ("inter",)])
def test_links_that_follow_the_model_are_found_again(tiers):
    per_node = 4 if "intra" in tiers else 1
    cluster = Cluster(DEVICE, 8 if "inter" in tiers else 4, per_node, Link(3e9, 4e-5), Link(1e9, 2e-4))
    true = Links(cluster, dataclasses.replace(EFFICIENCY, inter=1.0), CONSTANTS)
    samples = [sample for tier in tiers for sample in collectives(true, tier)]
    start = Links(
        dataclasses.replace(cluster, intra=Link(1.0, 1.0), inter=Link(1.0, 1.0)), Efficiency(), Constants(call_s=1.0)
    )
    found = fit_links(samples, start, "cpu")
    assert max(each.worst for each in link_residuals(samples, found, "cpu")) < 0.1
    if "intra" in tiers:
        assert found.cluster.intra.bytes_per_s == pytest.approx(3e9, rel=0.05)
        assert found.constants.call_s == pytest.approx(1.5e-4, rel=0.1)
    if "inter" in tiers:
        assert found.cluster.inter.bytes_per_s == pytest.approx(1e9, rel=0.05)


def test_nothing_is_faster_than_no_time_at_all():
    assert fitted_factor([(2.0, 1.0, 1.0)]) == 0.0
    assert fitted_factor([]) == 0.0
    assert fitted_factor([(1.0, 2.0, 7.0), (1.0, 4.0, 13.0)]) == pytest.approx(3.0)


def test_a_measured_cluster_survives_its_file_and_predicts_by_itself(tmp_path):
    calibration = Calibration({"measured": EFFICIENCY}, dataclasses.replace(CONSTANTS, shared=1.0, interference=0.0))
    cluster = Cluster(DEVICE, 2, 2, Link(3e9, 4e-5), Link(1e9, 2e-4), calibration=calibration)
    file = tmp_path / "here.json"
    file.write_text(write_cluster(cluster, {"date": "2026-01-01", "residuals": {"gap": {"median": 0.1}}}))
    again = read_cluster(file)
    assert again == cluster
    hash(again)
    traffic = Traffic("all_reduce", "data", 2**24, "backward")
    step = Step(blocks=(), axes=(("data", 2),), flops=10**10, traffic=(traffic,))
    by_cluster, by_preset = simulate(step, again), simulate(step, dataclasses.replace(again, calibration=None))
    assert by_cluster == simulate(step, dataclasses.replace(again, calibration=None), calibration)
    assert by_cluster.step_time_s != by_preset.step_time_s
    file.write_text(file.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(ConfigError, match="version 2"):
        read_cluster(file)
    file.write_text(write_cluster(cluster, {"device": "cpu"}))
    assert read_cluster(file).device.is_host  # which this device does not say of itself
    file.write_text('{"device": "CPU", "num_devices": 2, "calibration": {"devices": {"x": {"matmull": 1}}}}')
    with pytest.raises(ConfigError, match="matmull"):
        read_cluster(file)


def test_what_shares_the_cores_with_computing_takes_their_time():
    passes = Passes((1.0,) * 3, (2.0,) * 3, 0.0, 0.0, 0.0, 0.0, 0.25, 0.0, 0.0, interference=0.0)
    beside = pass_s(passes, gather=False, reduce=True)
    shared = pass_s(dataclasses.replace(passes, shared=1.0), gather=False, reduce=True)
    assert beside == pytest.approx(9.25)  # the last reduction has nothing beside it
    assert shared == pytest.approx(9.25 + 3 * 0.25)


def test_functions_cost_beside_their_bytes():
    op = Op("move", num_bytes=8_000, functions=1000)
    plain = forward_s(dataclasses.replace(op, functions=0), TRUE)
    assert forward_s(op, TRUE) == pytest.approx(plain + 1000 * CONSTANTS.function_s)
