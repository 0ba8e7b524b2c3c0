import dataclasses

import pytest
from benchmarks.schedule_bubble import bubble_fraction

from meshwright.cost import Stages, Step, fitted
from meshwright.cost.scheduling import StageTimes, order, pipeline_s, play
from meshwright.cost.step_time import played_s
from meshwright.methods.pipeline.schedules import actions, stage_ranks

EQUAL = StageTimes(1.0, 2.0)


@pytest.mark.parametrize(("schedule", "per_rank"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
@pytest.mark.parametrize("micro_batches", [4, 8])
def test_bubbles_are_those_of_the_engines_own_schedules(schedule, per_rank, micro_batches):
    ranks = 4
    times = [StageTimes(per_rank * 1.0, per_rank * 2.0)] * ranks
    seconds = pipeline_s(schedule, times, 0.0, per_rank, micro_batches)
    ours = 1 - 3.0 * per_rank * micro_batches / seconds
    assert ours == pytest.approx(bubble_fraction(schedule, ranks, per_rank, micro_batches))


def test_the_order_is_the_engines():
    own = order("1f1b", 4, 1, 6)
    kinds = [[kind for kind, _, _ in row] for row in own]
    assert kinds == [[kind for kind, _, _ in row] for row in actions("1f1b", 4, 1, 6)]


@pytest.mark.parametrize(
    ("ranks", "per_rank", "micro_batches"), [(4, 3, 5), (5, 2, 7), (4, 2, 2), (6, 2, 14), (8, 3, 20)]
)
def test_rounds_of_interleaved_stages_are_the_engines(ranks, per_rank, micro_batches):
    # Where ranks do not divide the micro-batches, a round has more of them than there are ranks.
    own = order("interleaved", ranks, per_rank, micro_batches)
    assert own == actions("interleaved", ranks, per_rank, micro_batches)
    ends = play(own, [EQUAL] * ranks, 0.1, per_rank)
    continued = pipeline_s("interleaved", [EQUAL] * ranks, 0.1, per_rank, micro_batches)
    assert continued == pytest.approx(max(end for _, _, end in ends), rel=0.02)


def test_many_micro_batches_are_continued_as_they_would_be_played():
    times = [StageTimes(1.0, 2.0), StageTimes(1.5, 2.5), StageTimes(1.0, 3.0)]
    for schedule in ("gpipe", "1f1b"):
        ends = play(order(schedule, 3, 1, 40), times, 0.1, 1)
        continued = pipeline_s(schedule, times, 0.1, 1, 40)
        assert continued == pytest.approx(max(end for _, _, end in ends), rel=0.02)


def test_one_rank_waits_for_nobody_and_hops_cost():
    assert pipeline_s("1f1b", [EQUAL], 1.0, 1, 5) == 15.0
    assert pipeline_s("1f1b", [EQUAL] * 2, 0.5, 1, 4) > pipeline_s("1f1b", [EQUAL] * 2, 0.0, 1, 4)


def test_split_backward_leaves_less_bubble():
    ranks = [EQUAL] * 4
    assert 24.0 <= pipeline_s("zbv", ranks, 0.0, 2, 8) < pipeline_s("interleaved", ranks, 0.0, 2, 8)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_split_backward_waits_as_in_the_engines_own_tables_however_few_micro_batches_there_are(ranks):
    for count in (1, 2, 3, ranks, 2 * ranks, 4 * ranks):
        whole = 3.0 * 2 * count / (1 - bubble_fraction("zbv", ranks, 2, count))
        assert pipeline_s("zbv", [StageTimes(2.0, 4.0)] * ranks, 0.0, 2, count) == pytest.approx(whole, rel=0.05)


def test_a_single_micro_batch_goes_through_all_ranks_whatever_they_share():
    known = dataclasses.replace(fitted(), constants=dataclasses.replace(fitted().constants, per_core=2.0))
    step = Step(
        blocks=(), axes=(("pipeline", 4),), num_micro_batches=1,
        stages=Stages((0, 1, 2, 3, 3, 2, 1, 0), tuple((stage, stage + 1) for stage in range(8)), 8, 0, schedule="zbv"),
    )  # fmt: skip
    # Each rank alone computes for half of this, and its forward and the gradients of its inputs are two thirds.
    assert played_s(step, [StageTimes(2.0, 4.0)] * 4, 0.0, known) == pytest.approx(4 * 2.0 + 1.0)


def test_an_order_that_waits_for_itself_is_an_error():
    with pytest.raises(ValueError, match="waits for itself"):
        play([[("B", 0, 0), ("F", 0, 0)]], [EQUAL], 0.0, 1)


@pytest.mark.parametrize("micro_batches", [4, 6, 16, 32])
@pytest.mark.parametrize(("inputs", "weights"), [(1.0, 1.0), (1.3, 0.7), (2.0, 1.0), (1.6, 0.4), (3.0, 0.0)])
def test_weights_of_any_duration_fill_what_inputs_leave(inputs, weights, micro_batches):
    ranks = 4
    times = [StageTimes(2.0, 2 * (inputs + weights), 2 * weights)] * ranks
    seconds = {"F": 1.0, "I": inputs, "W": weights, "B": inputs + weights}
    played = _played_in_parts(actions("zbv", ranks, 2, micro_batches), stage_ranks("zbv", ranks, 2), seconds)
    assert pipeline_s("zbv", times, 0.0, 2, micro_batches) == pytest.approx(played, rel=0.05)


def _played_in_parts(rows, ranks, seconds):
    """Play a table of actions with every kind's own seconds."""
    done, clock, position = {}, [0.0] * len(rows), [0] * len(rows)
    last = len(ranks) - 1
    while any(at < len(row) for at, row in zip(position, rows, strict=True)):
        for rank, row in enumerate(rows):
            while position[rank] < len(row):
                kind, stage, part = row[position[rank]]
                before = {"F": ("F", stage - 1), "W": ("I", stage)}.get(kind, ("I", stage + 1))
                if kind in "IB" and stage == last:
                    before = ("F", stage)
                ready = 0.0 if before[1] < 0 else done.get((*before, part))
                if ready is None:
                    break
                clock[rank] = max(clock[rank], ready) + seconds[kind]
                done["I" if kind == "B" else kind, stage, part] = clock[rank]
                position[rank] += 1
    return max(clock)
