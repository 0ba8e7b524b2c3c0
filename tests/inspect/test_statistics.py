import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from meshwright.inspect import statistics as room
from meshwright.inspect.statistics import merge, moments, nothing, statistics

NUMBERS = st.floats(-(2.0**40), 2.0**40, width=32)


def whole(values):
    """max, min, std, mean by numpy in fp64."""
    return values.max(), values.min(), values.std(ddof=1) if values.size > 1 else 0.0, values.mean()


@given(st.lists(st.lists(NUMBERS, max_size=9), min_size=1, max_size=6).filter(any))
def test_merged_parts_are_as_the_whole(parts):
    values = np.array([number for part in parts for number in part])
    rows = moments([torch.tensor(part, dtype=torch.float32) for part in parts])
    found, expected = statistics(merge(rows)), whole(values)
    scale = np.abs(values).max()
    assert found[:2] == expected[:2]
    assert found[2:] == pytest.approx(expected[2:], rel=1e-9, abs=1e-12 * scale)
    torch.testing.assert_close(merge(torch.cat([rows, nothing()[None]])), merge(rows), rtol=0, atol=0)


@given(st.lists(NUMBERS, min_size=3, max_size=9), st.integers(1, 2))
def test_the_order_of_merging_does_not_matter(values, cut):
    rows = moments([torch.tensor([value]) for value in values])
    at_once = merge(rows)
    in_turn = merge(torch.stack([merge(rows[:cut]), merge(rows[cut:])]))
    scale = max(abs(value) for value in values)
    assert statistics(in_turn) == pytest.approx(statistics(at_once), rel=1e-9, abs=1e-9 * scale)


def test_a_small_spread_beside_a_large_mean_is_kept():
    values = 4096.0 + torch.arange(1000, dtype=torch.float32) / 1024
    parts = moments(list(values.split(7)))
    std = values.double().std().item()
    assert statistics(merge(parts))[2] == pytest.approx(std, rel=1e-9)
    assert statistics(moments([values])[0])[2] == pytest.approx(std, rel=1e-9)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]
)
def test_every_type_and_layout_in_chunks(monkeypatch, dtype):
    monkeypatch.setattr(room, "_CHUNK_ELEMENTS", {"cpu": 7})
    values = (torch.randn(6, 5, generator=torch.Generator().manual_seed(0)) * 3).to(dtype).t()[1:]
    found = statistics(moments([values])[0])
    assert found == pytest.approx(whole(values.double().numpy()), rel=1e-12)


def test_one_element_none_and_those_that_are_no_numbers():
    one, none, scalar, nan, infinite = moments(
        [torch.tensor([2.5]), torch.empty(0, 3), torch.tensor(-1.0), torch.tensor([1.0, math.nan, 2.0]),
         torch.tensor([1.0, math.inf])]
    )  # fmt: skip
    assert statistics(one) == (2.5, 2.5, 0.0, 2.5)
    assert statistics(scalar) == (-1.0, -1.0, 0.0, -1.0)
    assert all(math.isnan(value) for value in statistics(none))
    assert all(math.isnan(value) for value in statistics(nan))
    high, low, std, mean = statistics(merge(torch.stack([infinite, one, none])))
    assert (high, low, mean) == (math.inf, 1.0, math.inf)
    assert math.isnan(std)  # as torch.std has it
