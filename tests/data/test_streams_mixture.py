"""The order of several sources: shares, epochs, and equality on any number of ranks and after a resume."""

import itertools

import pytest

from meshwright.data import GlobalOrder, MixedOrder, ShardedSampler
from meshwright.errors import ConfigError, DataError


def _first(order, count):
    return list(itertools.islice(order, count))


def test_every_stretch_holds_the_sources_in_their_shares():
    order = MixedOrder([1000, 50, 7], [5, 3, 2], seed=3)
    found = _first(order, 5000)
    for start in range(0, 5000, 500):
        part = found[start : start + 500]
        counts = [sum(low <= each < high for each in part) for low, high in ((0, 1000), (1000, 1050), (1050, 1057))]
        assert counts == pytest.approx([250, 150, 100], abs=3)
    own = [each - 1000 for each in found if 1000 <= each < 1050]
    assert own == _first(GlobalOrder(50, 3), len(own))  # each epoch of a source sees all of it once
    assert order.counts(5000) == [sum(each < 1000 for each in found), len(own), sum(each >= 1050 for each in found)]
    assert order.epochs(5000)[2] == pytest.approx(1000 / 7, rel=0.01)


def test_a_resumed_order_goes_on_and_ranks_share_it():
    whole = _first(MixedOrder([9, 4], [1, 2], seed=0), 200)
    assert _first(MixedOrder([9, 4], [1, 2], seed=0, start=77), 123) == whole[77:]
    order = MixedOrder([9, 4], [1, 2], seed=0)
    assert order.samples(60, 30) == whole[60:90]
    parts = [_first(ShardedSampler(order, replica, 3), 20) for replica in range(3)]
    assert [each for round_ in zip(*parts, strict=True) for each in round_] == whole[:60]
    assert _first(MixedOrder([9, 4], [1, 2], seed=1), 200) != whole


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0], [1.0, -1.0], [1.0, float("inf")], [1.0, float("nan")]])
def test_shares_that_fit_no_sources(weights):
    with pytest.raises(ConfigError, match="shares of a mixture"):
        MixedOrder([3, 4], weights, seed=0)


def test_a_source_without_samples():
    with pytest.raises(DataError, match="no samples"):
        MixedOrder([3, 0], [1, 1], seed=0)
