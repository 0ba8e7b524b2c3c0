"""pipeline_parallel against one plain process; see test_parity for the tolerances."""

import functools

import pytest

from tests.methods import pipeline_runs as runs
from tests.methods.test_parity import check_weights

TWO = ("parallel_mode", {"pipeline": 2})


@functools.cache
def reference(name):
    return runs.reference(name)


def check(results, name):
    losses, norms, before, expected = reference(name)
    weights = {}
    for own_losses, own_norms, own in results:
        assert own_losses == results[0][0]
        assert own_losses == pytest.approx(losses, rel=1e-4)
        assert own_norms == results[0][1]
        assert own_norms == pytest.approx(norms, rel=1e-5)
        for key, value in own.items():
            assert key not in weights or (weights[key] == value).all()
        weights |= own
    assert weights.keys() == expected.keys()
    check_weights(weights, before, expected)


@pytest.mark.parametrize(
    ("schedule", "name"),
    [("gpipe", "plain"), ("1f1b", "gpt2"), ("interleaved", "tied"), ("zbv", "llama"), ("dualpipev", "plain")],
)
def test_two_ranks(ranks, schedule, name):
    check(ranks(2).run(runs.train, name, [TWO, ("pipeline_parallel", {"schedule": schedule})]), name)


FOUR = [
    ("plain", [("parallel_mode", {"pipeline": 4}), ("pipeline_parallel", {"schedule": "1f1b"})]),
    ("gpt2", [("parallel_mode", {"pipeline": 2, "zero": 2}), "fsdp", ("pipeline_parallel", {"schedule": "zbv"})]),
    ("llama", [("parallel_mode", {"tensor": 2, "pipeline": 2}), "pipeline_parallel", "tensor_parallel"]),
    ("tied", [("parallel_mode", {"data": 2, "pipeline": 2}), ("pipeline_parallel", {"schedule": "gpipe"})]),
]


@pytest.mark.parametrize(("name", "strategy"), FOUR, ids=lambda case: case if isinstance(case, str) else "")
def test_four_ranks(ranks, name, strategy):
    check(ranks(4).run(runs.train, name, strategy), name)
