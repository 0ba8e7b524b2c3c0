"""ColossalAI's names, classes and modules, lead to ours, with its arguments and its numbers."""

import importlib

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from meshwright import optim
from meshwright.compat.colossalai import Booster, HybridParallelPlugin
from meshwright.errors import ConfigError
from meshwright.nn import optimizer as colossalai
from tests import tiny
from tests.optim.sharded.layouts import (
    SHAPES,
    gradients,
    layouts_of,
    plain,
    relative_differences,
    start_values,
    trained,
)

MODULES = {
    "distributed_lamb": ["DistributedLamb"],
    "distributed_adafactor": ["DistributedAdaFactor"],
    "distributed_came": ["DistributedCAME"],
    "distributed_galore": ["DistGaloreAwamW", "DistributedGalore"],
    "lamb": ["Lamb"],
    "adafactor": ["Adafactor"],
    "came": ["CAME"],
    "galore": ["GaLoreAdamW8bit", "GaLoreAdamW", "GaLoreAdafactor", "GaLoreProjector", "get_galore_param_groups"],
    "cpu_adam": ["CPUAdam"],
    "hybrid_adam": ["HybridAdam"],
    "fused_adam": ["FusedAdam"],
    "fused_lamb": ["FusedLAMB"],
    "fused_sgd": ["FusedSGD"],
    "lars": ["Lars"],
}


@pytest.mark.parametrize("module", MODULES)
def test_modules(module):
    found = importlib.import_module(f"meshwright.nn.optimizer.{module}")
    assert set(found.__all__) == set(MODULES[module])
    for name in MODULES[module]:
        assert getattr(found, name) is getattr(colossalai, name)
        assert getattr(optim, name, getattr(found, name)) is getattr(found, name)


def test_casting_keeps_the_optimizer():
    optimizer = optim.CAME([torch.nn.Parameter(torch.ones(2, 2))], lr=0.1)
    assert optim.cast_to_distributed(optimizer) is optimizer


