"""ColossalAI's schedules under its names: their numbers at the joints, and their states in files."""

import math

import pytest
import torch
from torch import nn

from meshwright.compat.colossalai import Booster
from meshwright.errors import ConfigError
from meshwright.nn import lr_scheduler as schedules

BASES = (0.1, 0.03)
TOTAL = 20


def optimizer():
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": lr} for lr in BASES]
    return torch.optim.SGD(groups, momentum=0.9)


def rates(name, steps=TOTAL, **options):
    over = optimizer()
    schedule, found = getattr(schedules, name)(over, TOTAL, **options), []
    for _ in range(steps):
        found.append([group["lr"] for group in over.param_groups])
        over.step()
        schedule.step()
    return torch.tensor(found)


def cosine(step, steps, low=0.0, base=BASES[0]):
    return low + (base - low) * (1 + math.cos(math.pi * step / steps)) / 2


FORMULAS = {
    "CosineAnnealingWarmupLR": (
        {"warmup_steps": 5, "eta_min": 0.01},
        lambda step: 0.02 * (step + 1) if step < 5 else cosine(step - 5, 15, 0.01),
    ),
    "FlatAnnealingLR": ({"pct_start": 0.3}, lambda step: 0.1 if step < 6 else cosine(step - 6, 14)),
    "FlatAnnealingWarmupLR": (
        {"warmup_steps": 4, "pct_start": 0.5, "eta_min": 0.01},
        lambda step: 0.025 * (step + 1) if step < 4 else 0.1 if step < 12 else cosine(step - 12, 8, 0.01),
    ),
    "LinearWarmupLR": (
        {"warmup_steps": 5},
        lambda step: 0.1 * (step + 1) / 6 if step < 5 else 0.1 * (20 - step) / 15,
    ),
    "PolynomialWarmupLR": (
        {"warmup_steps": 5, "end_lr": 0.01, "power": 2},
        lambda step: 0.02 * (step + 1) if step < 5 else 0.01 + 0.09 * (1 - (step - 5) / 15) ** 2,
    ),
    "PolynomialLR": ({"end_lr": 0.01}, lambda step: 0.01 + 0.09 * (1 - step / 20)),
    "MultiStepWarmupLR": (
        {"warmup_steps": 4, "milestones": [2, 4, 12], "gamma": 0.5},
        lambda step: 0.025 * (step + 1) if step < 4 else 0.05 if step < 12 else 0.025,
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_phases(name):
    options, formula = FORMULAS[name]
    found = rates(name, **options)
    torch.testing.assert_close(found[:, 0], torch.tensor([float(formula(step)) for step in range(TOTAL)]))
    if "eta_min" not in options and "end_lr" not in options:
        torch.testing.assert_close(found[:, 1], found[:, 0] * 0.3)


OF_TORCH = {
    "CosineAnnealingLR": (
        {"eta_min": 0.01},
        lambda over: torch.optim.lr_scheduler.CosineAnnealingLR(over, TOTAL, 0.01),
    ),
    "MultiStepLR": ({"milestones": [3, 9]}, lambda over: torch.optim.lr_scheduler.MultiStepLR(over, [3, 9])),
    "StepLR": ({"step_size": 3}, lambda over: torch.optim.lr_scheduler.StepLR(over, 3)),
    "ExponentialLR": ({"gamma": 0.9}, lambda over: torch.optim.lr_scheduler.ExponentialLR(over, 0.9)),
    "LambdaLR": (
        {"lr_lambda": lambda step: 0.9**step},
        lambda over: torch.optim.lr_scheduler.LambdaLR(over, lambda step: 0.9**step),
    ),
    "MultiplicativeLR": (
        {"lr_lambda": lambda step: 0.9},
        lambda over: torch.optim.lr_scheduler.MultiplicativeLR(over, lambda step: 0.9),
    ),
    "OneCycleLR": ({}, lambda over: torch.optim.lr_scheduler.OneCycleLR(over, list(BASES), total_steps=TOTAL)),
}


@pytest.mark.parametrize("name", OF_TORCH)
def test_those_of_torch(name):
    options, build = OF_TORCH[name]
    over, expected = optimizer(), []
    schedule = build(over)
    for _ in range(TOTAL - 1):
        expected.append([group["lr"] for group in over.param_groups])
        over.step()
        schedule.step()
    assert torch.equal(rates(name, TOTAL - 1, **options), torch.tensor(expected))


def test_all_names_are_tested():
    assert set(schedules.__all__) == {*FORMULAS, *OF_TORCH}


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda over: schedules.CosineAnnealingWarmupLR(over, 5, 6), "before the decay are more than all steps"),
        (lambda over: schedules.FlatAnnealingLR(over, 5, 1.5), "pct_start is not a part of the steps"),
        (lambda over: schedules.MultiStepWarmupLR(over, 5), "has no milestones"),
        (lambda over: schedules.LinearWarmupLR(nn.Linear(2, 2), 5), "scheduler without its optimizer"),
    ],
)
def test_numbers_that_make_no_schedule(build, text):
    with pytest.raises(ConfigError, match=text):
        build(optimizer())


def test_schedules_go_on_from_their_files(ranks, tmp_path):
    ranks(1).run(_go_on_from_files, tmp_path)


def _go_on_from_files(folder):
    for name in FORMULAS:
        _goes_on_from_its_file(name, folder / name)


def _goes_on_from_its_file(name, path):
    options, _ = FORMULAS[name]
    whole = rates(name, **options)
    booster, over = Booster(), optimizer()
    first = getattr(schedules, name)(over, TOTAL, **options)
    for _ in range(7):
        over.step()
        first.step()
    booster.save_lr_scheduler(first, path)
    over = optimizer()
    second = getattr(schedules, name)(over, TOTAL, **options)
    booster.load_lr_scheduler(second, path)
    assert second.state_dict() == first.state_dict()
    found = []
    for _ in range(7, TOTAL - 1):
        over.step()
        second.step()
        found.append([group["lr"] for group in over.param_groups])
    torch.testing.assert_close(torch.tensor(found), whole[8:])
