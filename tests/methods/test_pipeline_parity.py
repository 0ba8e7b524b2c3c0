"""pipeline_parallel against one plain process; see test_parity for the tolerances.

``--parity=all`` (``make parity``) trains every case; without it two ranks run every schedule once.
"""

import functools

import pytest

from tests.methods import pipeline_runs as runs
from tests.methods.test_parity import check_weights

TWO = ("parallel_mode", {"pipeline": 2})


def scheduled(schedule, **keys):
    return ("pipeline_parallel", {"schedule": schedule, **keys})


@functools.cache
def reference(name):
    return runs.reference(name)


def check(results, name):
    """Losses and norms are one process's and equal everywhere; together the ranks hold its weights, each name alike."""
    losses, norms, before, expected = reference(name)
    weights = {}
    for own_losses, own_norms, own in results:
        assert (own_losses, own_norms) == results[0][:2]
        for key, value in own.items():
            assert key not in weights or (weights[key] == value).all(), key
        weights |= own
    assert results[0][0] == pytest.approx(losses, rel=1e-4)
    assert results[0][1] == pytest.approx(norms, rel=1e-5)
    assert weights.keys() == expected.keys()
    check_weights(weights, before, expected)


def run(pool, cases):
    every = pool.run(runs.train_several, [(name, strategy) for name, strategy in cases])
    for index, (name, _) in enumerate(cases):
        check([result[index] for result in every], name)


def test_every_schedule_on_two_ranks(ranks):
    cases = [("plain", "gpipe"), ("gpt2", "1f1b"), ("plain", "interleaved"), ("llama", "zbv"), ("plain", "dualpipev")]
    run(ranks(2), [(name, [TWO, scheduled(schedule)]) for name, schedule in cases])


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
def test_a_split_backward_counts_weights_used_twice_once(ranks, schedule):
    """torch before 2.13 counts them more than once, and cannot pass by a hidden state that a stage does not use."""
    expected, before = runs.echoes(None)
    weights = {name: value for own, _ in ranks(2).run(runs.echoes, schedule) for name, value in own.items()}
    assert weights.keys() == expected.keys()
    check_weights(weights, before, expected)


FOUR = {
    "alone": ("plain", [("parallel_mode", {"pipeline": 4}), scheduled("1f1b")]),
    "fsdp": ("plain", [("parallel_mode", {"pipeline": 2, "zero": 2}), "fsdp", scheduled("zbv")]),
    "tensor": ("tied", [("parallel_mode", {"tensor": 2, "pipeline": 2}), "tensor_parallel", scheduled("1f1b")]),
    "tensor by data flow": (
        "plain", [("parallel_mode", {"tensor": 2, "pipeline": 2}), "tensor_parallel", scheduled("1f1b")],
    ),
}  # fmt: skip


@pytest.mark.long  # the parity matrix, too; tensor x pipeline trains and is stored in tests/parity
def test_other_axes_on_four_ranks(ranks):
    run(ranks(4), list(FOUR.values()))


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zbv", "dualpipev"])
@pytest.mark.parametrize("name", ["plain", "gpt2", "llama", "tied"])
def test_every_schedule_and_model(ranks, name, schedule):
    run(ranks(2), [(name, [TWO, scheduled(schedule)]), (name, [TWO, scheduled(schedule), "checkpoint"])])


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["1f1b", "dualpipev"])
@pytest.mark.parametrize("method", ["zero1", "zero2", "fsdp", "data"])
def test_every_way_to_shard_inside_stages(ranks, method, schedule):
    methods, axis = ([], "data") if method == "data" else ([method], "zero")
    run(ranks(4), [("gpt2", [*methods, ("parallel_mode", {"pipeline": 2, axis: 2}), scheduled(schedule)])])


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_four_stages(ranks, schedule):
    run(ranks(4), [(name, [("parallel_mode", {"pipeline": 4}), scheduled(schedule)]) for name in ("llama", "gpt2")])


@pytest.mark.long
def test_three_and_four_dimensions(ranks):
    order = [("tensor", 2), ("pipeline", 2), ("data", 2)]
    other = [("data", 2), ("pipeline", 2), ("tensor", 2)]
    cases = [
        ("llama", [("parallel_mode", (order, None)), "pipeline_parallel", "tensor_parallel"]),
        ("tied", [("parallel_mode", (other, None)), "fsdp", scheduled("zbv"), "tensor_parallel"]),
    ]
    run(ranks(8), cases)
