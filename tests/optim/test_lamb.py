"""LAMB against the formulas of the paper and of ColossalAI in fp64. Its layouts: sharded/test_sharded_optimizer.py."""

import math

import pytest
import torch

from meshwright.errors import ConfigError, ModelError
from meshwright.optim import DistributedLamb, Lamb
from tests.optim.sharded.layouts import SHAPES, gradients, plain, start_values, trained

STEPS = 20


def reference(*, lr, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0, correction="paper", adam=False, per_matrix=False):
    """One device, fp64, parameter by parameter."""
    weights = {name: whole.double() for name, whole in start_values().items()}
    moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in weights.items()}
    beta1, beta2 = betas
    for step in range(1, STEPS + 1):
        for name, gradient in gradients(step).items():
            p, (m, v), g = weights[name], moments[name], gradient.double()
            m.mul_(beta1).add_(g, alpha=1 - beta1)
            v.mul_(beta2).add_(g * g, alpha=1 - beta2)
            fix1, fix2 = 1 - beta1**step, 1 - beta2**step
            rate = lr * math.sqrt(fix2) / fix1 if correction == "lr" else lr
            if correction != "paper":
                fix1 = fix2 = 1.0
            u = (m / fix1) / ((v / fix2).sqrt() + eps) + weight_decay * p
            dims = (-2, -1) if per_matrix and p.ndim > 2 else tuple(range(p.ndim))
            norms = [x.square().sum(dims, keepdim=True).sqrt() for x in (p, u)]
            ratio = torch.where((norms[0] > 0) & (norms[1] > 0), norms[0] / norms[1], 1.0)
            p -= rate * (1.0 if adam else ratio) * u
    return weights


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"weight_decay": 0.05}, {"weight_decay": 0.05}),
        ({"bias_correction": "lr", "eps": 1e-4}, {"correction": "lr", "eps": 1e-4}),
        ({"bias_correction": False, "betas": (0.8, 0.95)}, {"correction": "none", "betas": (0.8, 0.95)}),
        ({"adam": True, "weight_decay": 0.1}, {"adam": True, "weight_decay": 0.1}),
        ({"per_matrix": True}, {"per_matrix": True}),
    ],
    ids=str,
)
def test_formulas(options, told):
    result, _ = trained(lambda p: Lamb(list(p.values()), lr=3e-2, **options), plain, steps=STEPS)
    start, wanted = start_values(), reference(lr=3e-2, **told)
    for name in SHAPES:
        moved = wanted[name] - start[name]
        assert moved.norm() > 1e-3
        assert (result[name].double() - wanted[name]).norm() < 3e-6 * moved.norm(), name


def test_a_weight_of_zeros_moves():
    weight = torch.nn.Parameter(torch.zeros(3, 4))
    weight.grad = torch.ones(3, 4)
    optimizer = Lamb([weight], lr=0.1)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((3, 4), -0.1), rtol=1e-4, atol=0)
    weight.data.zero_()
    weight.grad = torch.zeros(3, 4)
    optimizer.state.clear()
    optimizer.step()
    assert (weight == 0).all()


def test_the_distributed_name_is_the_same():
    results = [
        trained(lambda p, kind=kind: kind(list(p.values()), lr=1e-2), plain)[0] for kind in (Lamb, DistributedLamb)
    ]
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())
    weights = [torch.nn.Parameter(torch.ones(2))]
    DistributedLamb(weights).setup_distributed(None, None, {}, padding_map=None, is_zero=True)
    (group,) = DistributedLamb(weights, 1e-3, (0.9, 0.99), 1e-5, 0.1, False, per_matrix=True).param_groups
    assert (group["weight_decay"], group["bias_correction"], group["adam"], group["per_matrix"]) == (
        0.1,
        False,
        False,
        True,
    )
    assert DistributedLamb(weights, adam=True).param_groups[0]["adam"]
    assert Lamb(weights, 1e-3, (0.9, 0.99), 1e-5, 0.1, True, False).param_groups[0]["adam"], "as in ColossalAI's Lamb"


@pytest.mark.parametrize(
    "options", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"betas": (0.9,)}, {"eps": float("nan")}, {"weight_decay": -0.1},
                {"bias_correction": "adam"}, {"half_update": "nearest"}]
)  # fmt: skip
def test_bad_numbers(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        Lamb([torch.nn.Parameter(torch.ones(2))], **options)


def test_parameters_of_other_types():
    with pytest.raises(ModelError, match="float64"):
        Lamb([torch.nn.Parameter(torch.ones(2, dtype=torch.float64))])


def test_weights_in_any_order_of_memory():
    start = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    weights = [torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.t().contiguous().t())]
    optimizer = Lamb(weights, lr=0.1, weight_decay=0.1)
    for step in range(3):
        gradient = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        weights[0].grad, weights[1].grad = gradient, gradient.clone()
        optimizer.step()
    assert weights[1].stride() == (1, 6)
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-6, atol=1e-7)
    assert (weights[0] - start).abs().max() > 0.05
