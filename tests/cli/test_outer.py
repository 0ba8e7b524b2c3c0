"""Replicas by the training file: one is killed in mid-block, the run names it, and goes on from a checkpoint."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.cli.helpers import meshwright, metrics, project
from tests.cli.test_train import _resumes

STRATEGY = """
[strategy]
methods = [["parallel_mode", { replica = 2 }], ["outer", { rule = "diloco", sync_every = 4 }]]
"""


@pytest.mark.long
def test_a_killed_replica_is_named_and_the_run_goes_on(tmp_path, ranks):
    file = project(tmp_path)
    file.write_text(file.read_text() + STRATEGY)
    out = tmp_path / "out"
    # Step 5 is in the second block; the checkpoint after step 3 in the first.
    change = "model.args.dies_at_step=5"
    result = meshwright("train", "tiny.toml", "--nproc", 2, "--out", "out", "--set", change, folder=tmp_path)
    assert result.returncode != 0
    assert "rank 1 was ended by SIGKILL" in result.stderr
    assert [path.name for path in sorted((out / "checkpoints").glob("step-*"))] == ["step-00000003"]
    said = ranks(2).run(_resumes, file, out)
    assert "resuming after step 3" in said[0]
    assert [record["step"] for record in metrics(out)] == [1, 2, 3, 4, 5, 6]
    last = out / "checkpoints" / "step-00000006"
    record = json.loads((last / "state.json").read_text())
    assert record["outer"]["num_updates"] == 6
    assert record["outer"]["flags"]["replicas_are_equal"], "the run ends with a synchronisation"
    weights = {}
    for part in sorted((last / "tensors").glob("*.safetensors")):
        weights |= load_file(part)
    assert weights["model.mix.weight"].isfinite().all()
    assert "replica.1.model.mix.weight" not in weights
    moments = [weights[f"replica.{replica}.optim.state.mix.weight.exp_avg"] for replica in (0, 1)]
    assert not torch.equal(*moments)
