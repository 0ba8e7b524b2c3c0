"""``meshwright train --max-restarts``: a rank dies, all start again, and the run ends as it would have."""

import pytest

from tests.cli.helpers import losses, meshwright, project


@pytest.mark.long
def test_a_run_starts_again_from_its_checkpoint(tmp_path):
    file = project(tmp_path)
    whole = meshwright("train", file, "--nproc", 2, "--out", "whole", folder=tmp_path)
    assert whole.returncode == 0, whole.stderr
    # Rank 1 dies in its fifth step: step 5 of the first attempt, which no later attempt has so many of.
    dies = ("--set", "model.args.dies_at_step=5")
    again = meshwright("train", file, "--nproc", 2, "--out", "again", "--max-restarts", 1, *dies, folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "resuming after step 3" in again.stderr
    assert losses(tmp_path / "again") == losses(tmp_path / "whole")
    # Without a checkpoint to start from, and with more deaths than restarts.
    never = meshwright("train", file, "--nproc", 2, "--out", "never", "--max-restarts", 1, "--set",
                       "model.args.dies_at_step=2", folder=tmp_path)  # fmt: skip
    assert never.returncode != 0
    assert "resuming" not in never.stderr
