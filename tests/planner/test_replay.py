"""Plans of a corpus are those that are stored, unless a change says why."""

import pytest

from meshwright.planner.plans import short_strategy
from meshwright.strategy import Strategy
from tests.planner import replay_corpus

HOW = "if the change is meant: python -m tests.planner.replay_corpus --write, and say why in the commit"


LONG = (
    "mixtral_8x7b_32_experts",
    "gpt_3_175b_512",
    "llama_3_70b_64",
)  # the slowest; others of the same size are found again too


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


@pytest.mark.parametrize("name", replay_corpus.CORPUS)
def test_what_tables_show_of_a_stored_plan_can_be_given_back(name):
    strategy = Strategy(replay_corpus.stored(name)["strategy"])
    (mesh,) = (method for method in strategy.methods if method.method_name == "parallel_mode")
    axes = {axis: size for axis, size in mesh.axes if size > 1}
    others = [method for method in strategy.methods if method is not mesh]
    assert Strategy(short_strategy(strategy, mesh.axes)) == Strategy([("parallel_mode", axes)] * bool(axes) + others)
