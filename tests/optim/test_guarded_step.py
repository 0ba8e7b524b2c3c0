import copy
import pickle

import pytest
import torch
from torch import nn

from meshwright import ConfigError
from meshwright.optim import GuardedOptimizer, MasterWeights


def linear(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Linear(4, 3).to(dtype)


def backward(model, value=1.0, optim=None):
    model.zero_grad()
    loss = model(torch.full((2, 4), value, dtype=model.weight.dtype)).float().sum()
    (optim.scaled(loss) if optim is not None else loss).backward()


def test_a_step_without_a_scaled_loss_is_an_error():
    model = linear()
    optim = GuardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), scaler=torch.amp.GradScaler("cpu"))
    backward(model)
    with pytest.raises(ConfigError, match=r"not scaled.*What to do: use result.loss_func"):
        optim.step()


def test_the_loss_reads_true_and_the_step_is_that_of_the_plain_optimizer():
    plain, scaled = linear(), linear()
    optim = torch.optim.SGD(plain.parameters(), lr=0.1)
    guarded = GuardedOptimizer(torch.optim.SGD(scaled.parameters(), lr=0.1), scaler=torch.amp.GradScaler("cpu"))
    for _ in range(3):
        for model, step in ((plain, optim), (scaled, guarded)):
            step.zero_grad()
            loss = model(torch.ones(2, 4)).square().sum()
            (guarded.scaled(loss) if step is guarded else loss).backward()
            if step is guarded:
                assert guarded.scaled(loss).item() == loss.item()
                assert model.weight.grad.abs().max() > 1e3  # still scaled
            step.step()
    torch.testing.assert_close(plain.weight, scaled.weight)


@pytest.mark.parametrize("guard", ["scaler", "finite"])
def test_a_bad_step_changes_nothing(guard):
    model = linear()
    options = {"scaler": torch.amp.GradScaler("cpu")} if guard == "scaler" else {"skip_nonfinite": True}
    optim = GuardedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), **options)
    before = model.weight.detach().clone()
    backward(model, float("inf"), optim)
    optim.step()
    assert optim.step_was_skipped
    assert torch.equal(model.weight, before)
    optim.zero_grad()
    backward(model, 1.0, optim)
    optim.step()
    assert not optim.step_was_skipped
    assert not torch.equal(model.weight, before)


def test_master_weights_keep_updates_that_half_weights_would_lose():
    half = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.constant_(half.weight, 1.0)
    master = MasterWeights(half.parameters())
    inner = master.optimizer(lambda params: torch.optim.SGD(params, lr=1e-4), half.parameters())
    optim = GuardedOptimizer(inner, master=master)
    for _ in range(100):
        optim.zero_grad()
        half(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        optim.step()
    assert master.of[half.weight].item() == pytest.approx(0.99, rel=1e-4)
    assert half.weight.item() == pytest.approx(0.99, rel=4e-3)
    assert half.weight.item() < 1


def test_groups_of_parameters_become_groups_of_masters():
    model = linear(torch.bfloat16)
    master = MasterWeights(model.parameters())
    groups = [{"params": [model.weight], "lr": 0.5}, {"params": model.bias}]
    optim = GuardedOptimizer(master.optimizer(lambda g: torch.optim.SGD(g, lr=0.1), groups), master=master)
    assert [group["lr"] for group in optim.param_groups] == [0.5, 0.1]
    assert optim.param_groups[0]["params"][0].dtype == torch.float32
    named = master.optimizer(lambda p: torch.optim.SGD(p, lr=0.1), model.named_parameters())
    assert named.param_groups[0]["params"][0] is master.of[model.weight]


def half_with_masters(momentum=0.0):
    model = linear(torch.bfloat16)
    model.bias.requires_grad_(False)
    master = MasterWeights(model.parameters())
    inner = master.optimizer(lambda p: torch.optim.SGD(p, lr=0.1, momentum=momentum), model.parameters())
    return model, GuardedOptimizer(inner, master=master)


def test_a_half_parameter_without_a_master_is_refused_once_it_trains():
    model, optim = half_with_masters()
    backward(model)
    optim.step()
    model.bias.requires_grad_(True)
    backward(model)
    with pytest.raises(ConfigError, match=r"1 parameters in half precision .*no fp32 master weights"):
        optim.step()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_copy_with_its_model_goes_on_by_itself(copied):
    model, optim = half_with_masters(momentum=0.9)
    torch.optim.lr_scheduler.LinearLR(optim, start_factor=0.5)  # puts a wrapper around step
    both = [(model, optim), copied((model, optim))]
    for each, optimizer in both:
        assert torch.equal(each.weight, linear(torch.bfloat16).weight), "one moved the other"
        for _ in range(2):
            backward(each)
            optimizer.step()
    assert torch.equal(model.weight, both[1][0].weight)
    assert not torch.equal(model.weight, linear(torch.bfloat16).weight)


def test_hooks_are_called_for_steps_that_are_taken():
    model, called = linear(), []
    optim = GuardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), skip_nonfinite=True)
    optim.register_step_pre_hook(lambda *_: called.append("before"))
    after = optim.register_step_post_hook(lambda *_: called.append("after"))
    for value in (1.0, float("inf"), 1.0):
        backward(model, value)
        optim.step()
        after.remove()
    assert called == ["before", "after", "before"]


def test_clipping_unscales_first_and_only_once():
    model = linear()
    optim = GuardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), scaler=torch.amp.GradScaler("cpu"))
    optim.zero_grad()
    optim.scaled(model(torch.ones(2, 4)).sum()).backward()
    first = optim.clip_grad_norm(float("inf"))
    assert optim.clip_grad_norm(1.0).item() == pytest.approx(first.item())
    assert first.item() == pytest.approx((4 * 3 * 4 + 3 * 4) ** 0.5)


def test_schedulers_state_dicts_and_closures():
    model = linear()
    optim = GuardedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9), skip_nonfinite=True)
    schedule = torch.optim.lr_scheduler.StepLR(optim, 1, 0.5)
    backward(model)
    optim.step()
    schedule.step()
    assert optim.param_groups[0]["lr"] == 0.5
    again = GuardedOptimizer(torch.optim.SGD(linear().parameters(), lr=1.0, momentum=0.9), skip_nonfinite=True)
    again.load_state_dict(optim.state_dict())
    assert again.param_groups[0]["lr"] == 0.5
    with pytest.raises(ValueError, match="closure"):
        optim.step(lambda: 1.0)
    assert "non-finite" in repr(optim)
