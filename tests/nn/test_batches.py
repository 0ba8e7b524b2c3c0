import collections
import dataclasses
import itertools

import pytest
import torch

from meshwright.errors import ConfigError, DataError, ModelError
from meshwright.nn.batches import (
    batch_size_of,
    call_loss,
    call_model,
    equal_micro_batches,
    equal_parts,
    first_loss,
    micro_batches,
    resized,
    shares_of,
    to_device,
)

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


@dataclasses.dataclass
class Settings:
    """Without tensors."""

    rate: float = 0.5


@dataclasses.dataclass(frozen=True)
class Samples:
    """A batch as some collate functions return it."""

    x: torch.Tensor
    names: list
    settings: Settings


def test_lists_of_the_batchs_length_are_cut_like_tensors():
    first, second = micro_batches(batch(4), 2)
    assert (first["names"], second["names"]) == (["n0", "n1"], ["n2", "n3"])
    assert second["boxes"] == ([[2, 2]], [[3, 3, 3]])
    assert second["marks"] == [{"label": 2}, {"label": 3}]
    assert second["nested"][0].tolist() == [20, 30]
    assert second["nested"][1] == {"ids": ["i2", "i3"]}
    for part in (first, second):
        assert (part["classes"], part["scale"].item(), part["kind"]) == (["cat", "dog", "bird"], 2.0, "train")


def test_a_batch_that_does_not_divide_gives_parts_that_differ_by_one_sample():
    given = {"x": torch.arange(7), "names": [f"n{index}" for index in range(7)], "kind": "train"}
    parts = micro_batches(given, 3)
    assert [part["x"].tolist() for part in parts] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [part["names"] for part in parts] == [["n0", "n1", "n2"], ["n3", "n4"], ["n5", "n6"]]
    assert shares_of(parts) == [7 / 3, 7 / 2, 7 / 2]
    assert shares_of(micro_batches({"x": torch.arange(6)}, 3)) == [3.0] * 3
    assert [part.tolist() for part in micro_batches(torch.arange(2), 4)] == [[0], [1]]
    assert len(micro_batches(torch.zeros(0, 3), 2)) == 2


@pytest.mark.parametrize(
    ("size", "count", "ranks", "singly", "parts"),
    [
        (8, 4, 2, False, [2, 2, 2, 2]),
        (6, 4, 2, False, [1] * 6),
        (6, 4, 8, False, [2, 2, 2, 0]),
        (5, 4, 2, False, [1, 1, 1, 1, 1, 0]),
        (7, 6, 4, False, [1] * 7 + [0]),
        (3, 8, 2, False, [1] * 3 + [0] * 5),
        (3, 1, 4, False, [3]),
        (4, 2, 2, True, [1, 1, 1, 1]),
        (3, 1, 2, True, [1, 1, 1, 0]),
    ],
)
def test_parts_of_a_pipeline_have_equally_many_samples(size, count, ranks, singly, parts):
    made, real = equal_micro_batches(torch.arange(size), count, ranks, singly=singly)
    assert torch.equal(torch.cat(made[:real]), torch.arange(size))
    assert [len(part) if index < real else 0 for index, part in enumerate(made)] == parts
    assert all(torch.equal(part, made[real - 1]) for part in made[real:])


def test_a_batch_is_cut_alike_by_the_number_of_parts_that_it_was_cut_into():
    # A plan says what is run, and a job is told the plan's number.
    cuts = itertools.product(range(1, 40), range(1, 20), (2, 3, 4))
    for size, count, ranks in cuts:
        cut = equal_parts(size, count, ranks)
        assert cut.rows * cut.distinct == size
        assert cut.distinct <= cut.total >= count
        assert equal_parts(size, cut.total, ranks) == cut


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


class Moving:
    def to(self, device):
        return f"moved to {device}"


def test_everything_in_a_batch_goes_to_the_device():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    given = {
        "encoding": collections.UserDict(ids=torch.ones(2), nested=[torch.ones(1)], name="n"),
        "own": Moving(),
        "packed": packed,
        "kind": Moving,
    }
    there = to_device(given, torch.device("meta"))
    assert there["encoding"]["ids"].is_meta
    assert there["encoding"]["nested"][0].is_meta
    assert there["encoding"]["name"] == "n"
    assert not given["encoding"]["ids"].is_meta
    assert (there["own"], there["kind"]) == ("moved to meta", Moving)
    assert there["packed"].data.is_meta
    assert not there["packed"].batch_sizes.is_meta  # torch keeps it on the host


def test_mappings_of_other_classes_are_cut_as_dictionaries_are():
    given = collections.UserDict(ids=torch.arange(4), names=["a", "b", "c", "d"])
    assert batch_size_of(given) == 4
    first, second = micro_batches(given, 2)
    assert (type(second), second["ids"].tolist(), second["names"]) == (collections.UserDict, [2, 3], ["c", "d"])
    assert first["names"] == ["a", "b"]
    assert resized(given, 5)["ids"].tolist() == [0, 1, 2, 3, 0]


def test_dataclasses_are_cut_as_dictionaries_are():
    batch = Samples(torch.arange(4), ["a", "b", "c", "d"], Settings())
    parts = micro_batches(batch, 2)
    assert [part.x.tolist() for part in parts] == [[0, 1], [2, 3]]
    assert [part.names for part in parts] == [["a", "b"], ["c", "d"]]
    assert parts[0].settings is batch.settings
    assert batch_size_of(batch) == 4
    assert to_device(batch, torch.device("meta")).x.is_meta


def test_a_misunderstood_call_is_told_below_the_error():
    model = torch.nn.Linear(2, 1)
    pair = [torch.ones(3, 2), torch.ones(3, 1)]
    with pytest.raises(TypeError) as caught:
        call_model(model, pair, None)
    assert "'unpack_sequence' calls model(*batch)" in caught.value.__notes__[0]
    for loss, given in ((torch.nn.MSELoss(), pair), (torch.nn.CrossEntropyLoss(), torch.ones(3, 2, dtype=torch.long))):
        with pytest.raises((AttributeError, RuntimeError)) as caught:
            call_loss(loss, given, torch.ones(3, 1))
        assert "loss_func(model_input, model_output)" in caught.value.__notes__[0]


@pytest.mark.parametrize("loss", [torch.nn.MSELoss(), torch.nn.functional.l1_loss])
def test_a_distance_is_taken_between_equal_shapes_alone(loss):
    assert call_loss(loss, torch.ones(3, 2), torch.zeros(3, 2)) == 1
    with pytest.raises(ConfigError, match=r"whole input.*input of shape \(3, 2\) and an output of shape \(3, 1\)"):
        call_loss(loss, torch.ones(3, 2), torch.zeros(3, 1))  # torch would broadcast them


def test_a_loss_without_a_graph_is_refused_where_it_is_to_train():
    assert first_loss(torch.ones(())) == 1
    with pytest.raises(ModelError, match="does not depend on anything that trains"):
        first_loss(torch.ones(()), trains=True)
