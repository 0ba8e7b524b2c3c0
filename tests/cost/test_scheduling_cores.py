"""Pipelines whose ranks take turns on cores."""

import pytest

from meshwright.cost.scheduling import StageTimes, order, play, play_on_cores

TIMES = [StageTimes(1.0, 2.0), StageTimes(1.5, 2.5), StageTimes(1.0, 2.0), StageTimes(2.0, 3.0)]
WORK = 5 * sum(each.forward_s + each.backward_s for each in TIMES)
CASES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)]


@pytest.mark.parametrize(("schedule", "per_rank"), CASES)
def test_a_core_for_each_rank_is_the_pipeline_itself(schedule, per_rank):
    rows = order(schedule, 4, per_rank, 5)
    alone = max(end for _, _, end in play(rows, TIMES, 0.25, per_rank))
    assert play_on_cores(rows, TIMES, 0.25, per_rank, 4) == pytest.approx(alone)


@pytest.mark.parametrize(("schedule", "per_rank"), CASES)
def test_one_core_does_all_the_work_and_two_leave_little_idle(schedule, per_rank):
    rows = order(schedule, 4, per_rank, 5)
    one, two, four = (play_on_cores(rows, TIMES, 0.0, per_rank, cores) for cores in (1, 2, 4))
    assert one == pytest.approx(WORK)
    assert WORK / 2 <= two < 1.2 * WORK / 2
    assert four <= two <= one


def test_two_ranks_on_one_core_by_hand():
    rows = order("gpipe", 2, 1, 1)  # forward, forward, backward, backward, with a hop between ranks
    assert play_on_cores(rows, TIMES[:2], 0.5, 1, 1) == pytest.approx(1.0 + 0.5 + 1.5 + 2.5 + 0.5 + 2.0)


def test_an_order_that_waits_for_itself_is_an_error():
    with pytest.raises(ValueError, match="waits for itself"):
        play_on_cores([[("B", 0, 0), ("F", 0, 0)]], TIMES[:1], 0.0, 1, 1)
