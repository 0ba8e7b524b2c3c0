"""Tables of pipeline schedules."""

import pytest

from meshwright.methods.pipeline.schedules import (
    answered,
    backward_moments,
    in_flight_peaks,
    listed,
    stage_ranks,
    steady_micro_batches,
)


def at_once(name, ranks, micro_batches):
    rows = backward_moments(name, ranks, 2, micro_batches)
    return [{(now.stage, now.held, now.accumulated, now.part, now.sent) for now in row} for row in rows]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", ["interleaved", "zbv", "dualpipev"])
def test_a_few_micro_batches_show_what_many_hold(name, ranks):
    few, many = steady_micro_batches(name, ranks), 6 * ranks
    assert at_once(name, ranks, few) == at_once(name, ranks, many)
    assert in_flight_peaks(name, ranks, 2, few) == in_flight_peaks(name, ranks, 2, many)
    # One less ends before gradients of all stages are there beside as many activations.
    assert at_once(name, ranks, 2 * ranks) != at_once(name, ranks, many)


# What two ranks with two stages each do with one micro-batch.
ROWS = [
    ["0F0", "0SEND_F0", "2RECV_F0", "2F0", "2SEND_F0", "2RECV_B0", "2B0", "2SEND_B0", "0RECV_B0", "0B0"],
    ["1RECV_F0", "1F0", "1SEND_F0", "3RECV_F0", "3F0", "3B0", "3SEND_B0", "1RECV_B0", "1B0", "1SEND_B0"],
]


def test_an_answer_shows_what_has_arrived():
    first, second = answered(listed(ROWS), stage_ranks("interleaved", 2, 2))
    assert first == {("F", 2, 0): [("F", 0, 0)], ("B", 2, 0): [("F", 2, 0)], ("B", 0, 0): [("B", 2, 0)]}
    assert second == {("F", 3, 0): [("F", 1, 0)], ("B", 1, 0): [("B", 3, 0)]}


def test_a_stage_keeps_few_of_the_gradients_that_it_has_sent():
    for name in ("interleaved", "zbv", "dualpipev"):
        few, many = ([max(sum(now.sent) for now in row) for row in backward_moments(name, 4, 2, n)] for n in (12, 48))
        assert few == many
        assert max(many) < 3 * 4
