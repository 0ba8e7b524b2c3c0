"""Bits that differ are found, and the ranks that hold them."""

import contextlib
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st

from meshwright.runtime import (
    agreement,
    all_equal,
    bit_sum,
    bit_sums,
    broadcast_object,
    check_all_equal,
    difference_between_ranks,
    outvoted,
    rank,
    same_on_every_rank,
    smallest,
)
from meshwright.runtime.agreement import sampled

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


def _gathers(function):
    """Return how many collectives of each kind a call of ours makes."""
    counts = Counter()
    with contextlib.ExitStack() as stack:
        for name in ("all_reduce", "all_gather", "all_gather_object", "broadcast_object_list", "isend"):
            real = getattr(dist, name)

            def counted(*args, real=real, name=name, **keys):
                counts[name] += 1
                return real(*args, **keys)

            stack.enter_context(mock.patch.object(dist, name, counted))
        function()
    return dict(counts)


def _fail(on):
    with contextlib.suppress(ValueError), same_on_every_rank():
        if rank() == on:
            raise ValueError("here")


def _costs():
    return {
        "equal": _gathers(lambda: check_all_equal(("a", "1", ""), ("b", "2", ""))),
        "weights": _gathers(lambda: difference_between_ranks({"a": torch.ones(5), "b": torch.zeros(3, 3)})),
        "well": _gathers(lambda: _fail(None)),
        "failed": _gathers(lambda: _fail(1)),
        "smallest": smallest([rank(), -rank(), 2**62 + rank()]),
        "rank 0's": broadcast_object({"from": rank()}),
        "alike": [all_equal(b"same"), all_equal(b"same" if rank() else b"other"), all_equal(bytes(rank()))],
    }


def test_agreement_costs_a_logarithmic_number_of_messages(ranks):
    for found in ranks(4).run(_costs):
        assert found["equal"] == found["weights"] == found["well"] == {"isend": 2}
        assert found["failed"] == {"isend": 2, "broadcast_object_list": 1}
        assert found["smallest"] == [0, -3, 2**62]
        assert found["rank 0's"] == {"from": 0}
        assert found["alike"] == [True, False, False]


# --- Samples of large tensors.

PERIOD_BYTES = 61 * 61 * 64


@given(st.integers(1, 3 * PERIOD_BYTES), st.integers(0, 9), st.data())
def test_samples_find_any_4_kib_that_differ(size, offset, data):
    size += 4096
    before = torch.zeros(size + offset, dtype=torch.uint8)
    begin = data.draw(st.integers(offset, size + offset - 4096))
    changed = before.clone()
    changed[begin : begin + 4096] = 1
    assert not torch.equal(sampled(changed[offset:]), sampled(before[offset:]))


@pytest.mark.parametrize("columns", [64, 976, 1024, 3904, 16384])
@pytest.mark.parametrize("place", [0, 17, 63])
def test_samples_find_columns_that_differ(columns, place):
    matrix = torch.zeros(2**23 // columns, columns)
    other = matrix.clone()
    other[:, columns * place // 64 : columns * place // 64 + 16] = 1
    assert not torch.equal(sampled(other), sampled(matrix))


def test_samples_are_few():
    tensor = torch.rand(2**21, dtype=torch.float64)
    assert sampled(tensor).nbytes < tensor.nbytes / 61 + PERIOD_BYTES
    assert torch.equal(sampled(tensor.to(torch.bool)), sampled(torch.ones(2**21, dtype=torch.bool)))


def _partly_loaded(changed):
    """A large tensor of which rank 1 has loaded only a part: the last rows are as they were drawn."""
    table = torch.ones(1000, 2000)
    if rank() == 1:
        table[changed] = 0.5
    with mock.patch.object(agreement, "_COMPARED_WHOLE_BYTES", 2**20):
        found = difference_between_ranks({"small": torch.ones(3), "table": table})
    return found and found.name


@pytest.mark.parametrize("changed", [slice(900, None), slice(998, None), slice(400, 401), slice(0, 1)])
def test_a_large_tensor_that_is_loaded_in_part_is_found(ranks, changed):
    assert ranks(2).run(_partly_loaded, changed) == ["table"] * 2
    assert ranks(2).run(_partly_loaded, slice(0)) == [None] * 2
