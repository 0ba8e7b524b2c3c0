"""``meshwright bench-comm``: one real run, and what it refuses before it starts anything."""

import json

import pytest
from typer.testing import CliRunner

from meshwright.cli import app
from tests.cli.helpers import meshwright


@pytest.mark.long
def test_two_ranks_measure_and_write(tmp_path):
    sizes = ("--min-bytes", 1024, "--max-bytes", 4096, "--iterations", 2, "--warmup", 1, "--device", "cpu")
    ops = ("--op", "all_gather", "--op", "send_recv")
    result = meshwright(
        "bench-comm", "--nproc", 2, *ops, *sizes, "--dtype", "bf16", "--json", "f.json", folder=tmp_path
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("Collectives on 2 ranks, bfloat16, median of 2") == 1
    document = json.loads((tmp_path / "f.json").read_text())
    assert (document["num_ranks"], document["device"], document["backend"]) == (2, "CPU", "gloo")
    assert [(each["op"], each["size_bytes"]) for each in document["measurements"]] == [
        (op, size) for op in ("all_gather", "send_recv") for size in (1024, 2048, 4096)
    ]
    units = {"time_s", "min_time_s", "max_time_s", "algorithm_bandwidth_bytes_per_s", "bus_bandwidth_bytes_per_s"}
    assert units <= set(document["measurements"][0])
    assert all(each["time_s"] > 0 for each in document["measurements"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--op", "all_gathr"), "did you mean 'all_gather'"),
        (("--dtype", "fp8"), "--dtype is not known"),
        (("--device", "gpu"), "Expected one of auto, cpu"),
        (("--min-bytes", "8", "--max-bytes", "4"), "no range"),
        (("--json", "absent/f.json"), "absent/f.json, whose directory does not exist"),
        (("--json", "/"), "Got /, a directory"),
        (("--nproc", "1", "--device", "cpu"), "One rank has nobody to communicate with"),
    ],
)
def test_a_refusal_is_one_paragraph(arguments, words):
    result = CliRunner().invoke(app, ["bench-comm", *arguments])
    assert result.exit_code == 1
    assert result.stderr.startswith("meshwright: error: ")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_help_names_every_option():
    shown = CliRunner().invoke(app, ["bench-comm", "--help"], env={"COLUMNS": "200"}).stdout
    options = ("op", "min-bytes", "max-bytes", "dtype", "iterations", "warmup", "nproc", "device", "json")
    assert all(f"--{option}" in shown for option in options)
    assert "bench-comm" in CliRunner().invoke(app, ["--help"]).stdout
