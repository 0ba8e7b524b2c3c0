"""A run that is killed anywhere goes on as if it had not been: the same losses to the last bit, no half checkpoint."""

import random

import pytest

from tests.faults.vocabulary import disk_full, kill, kill_during_save
from tests.faults.world import SAVE_EVERY, losses, resumed_at, run, run_and_kill

STEPS = 12


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The losses of a run that nothing happens to."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    assert run(2, directory, STEPS) == [0, 0]
    return losses(directory)


def test_a_killed_run_loses_nothing_beyond_its_last_checkpoint(whole, tmp_path):
    directory = tmp_path / "run"
    assert -9 in run(2, directory, STEPS, [kill(rank=0, at_step=5)])  # after the save of 3
    assert -9 in run(2, directory, STEPS, [kill_during_save(rank=1, at_step=6)])  # this one in the background
    assert [path.name for path in directory.glob("step-*")] == ["step-00000003"]
    full = run(2, directory, STEPS, [disk_full(rank=1, at_step=9)])
    assert full[0] != 0
    assert "(rank 1)" in directory.with_suffix(".stderr").read_text()
    assert run(2, directory, STEPS) == [0, 0]
    assert resumed_at(directory) == [0, 3, 3, 6]
    assert losses(directory) == whole
    assert sorted(path.name for path in directory.iterdir()) == ["step-00000009", "step-00000012"]


def _chain(tmp_path, num_kills, seed):
    """Kills runs at random moments, so many times in all; each run then ends as it would have. The number of kills."""
    rng, killed, number, lost = random.Random(seed), 0, 0, 0
    steps = 10 * SAVE_EVERY
    reference = tmp_path / "reference"
    assert run(2, reference, steps) == [0, 0]
    while killed < num_kills:
        directory = tmp_path / f"run-{number}"
        while killed < num_kills and run_and_kill(2, directory, steps, rng, within_s=0.6):
            killed += 1
        number += 1
        assert run(2, directory, steps) == [0, 0]
        assert losses(directory) == losses(reference)
        begun = resumed_at(directory)
        assert begun == sorted(begun), "a later attempt began earlier: a checkpoint was lost"
        lost += sum(step % SAVE_EVERY != 0 for step in begun)
    assert lost == 0
    return killed


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_random_kills(tmp_path, request):
    num_kills = request.config.getoption("--kills")
    assert _chain(tmp_path, num_kills, seed=1) == num_kills
