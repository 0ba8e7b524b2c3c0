"""Tables of pipeline schedules."""

import pytest

from meshwright.methods.pipeline.schedules import backward_moments, in_flight_peaks, steady_micro_batches


def at_once(name, ranks, micro_batches):
    rows = backward_moments(name, ranks, 2, micro_batches)
    return [{(now.stage, now.held, now.accumulated, now.part) for now in row} for row in rows]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", ["interleaved", "zbv", "dualpipev"])
def test_a_few_micro_batches_show_what_many_hold(name, ranks):
    few, many = steady_micro_batches(name, ranks), 6 * ranks
    assert at_once(name, ranks, few) == at_once(name, ranks, many)
    assert in_flight_peaks(name, ranks, 2, few) == in_flight_peaks(name, ranks, 2, many)
    # One less ends before gradients of all stages are there beside as many activations.
    assert at_once(name, ranks, 2 * ranks) != at_once(name, ranks, many)
