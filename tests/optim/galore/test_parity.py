"""Numbers of galore_torch on one process."""

import warnings

import galore_torch
import pytest
import torch

from meshwright.optim.galore import GaLoreAdafactor, GaLoreAdamW
from meshwright.optim.galore_projection import ProjectorForm, leading_vectors
from tests.optim.galore.helpers import seeded
from tests.optim.sharded.layouts import relative_differences

SHAPES = {"wide": (12, 20), "tall": (33, 16), "square": (9, 9)}
STEPS = 20


def trained(kind, projection, gradient_seed=10, size=0.3, **options):
    weights = {name: torch.nn.Parameter(seeded(*shape) * size) for name, shape in SHAPES.items()}
    bias = torch.nn.Parameter(seeded(9))
    start = {name: weight.detach().clone() for name, weight in {**weights, "bias": bias}.items()}
    group = {"params": [*weights.values()], "rank": 4, "scale": 0.5, **projection}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = kind([group, {"params": [bias]}], **{"lr": 0.05, "eps": 1e-4, "weight_decay": 0.1, **options})
    for step in range(STEPS):
        for index, parameter in enumerate([*weights.values(), bias]):
            parameter.grad = seeded(*parameter.shape, seed=gradient_seed + 100 * step + index)
        optimizer.step()
    result = {name: weight.detach() for name, weight in {**weights, "bias": bias}.items()}
    return result, start, optimizer


@pytest.mark.parametrize("proj_type", ["std", "reverse_std", "right", "left", "full"])
@pytest.mark.parametrize(("gap", "correct_bias"), [(1, True), (7, False), (200, True)])
def test_twenty_steps(proj_type, gap, correct_bias):
    projection = {"proj_type": proj_type, "update_proj_gap": gap}
    expected, start, _ = trained(galore_torch.GaLoreAdamW, projection, correct_bias=correct_bias)
    result, _, _ = trained(GaLoreAdamW, projection, correct_bias=correct_bias)
    differences = relative_differences(result, expected, start)
    assert max(differences.values()) < 1e-5, differences


@pytest.mark.parametrize("proj_type", ["std", "reverse_std", "full"])
@pytest.mark.parametrize(
    "options", [{}, {"beta1": 0.9}, {"lr": 0.05, "relative_step": False}, {"warmup_init": True, "weight_decay": 0.0}]
)
def test_twenty_steps_of_adafactor(proj_type, options):
    projection, options = {"proj_type": proj_type, "update_proj_gap": 7}, {"lr": None, "eps": (1e-30, 1e-3), **options}
    if options["lr"] is None:  # steps of 1e-6 of a weight: only beside small weights more than these are rounded by
        options["size"] = 1e-8
    expected, start, _ = trained(galore_torch.GaLoreAdafactor, projection, **options)
    result, _, _ = trained(GaLoreAdafactor, projection, **options)
    differences = relative_differences(result, expected, start)
    assert max(differences.values()) < 1e-5, differences


def test_randomised_vectors_span_nearly_the_same_space():
    """On gradients with decaying singular values, which is what GaLore is for."""
    left, _, right = torch.linalg.svd(seeded(60, 40), full_matrices=False)
    matrix = left * 0.7 ** torch.arange(40) @ right
    for dim, exact in ((-2, left[:, :5]), (-1, right[:5].mT)):
        vectors = leading_vectors(matrix, ProjectorForm(5, dim), "randomised", seed=1)
        torch.testing.assert_close(vectors.mT @ vectors, torch.eye(5), rtol=0, atol=1e-5)
        torch.testing.assert_close(vectors @ vectors.mT, exact @ exact.mT, rtol=0, atol=1e-4)
        again = leading_vectors(matrix, ProjectorForm(5, dim), "randomised", seed=1)
        assert torch.equal(vectors, again)
        assert not torch.equal(vectors, leading_vectors(matrix, ProjectorForm(5, dim), "randomised", seed=2))
