"""pipeline_parallel: what is drawn outside the blocks is the same on every stage, dropout in them is not."""

import pytest

from tests.methods import draw_runs as runs


@pytest.mark.parametrize(
    ("schedule", "by_hand"),
    [("1f1b", False), ("1f1b", True), ("zbv", False), pytest.param("interleaved", False, marks=pytest.mark.long)],
)
def test_stages_draw_alike_outside_their_blocks_alone(ranks, schedule, by_hand):
    (noises, masks, after), (others, other_masks, other_after) = ranks(2).run(runs.draws, schedule, by_hand)
    runs_of_model = runs.STEPS * (1 if by_hand else runs.MICRO)
    assert set(noises) == set(others)
    assert len(set(noises)) == runs_of_model
    assert len(set(masks) | set(other_masks)) == 4 * runs_of_model  # all blocks drop something else
    assert after == other_after
