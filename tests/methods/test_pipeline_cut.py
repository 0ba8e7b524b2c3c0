"""Where models are cut, and what is known of schedules without running them."""

import itertools
import random

import pytest
import torch

from meshwright.methods import PipelineParallel
from meshwright.methods.pipeline.cut import balanced_bounds
from meshwright.methods.pipeline.schedules import SCHEDULES, bubble_fraction, live_peaks, stage_ranks
from meshwright.methods.pipeline.trace import trace_blocks
from tests import tiny


def test_the_dearest_stage_is_as_cheap_as_any_cut_makes_it():
    choice = random.Random(0)
    for _ in range(30):
        count, stages = choice.randint(3, 8), choice.randint(1, 3)
        costs = [choice.randint(1, 9) for _ in range(count)]
        head, tail = choice.randint(0, 9), choice.randint(0, 9)

        def dearest(bounds, costs=costs, head=head, tail=tail):
            sums = [sum(costs[first:end]) for first, end in itertools.pairwise(bounds)]
            return max(
                [sums[0] + head + (tail if len(sums) == 1 else 0), *sums[1:-1], *[s + tail for s in sums[1:][-1:]]]
            )

        every = [(0, *inner, count) for inner in itertools.combinations(range(1, count), stages - 1)]
        assert dearest(balanced_bounds(costs, stages, head, tail)) == min(map(dearest, every))


@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (4, 8), (4, 4)])
def test_schedules_keep_and_wait_as_their_papers_say(ranks, count):
    bubble = (ranks - 1) / (count + ranks - 1)  # Huang et al. 2019; Narayanan et al. 2019 has the same
    assert bubble_fraction("gpipe", ranks, 1, count) == pytest.approx(bubble)
    assert bubble_fraction("1f1b", ranks, 1, count) == pytest.approx(bubble)
    # Narayanan et al. 2021, §2.2: v stages on a rank divide the bubble by v.
    interleaved = (ranks - 1) / (2 * count + ranks - 1)
    assert bubble_fraction("interleaved", ranks, 2, count) == pytest.approx(interleaved)
    assert bubble_fraction("zbv", ranks, 2, count) < interleaved
    assert live_peaks("gpipe", ranks, 1, count, [1] * ranks) == (count,) * ranks
    assert live_peaks("1f1b", ranks, 1, count, [1] * ranks) == tuple(min(ranks - r, count) for r in range(ranks))
    assert max(live_peaks("zbv", ranks, 2, count, [1] * 2 * ranks)) <= 2 * ranks  # as 1f1b's first rank holds


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_stage_has_a_rank(schedule):
    per_rank = PipelineParallel.parse({"schedule": schedule}).stages_per_rank
    ranks = stage_ranks(schedule, 4, per_rank)
    assert [ranks.count(rank) for rank in range(4)] == [per_rank] * 4
    assert ranks[-1] == (0 if SCHEDULES[schedule].v_shaped else 3)


def cut(model, config, ranks=2):
    ids = torch.zeros(2, tiny.SEQ_LEN, dtype=torch.long)
    method = PipelineParallel.parse(config)
    forward = lambda m, x: tiny.loss_func(x, m(x))  # noqa: E731
    return method.cut(model, ranks, trace_blocks(model, method.blocks_of(model), ids, forward))


def test_tied_weights_are_trained_at_both_ends_and_nothing_is_held_in_between():
    torch.manual_seed(0)
    found = cut(tiny.plain(num_layers=8), None, ranks=4)
    places = {item.name: (item.trained_on, item.lent_to) for item in found.outside}
    assert places == {
        "token_embedding.weight": ((0, 3), ()),
        "position_embedding.weight": ((0,), ()),
        "norm.weight": ((3,), ()),
        "norm.bias": ((3,), ()),
    }
    assert found.boundary_bytes == 2 * tiny.SEQ_LEN * 20 * 4
    assert found.sizes[-1] <= min(found.sizes[:-1])  # the head is the last stage's work


def test_a_cut_by_hand_and_atorchs_words():
    assert cut(tiny.plain(num_layers=4), {"split": [1, 3]}).sizes == (1, 3)
    method = PipelineParallel.parse({"chunks": 4, "pipe_schedule": "Interleaved1F1B"})
    assert (method.num_micro_batches, method.schedule) == (4, "interleaved")
