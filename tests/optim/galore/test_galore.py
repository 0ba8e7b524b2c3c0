from itertools import pairwise

import pytest
import torch
from torch import nn

from meshwright.errors import ConfigError, ModelError, NonFiniteError
from meshwright.optim import (
    DistGaloreAdamW,
    DistGaloreAwamW,
    GaLoreAdamW,
    GaLoreAdamW8bit,
    get_galore_param_groups,
)
from tests.optim.galore.helpers import seeded


def model():
    return nn.Sequential(nn.Linear(40, 64), nn.LayerNorm(64), nn.Linear(64, 6), nn.Embedding(90, 40))


def stepped(optimizer, steps=1, seed=0):
    for step in range(steps):
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                parameter.grad = seeded(*parameter.shape, seed=seed + 100 * step + 10 * number + index)
        optimizer.step()
    return optimizer


def test_groups():
    made = get_galore_param_groups(model(), decay=0.02, rank=8, scale=0.5)
    assert [[tuple(p.shape) for p in group["params"]] for group in made] == [
        [(64, 40), (90, 40)],
        [(64,), (6, 64)],  # six rows are fewer than the rank
        [(64,), (64,), (6,)],
    ]
    assert [group["weight_decay"] for group in made] == [0.02, 0.02, 0.0]
    assert [group.get("rank") for group in made] == [8, None, None]
    assert made[0]["update_proj_gap"] == 200
    assert made[0]["scale"] == 0.5
    same = get_galore_param_groups(model(), weight_decay=0.02, rank=8, scale=0.5)
    assert [{**group, "params": 0} for group in same] == [{**group, "params": 0} for group in made]


def test_frozen_parameters_are_in_no_group():
    frozen = model()
    frozen[0].requires_grad_(False)
    made = get_galore_param_groups(frozen, 0.0, rank=8)
    assert sum(len(group["params"]) for group in made) == 5


@pytest.mark.parametrize("wrong", [{}, {"decay": 0.1, "weight_decay": 0.1}, {"decay": 0.1, "rank": 256}])
def test_groups_that_cannot_be(wrong):
    with pytest.raises(ConfigError):
        get_galore_param_groups(model(), **wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": 0},
        {"rank": 2.5},
        {"update_proj_gap": 0},
        {"scale": -1.0},
        {"proj_type": "both"},
        {"svd": "quick"},
        {"lr": -1.0},
        {"betas": (0.9, 1.0)},
    ],
)
def test_bad_hyperparameters(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        GaLoreAdamW([{"params": [nn.Parameter(torch.zeros(4, 5))], "rank": 2, **wrong}])


def test_parameters_that_cannot_be_projected_are_named():
    named = [("head.weight", nn.Parameter(torch.zeros(3, 50)))]
    with pytest.raises(ModelError, match=r"head\.weight.*smaller than the rank"):
        GaLoreAdamW([{"params": named, "rank": 4}])
    with pytest.raises(ModelError, match="number 1 of its group is no matrix"):
        GaLoreAdamW([{"params": [nn.Parameter(torch.zeros(5, 5)), nn.Parameter(torch.zeros(5))], "rank": 4}])


def test_projectors_change_with_the_gap_and_are_orthonormal():
    weight = nn.Parameter(seeded(8, 12))
    optimizer = GaLoreAdamW([{"params": [weight], "rank": 3, "update_proj_gap": 3}])
    projectors = []
    for step in range(7):
        weight.grad = seeded(8, 12, seed=step)
        optimizer.step()
        projectors.append(optimizer.state[weight]["projector"].clone())
    changed = [not torch.equal(one, other) for one, other in pairwise(projectors)]
    assert changed == [False, False, True, False, False, True]
    torch.testing.assert_close(projectors[-1].mT @ projectors[-1], torch.eye(3), rtol=0, atol=1e-5)


@pytest.mark.parametrize("svd", ["exact", "randomised"])
def test_a_decomposition_that_fails_leaves_the_old_projector(svd):
    weight = nn.Parameter(seeded(8, 12))
    optimizer = GaLoreAdamW([{"params": [weight], "rank": 3, "update_proj_gap": 1, "svd": svd}])
    weight.grad = torch.full_like(weight, torch.nan)
    before = weight.detach().clone()
    with pytest.raises(NonFiniteError, match=r"\(8, 12\)"):
        optimizer.step()
    assert torch.equal(weight, before)
    stepped(optimizer)  # the step can be repeated with gradients that can be used
    projector = optimizer.state[weight]["projector"].clone()
    assert projector.isfinite().all()
    weight.grad = torch.full_like(weight, torch.nan)
    optimizer.step()
    assert torch.equal(optimizer.state[weight]["projector"], projector)


def test_states_are_small():
    rows, cols, rank = 1024, 512, 128
    layer = nn.Linear(cols, rows, bias=False)
    numel = rows * cols
    for kind, expected in (
        (GaLoreAdamW, 4 * (2 * rows * rank + cols * rank) / numel),
        (GaLoreAdamW8bit, (2 * rows * rank * (1 + 4 / rank) + 4 * cols * rank) / numel),
    ):
        groups = get_galore_param_groups(layer, 0.0, rank=rank)
        groups[0]["svd"] = "randomised"
        (state,) = stepped(kind(groups)).state.values()
        held = sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor)) / numel
        assert held == pytest.approx(expected)
        assert held < 8 / 2.5  # AdamW holds 8 bytes


