"""Parameter groups are the caller's, whatever divides the model."""

import pytest
import torch

from tests.methods import group_runs as runs

BY_TENSOR = {"tensor": 2}, ["tensor_parallel"]
BY_BOTH = {"tensor": 2, "pipeline": 2}, ["tensor_parallel", "pipeline_parallel"]


@pytest.mark.parametrize(
    ("mesh", "methods"), [BY_TENSOR, pytest.param(*BY_BOTH, marks=pytest.mark.long)], ids=["tensor", "both"]
)
def test_every_group_has_its_own_rate(ranks, mesh, methods):
    """Fused kernels take plain parameters and shards apart; schedules must not find more groups, or fewer."""
    expected = runs.plain()
    for weights, count in ranks(2 ** len(mesh)).run(runs.with_rates, mesh, methods):
        assert count == 3
        for name, value in weights.items():
            assert torch.allclose(value, expected[name], atol=1e-5), name


def test_a_stage_without_parameters_that_train(ranks):
    losses = ranks(2).run(runs.frozen_stage)
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]
