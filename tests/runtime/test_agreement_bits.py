"""Bits that differ are found, and the ranks that hold them."""

import pytest
import torch
from hypothesis import given, strategies as st

from meshwright.runtime import bit_sum, bit_sums, difference_between_ranks, outvoted, rank

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn]


@given(st.sampled_from(DTYPES), st.integers(1, 700), st.integers(0, 9), st.data())
def test_any_flipped_bit_changes_the_sum(dtype, size, offset, data):
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, ((size + offset) * dtype.itemsize,), dtype=torch.uint8)
    tensor = bits.view(dtype)[offset:]
    before = bit_sum(tensor)
    flipped = bits.clone()
    place = data.draw(st.integers(offset * dtype.itemsize, len(bits) - 1))
    flipped[place] ^= 1 if dtype == torch.bool else 1 << data.draw(st.integers(0, 7))
    assert bit_sum(flipped.view(dtype)[offset:]) != before
    assert bit_sum(tensor.clone()) == before  # wherever it lies


def test_sums_of_what_floats_hide():
    zeros = torch.zeros(3)
    assert bit_sum(zeros) != bit_sum(-zeros)
    assert bit_sum(torch.full((2,), float("nan"))) == bit_sum(torch.full((2,), float("nan")))
    matrix = torch.arange(4096.0).view(64, 64)
    assert bit_sum(matrix) != bit_sum(matrix.flip(0))  # exchanged rows
    assert bit_sum(matrix.T) == bit_sum(matrix.T.contiguous())
    assert bit_sums([matrix, torch.zeros(0), torch.tensor(2.0)]).tolist()[1] == 0
    assert bit_sums([]).tolist() == []


def test_the_majority():
    assert outvoted({0: 7, 1: 7, 2: 9}) == ((2,), (0, 1))
    assert outvoted({1: 7, 4: 7}) == ((), (1, 4))
    assert outvoted({0: 7, 1: 9}) == ((0, 1), ())
    assert outvoted({0: 7, 1: 7, 2: 9, 3: 9}) == ((0, 1, 2, 3), ())


def _difference(changed):
    tensors = {"a": torch.ones(5), "b.weight": torch.zeros(3, 3), "c": torch.ones(2, dtype=torch.bfloat16)}
    for who, name in changed:
        if rank() == who:
            tensors[name].view(torch.uint8).flatten()[0] ^= 1
    found = difference_between_ranks(tensors)
    return None if found is None else (found.name, found.odd, str(found))


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ([], None),
        ([(2, "b.weight"), (2, "c")], ("b.weight", (2,), "b.weight and 1 more on rank 2, while ranks 0, 1, 3 hold")),
    ],
)
def test_a_rank_with_other_bits_is_named(ranks, changed, expected):
    for found in ranks(4).run(_difference, changed):
        assert (found and found[:2]) == (expected and expected[:2])
        assert found is None or found[2].startswith(expected[2])