PAIRS = {
    "hybrid": (lambda p: colossalai.HybridAdam(p, 1e-2), lambda p: AdamW(p, 1e-2, weight_decay=0.0)),
    "cpu": (
        lambda p: colossalai.CPUAdam(p, lr=1e-2, weight_decay=0.1, adamw_mode=False),
        lambda p: Adam(p, 1e-2, weight_decay=0.1),
    ),
    "fused": (
        lambda p: colossalai.FusedAdam(p, 1e-2, True, (0.8, 0.99), 1e-6, True, 0.2),
        lambda p: AdamW(p, 1e-2, (0.8, 0.99), 1e-6, weight_decay=0.2),
    ),
    "sgd": (
        lambda p: colossalai.FusedSGD(p, 0.1, 0.9, 0.0, 0.01, True),
        lambda p: SGD(p, 0.1, 0.9, 0.0, 0.01, True),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_adam_and_sgd_are_those_of_torch(name):
    results = [trained(lambda p, build=build: build(list(p.values())), plain)[0] for build in PAIRS[name]]
    assert all(torch.equal(value, results[1][key]) for key, value in results[0].items())


REFUSED = {
    "bias_correction": lambda p: colossalai.HybridAdam(p, bias_correction=False),
    "amsgrad": lambda p: colossalai.FusedAdam(p, amsgrad=True),
    "nvme_offload_fraction": lambda p: colossalai.CPUAdam(p, nvme_offload_fraction=0.5),
    "wd_after_momentum": lambda p: colossalai.FusedSGD(p, 0.1, wd_after_momentum=True),
    "adam_w_mode": lambda p: colossalai.FusedLAMB(p, adam_w_mode=False),
    "grad_averaging": lambda p: colossalai.FusedLAMB(p, grad_averaging=False),
    "eeta": lambda p: colossalai.Lars(p, eeta=2.0),
}


@pytest.mark.parametrize("argument", REFUSED)
def test_arguments_that_change_the_result_are_refused_by_name(argument):
    with pytest.raises(ConfigError, match=argument):
        REFUSED[argument]([nn.Parameter(torch.ones(2, 2))])


def formulas_of_lars(lr, momentum, eeta, decay, epsilon=0.0, steps=20):
    weights, moving = {name: value.double() for name, value in start_values().items()}, {}
    for step in range(1, 1 + steps):
        for name, gradient in gradients(step).items():
            weight, gradient = weights[name], gradient.double()
            ratio = eeta * weight.norm() / (gradient.norm() + decay * weight.norm() + epsilon)
            update = (gradient + decay * weight).clamp(-10, 10)
            moving[name] = momentum * moving[name] + update if name in moving else update
            weights[name] = weight - lr * min(float(ratio), 50.0) * moving[name]
    return weights


@pytest.mark.parametrize("numbers", [(0.5, 0.9, 0.1, 0.05), (0.3, 0.0, 1.0, 0.0, 0.1)])
def test_lars_follows_its_paper(numbers):
    lr, momentum, eeta, decay, *epsilon = numbers
    found, _ = trained(lambda p: colossalai.Lars(p.values(), lr, momentum, eeta, decay, *epsilon), plain)
    start, expected = start_values(), formulas_of_lars(*numbers)
    for name in SHAPES:
        moved = (expected[name] - start[name]).norm()
        assert (found[name] - expected[name]).norm() < 1e-5 * moved, name


def test_lars_with_weights_or_gradients_of_zero_takes_plain_steps():
    weight = nn.Parameter(torch.zeros(3))
    optimizer = colossalai.Lars([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.tensor([1.0, 2.0, 30.0])
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.1, -0.2, -1.0]))  # the last gradient is clamped to 10


def formulas_of_lamb(lr, decays, max_norm, nvlamb, steps=20):
    betas, eps = (0.9, 0.999), 1e-6
    weights, moments = {name: value.double() for name, value in start_values().items()}, {}
    for step in range(1, 1 + steps):
        wholes = {name: value.double() for name, value in gradients(step).items()}
        norm = float(torch.cat([value.flatten() for value in wholes.values()]).norm())
        for name, gradient in wholes.items():
            gradient = gradient / max(1.0, norm / max_norm)
            first, second = moments.get(name, (0.0, 0.0))
            first = betas[0] * first + (1 - betas[0]) * gradient
            second = betas[1] * second + (1 - betas[1]) * gradient**2
            moments[name] = first, second
            update = first / (1 - betas[0] ** step) / ((second / (1 - betas[1] ** step)).sqrt() + eps)
            update = update + decays[name] * weights[name]
            ratio = weights[name].norm() / update.norm() if decays[name] or nvlamb else 1.0
            weights[name] = weights[name] - lr * ratio * update
    return weights


def fused_lamb(parameters, nvlamb=False):
    matrices = [value for value in parameters.values() if value.ndim > 1]
    vectors = [value for value in parameters.values() if value.ndim == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return colossalai.FusedLAMB([group for group in groups if group["params"]], lr=1e-2, use_nvlamb=nvlamb)


@pytest.mark.parametrize("nvlamb", [False, True])
def test_fused_lamb_clips_and_leaves_groups_without_decay_to_adam(nvlamb):
    found, _ = trained(lambda p: fused_lamb(p, nvlamb), plain)
    start = start_values()
    decays = {name: 0.01 if len(shape) > 1 else 0.0 for name, shape in SHAPES.items()}
    expected = formulas_of_lamb(1e-2, decays, 1.0, nvlamb)
    for name in SHAPES:
        moved = (expected[name] - start[name]).norm()
        assert (found[name] - expected[name]).norm() < 2e-5 * moved, name


BUILD = {
    "lars": lambda p: colossalai.Lars(p.values(), 0.5, 0.9, 0.1, 0.05),
    "lamb": fused_lamb,
    "hybrid": lambda p: colossalai.HybridAdam(p.values(), 1e-2, weight_decay=0.1),
}


def _worst_by_layout(world):
    start, worst = start_values(), {}
    for name, build in BUILD.items():
        expected, _ = trained(build, plain)
        for layout, place in layouts_of(world).items():
            if (name, layout) == ("lamb", "pipeline"):
                continue  # a rank alone does not know the gradients of other stages; a Booster does
            found, _ = trained(build, place)
            worst[name, layout] = max(relative_differences(found, expected, start).values())
    return worst


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_every_layout_gives_the_result_of_one_device(ranks, world):
    for worst in ranks(world).run(_worst_by_layout, world):
        assert max(worst.values()) < 5e-6, worst


def _run_of_lamb(plugin):
    torch.manual_seed(1)
    model = tiny.Mlp()
    optimizer = colossalai.FusedLAMB(model.parameters(), lr=0.05, max_grad_norm=0.02)
    norms = []
    if plugin is not None:
        model, optimizer, *_ = Booster(plugin=plugin).boost(model, optimizer)
    for step in range(10):
        torch.manual_seed(step)
        inputs = torch.randn(8, 7)
        loss = nn.functional.mse_loss(model(inputs), inputs[:, :3])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        norms.append(optimizer.get_grad_norm() if plugin is not None else None)
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([each.detach().flatten() for each in weights]), norms


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_booster_clips_for_fused_lamb(ranks, stage):
    expected, _ = _run_of_lamb(None)
    plugin = HybridParallelPlugin(precision="fp32", zero_stage=stage)
    for found, norms in ranks(2).run(_run_of_lamb, plugin):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert min(norms) > 0.02


@pytest.mark.parametrize(("shape", "kind"), [((6, 20), "std"), ((33, 16), "std"), ((33, 16), "reverse_std")])
def test_the_projector_is_that_of_the_optimizer(shape, kind):
    """GaLore with plain SGD's step in the place of Adam's, by hand and by the projector."""
    projector = colossalai.GaLoreProjector(3, update_proj_gap=2, scale=0.5, proj_type=kind)
    for step in range(4):
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        low = projector.project(gradient, step)
        if step % 2 == 0:
            left, _, right = torch.linalg.svd(gradient, full_matrices=False)
            is_right = (shape[0] >= shape[1]) == (kind == "std")
            basis = right[:3].T if is_right else left[:, :3]
        expected = gradient @ basis if is_right else basis.T @ gradient
        torch.testing.assert_close(low.abs(), expected.abs())
        whole = expected @ basis.T if is_right else basis @ expected
        torch.testing.assert_close(projector.project_back(low), 0.5 * whole)
    vector = torch.ones(5)
    assert projector.project(vector, 0) is vector


@pytest.mark.parametrize("percentile", [100, 101, 1000])
def test_percentiles_from_100_on_clip_nothing(percentile):
    runs = [
        trained(lambda p, at=at: optim.AdamW8bit(p.values(), lr=1e-2, percentile_clipping=at), plain)[0]
        for at in (100, percentile)
    ]
    assert all(torch.equal(value, runs[1][key]) for key, value in runs[0].items())
    assert not any("norm" in key for key in runs[1])
