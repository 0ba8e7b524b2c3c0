"""The moving average in one process, against torch's ``AveragedModel`` and against the formula."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from meshwright import ConfigError
from meshwright.optim import EmaPolicy, GuardedOptimizer, MasterWeights, WeightAverage, average_of

STEPS = 12


def linear(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Linear(4, 3).to(dtype)


def train(model, optimizer, steps=STEPS, after=lambda: None):
    for step in range(steps):
        optimizer.zero_grad()
        rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(step)).to(model.weight.dtype)
        model(rows).float().square().mean().backward()
        optimizer.step()
        after()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def test_it_is_torchs_average():
    model = linear(torch.float64)
    optimizer, reference = sgd(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    average = WeightAverage(optimizer, EmaPolicy(decay=0.9, warmup=False))
    train(model, optimizer, after=lambda: reference.update_parameters(model))
    assert average_of(optimizer) is average
    for parameter, expected in zip(model.parameters(), reference.module.parameters(), strict=True):
        torch.testing.assert_close(average.of[parameter], expected.detach(), rtol=1e-14, atol=0)
        assert (average.of[parameter] - parameter).abs().max() > 1e-3


def test_warm_up_and_rarer_updates():
    model = linear(torch.float64)
    optimizer, seen = sgd(model), []
    average = WeightAverage(optimizer, EmaPolicy(decay=0.8, every=3))
    train(model, optimizer, after=lambda: seen.append(model.weight.detach().clone()))
    expected = seen[2]
    for update, weight in enumerate(seen[5::3]):
        keep = min(0.8**3, (1 + update) / (10 + update))
        expected = keep * expected + (1 - keep) * weight
    torch.testing.assert_close(average.of[model.weight], expected, rtol=1e-13, atol=0)
    assert (average.num_steps, average.num_updates) == (12, 4)


def test_bf16_is_right_on_average_where_rounding_to_the_nearest_would_stand_still():
    weight = nn.Parameter(torch.ones(4096))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    average = WeightAverage(optimizer, EmaPolicy(decay=0.999, warmup=False, dtype="bf16"))
    average.update()
    weight.data.fill_(1.5)
    for _ in range(200):
        average.update()  # each moves it by 0.0005 at most: a quarter of the distance to the next bfloat16
    found = average.of[weight].float()
    assert average.of[weight].dtype == torch.bfloat16
    assert abs(found.mean().item() - (1.5 - 0.5 * 0.999**200)) < 2e-3


def test_the_model_borrows_it_and_gets_its_weights_back_to_the_bit():
    model = linear(torch.bfloat16)
    master = MasterWeights(model.parameters())
    optimizer = GuardedOptimizer(
        master.optimizer(lambda p: torch.optim.SGD(p, lr=0.1), model.parameters()), master=master
    )
    average = WeightAverage(optimizer, EmaPolicy(decay=0.9))
    with average.weights():
        torch.testing.assert_close(model.weight, linear(torch.bfloat16).weight, rtol=0, atol=0)  # no update so far
    train(model, optimizer)
    before, masters = copy.deepcopy(model.state_dict()), [each.clone() for each in master.of.values()]
    with pytest.raises(ZeroDivisionError), average.weights():  # noqa: PT012 - it raises at the end
        # The average is of the fp32 copies, which are finer than what it was rounded to here.
        assert torch.equal(model.weight, average.of[master.of[model.weight]].bfloat16())
        assert not torch.equal(model.weight, before["weight"])
        raise ZeroDivisionError
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(torch.equal(a, b) for a, b in zip(masters, master.of.values(), strict=True))


def test_a_skipped_step_does_not_count():
    model = linear()
    optimizer = GuardedOptimizer(sgd(model), skip_nonfinite=True)
    average = WeightAverage(optimizer, EmaPolicy())
    train(model, optimizer, 2)
    kept = average.of[model.weight].clone()
    model.weight.grad.fill_(float("nan"))
    optimizer.step()
    assert (average.num_steps, optimizer.num_skipped_steps) == (2, 1)
    assert torch.equal(kept, average.of[model.weight])
    average.restart()
    train(model, optimizer, 1)
    assert torch.equal(average.of[model.weight], model.weight)


def test_a_step_that_a_fused_optimizer_skips_by_itself_does_not_count():
    model = linear()
    fused = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer = GuardedOptimizer(fused, scaler=torch.amp.GradScaler("cpu"))
    average = WeightAverage(optimizer, EmaPolicy())
    for value in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        optimizer.scaled(model(torch.full((2, 4), value)).sum()).backward()
        optimizer.step()
    assert (average.num_steps, int(fused.state[model.weight]["step"])) == (2, 2)


@pytest.mark.parametrize("policy", [EmaPolicy(decay=1.0), EmaPolicy(decay=0.0), EmaPolicy(every=0)])
def test_numbers_that_make_no_average(policy):
    with pytest.raises(ConfigError, match="no moving average"):
        WeightAverage(sgd(linear()), policy)


def test_what_is_unfrozen_later_is_averaged_from_then_on():
    model = linear(torch.float64)
    model.bias.requires_grad_(False)
    optimizer = sgd(model)
    average = WeightAverage(optimizer, EmaPolicy(decay=0.9, warmup=False))
    train(model, optimizer, 3)
    assert list(average.of) == [model.weight]
    model.bias.requires_grad_(True)
    expected = model.bias.detach().clone()
    train(model, optimizer, after=lambda: expected.lerp_(model.bias.detach(), 0.1))
    torch.testing.assert_close(average.of[model.bias], expected)
    with average.weights():
        torch.testing.assert_close(model.bias.detach(), expected)
