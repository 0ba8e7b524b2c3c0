"""Starts of large models on torch's fake process group: planned, checked and applied, and nothing is materialised."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "large_models.py"
MIB = 2**20


@pytest.mark.parametrize(
    ("strategy", "share"),
    [
        pytest.param(["fsdp"], 1 / 64, marks=pytest.mark.long),
        ([["parallel_mode", {"axes": [["tensor", 8], ["zero", 8]]}], "tensor_parallel", "fsdp"], 1 / 64),
        # The first stage has one block of eight and the embeddings.
        pytest.param(
            [["parallel_mode", {"axes": [["pipeline", 8], ["data", 8]]}], "pipeline_parallel"],
            0.213,
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_model_that_no_host_can_hold_starts_in_one_process(strategy, share):
    """Eight layers of Llama 70B and its embeddings are 36 GB in fp32; 120 MiB are for code and what describes it."""
    options = ["--model", "70b", "--layers", "8", "--ranks", "64", "--strategy", json.dumps(strategy)]
    printed = subprocess.run([sys.executable, BENCHMARK, *options], capture_output=True, text=True, check=True).stdout
    found = json.loads(printed.splitlines()[-1])
    assert found["whole_bytes"] > 35e9
    assert found["gaps"] == []
    assert found["materialised_bytes"] == 0
    assert found["peak_bytes"] - found["before_bytes"] < 120 * MIB
    assert 4 * found["local_numel"] == pytest.approx(share * found["whole_bytes"], rel=0.01)
