"""Plans of a corpus are those that are stored, unless a change says why."""

import pytest

from tests.planner import replay_corpus

HOW = "if the change is meant: python -m tests.planner.replay_corpus --write, and say why in the commit"


LONG = ("mixtral_8x7b_32_experts", "gpt_3_175b_512")  # the slowest; others of the same size are found again too


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in replay_corpus.CORPUS]
)
def test_a_stored_plan_is_found_again(name):
    found, stored = replay_corpus.replayed(name), replay_corpus.stored(name)
    exact = ("model", "cluster", "batch_size", "strategy", "num_micro_batches", "micro_batch")
    assert {key: found[key] for key in exact} == {key: stored[key] for key in exact}, HOW
    for key in ("step_time_s", "needed_bytes"):
        assert found[key] == pytest.approx(stored[key], rel=1e-6), HOW


def test_every_stored_plan_is_replayed():
    assert {path.stem for path in replay_corpus.FOLDER.glob("*.json")} == set(replay_corpus.CORPUS)