def test_eight_bits_train_nearly_as_fp32():
    def result(**options):
        torch.manual_seed(0)
        groups = get_galore_param_groups(model(), 0.0, rank=8, update_proj_gap=5)
        optimizer = stepped(GaLoreAdamW8bit(groups, lr=1e-2, min_8bit_size=64, **options), steps=20)
        return [parameter.detach() for group in optimizer.param_groups for parameter in group["params"]], optimizer

    torch.manual_seed(0)
    groups = get_galore_param_groups(model(), 0.0, rank=8)
    start = [parameter.detach() for group in groups for parameter in group["params"]]
    exact, _ = result(nbits=32)
    for options in ({}, {"block_wise": False}):
        rounded, optimizer = result(**options)
        assert any("exp_avg_codes" in state for state in optimizer.state.values())
        for one, other, begin in zip(rounded, exact, start, strict=True):
            difference = (one - other).norm() / (other - begin).norm()
            assert difference < 0.05
            assert (difference > 0) == (one.numel() >= 64)  # smaller states stay in fp32


def test_names_of_colossalai():
    groups = get_galore_param_groups(model(), decay=1e-2, rank=8)
    optimizer = DistGaloreAwamW(
        groups,
        lr=1e-3,
        betas=(0.9, 0.95),
        eps=1e-8,
        nbits=8,
        percentile_clipping=100,
        block_wise=True,
        min_8bit_size=64,
    )
    optimizer.setup_distributed(None, None, {}, padding_map={}, is_zero=False)
    assert isinstance(stepped(optimizer), DistGaloreAdamW)
    assert {group["nbits"] for group in optimizer.param_groups} == {8}
    copied = DistGaloreAdamW(get_galore_param_groups(model(), decay=1e-2, rank=8))
    copied.load_state_dict(optimizer.state_dict())
    stepped(copied, seed=5)


def test_bfloat16_parameters_follow_an_fp32_master():
    weight = nn.Parameter(seeded(8, 12).bfloat16())
    exact = nn.Parameter(weight.detach().float())
    for parameter in (weight, exact):
        optimizer = GaLoreAdamW([{"params": [parameter], "rank": 3, "update_proj_gap": 2}], lr=0.01)
        for step in range(5):
            parameter.grad = seeded(8, 12, seed=step).bfloat16().to(parameter.dtype)
            optimizer.step()
    torch.testing.assert_close(weight.detach(), exact.detach().bfloat16(), rtol=0, atol=0)
