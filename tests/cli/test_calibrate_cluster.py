"""``meshwright calibrate``: what it refuses before it starts anything, and one real run."""

import json

import pytest
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.cost import find_cluster
from tests.cli.helpers import meshwright


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--device", "gpu"), "Expected one of auto, cpu"),
        (("--clock", "sun"), "Expected one of auto, wall, cpu"),
        (("--out", "absent/c.json"), "Got absent/c.json"),
        (("--out", "c.txt"), "a .json file in an existing directory"),
        (("--out", "/"), "Got /"),
        (("--out", "/proc/c.json"), "in whose directory nothing can be written"),
    ],
)
def test_a_refusal_is_one_paragraph(arguments, words):
    result = CliRunner().invoke(app, ["calibrate", *arguments])
    assert result.exit_code == 1
    assert result.stderr.startswith("meshwright: error: ")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.long
def test_two_ranks_measure_this_machine(tmp_path):
    result = meshwright("calibrate", "--processes", 2, "--device", "cpu", "--out", "c.json", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    for part in ("fp32 products", "half attention", "update", "all_reduce intra", "Written to c.json"):
        assert part in result.stdout
    cluster = find_cluster(str(tmp_path / "c.json"))
    assert (cluster.num_devices, cluster.devices_per_node) == (2, 2)
    assert cluster.calibration is not None
    assert cluster.device.is_host
    known = cluster.calibration.of(cluster.device.efficiency)
    assert 0 < known.matmul <= 1
    assert 1e-7 < cluster.calibration.constants.gap_s < 1e-2
    assert 0.2 < cluster.calibration.constants.in_step < 5
    assert "In whole steps kernels take " in result.stdout
    assert 1e9 < cluster.device.fp32_flops_per_s < 1e13
    document = json.loads((tmp_path / "c.json").read_text())
    assert document["version"] == 1
    assert document["measured"]["residuals"]["fp32 products"]["median"] < 0.5
    assert {"date", "torch", "clock", "processes"} <= document["measured"].keys()
