import collections

import pytest
import torch

from meshwright.batches import micro_batches, resized
from meshwright.errors import DataError

Pair = collections.namedtuple("Pair", "left right")


def batch(size):
    return {
        "x": torch.arange(size),
        "names": [f"n{number}" for number in range(size)],
        "boxes": tuple([[number] * number] for number in range(size)),
        "marks": [{"label": number} for number in range(size)],
        "classes": ["cat", "dog", "bird"],
        "scale": torch.tensor(2.0),
        "kind": "train",
        "nested": [torch.arange(size) * 10, {"ids": [f"i{number}" for number in range(size)]}],
    }


def test_lists_of_the_batchs_length_are_cut_like_tensors():
    first, second = micro_batches(batch(4), 2)
    assert (first["names"], second["names"]) == (["n0", "n1"], ["n2", "n3"])
    assert second["boxes"] == ([[2, 2]], [[3, 3, 3]])
    assert second["marks"] == [{"label": 2}, {"label": 3}]
    assert second["nested"][0].tolist() == [20, 30]
    assert second["nested"][1] == {"ids": ["i2", "i3"]}
    for part in (first, second):
        assert (part["classes"], part["scale"].item(), part["kind"]) == (["cat", "dog", "bird"], 2.0, "train")


def test_structures_and_views_stay():
    x, y = torch.arange(2.0), torch.arange(2.0)
    given = [(x, y), Pair("a", "b"), Pair(x, y), torch.Size([3, 4]), (None, None)]
    first, second = micro_batches(given, 2)
    assert [len(part) for part in (first, first[0], second[2])] == [5, 2, 2]
    assert first[1] == Pair("a", "b")
    assert second[3:] == [(3, 4), (None, None)]
    assert second[0][1].data_ptr() == y[1:].data_ptr()
    assert micro_batches(given, 1) == [given]


@pytest.mark.parametrize("given", [(224, 224), [3, 5], [True, False]])
def test_numbers_that_may_belong_to_samples_or_not_are_refused(given):
    with pytest.raises(DataError, match="make a tensor of them"):
        micro_batches({"x": torch.zeros(2, 3), "given": given}, 2)
    assert micro_batches({"x": torch.zeros(4, 3), "given": given}, 2)[1]["given"] == given
    assert resized({"x": torch.zeros(2, 3), "given": given}, 5)["given"] == given


def test_resizing_repeats_what_belongs_to_samples():
    found = resized(batch(2), 5)
    assert found["x"].tolist() == [0, 1, 0, 1, 0]
    assert found["names"] == ["n0", "n1", "n0", "n1", "n0"]
    assert resized(batch(4), 2)["names"] == ["n0", "n1"]
