import copy

import pytest
import torch
from torch.optim import SGD, Adagrad, Adam, AdamW

import meshwright as mw
from meshwright.optim import GuardedOptimizer, LossScaler, MasterWeights, clipped_step
from meshwright.optim.guarded_step import call_around

LARGE, SMALL = 0.3, 1e3


def model_with_gradients(dtype=torch.float32):
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 4).to(dtype)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def stepped(build, max_norm, by_hand, dtype=torch.float32):
    """Parameters, gradients and what was returned after one step, clipped by torch or here."""
    model = model_with_gradients(dtype)
    optimizer = build(model)
    before = [parameter.grad.clone() for parameter in model.parameters()]
    if by_hand:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        return model, norm, None
    norm, step = clipped_step(model.parameters(), optimizer, max_norm)
    late = all(torch.equal(p.grad, each) for p, each in zip(model.parameters(), before, strict=True))
    step()
    assert not hasattr(optimizer, "grad_scale")
    return model, norm, late


def fused(kind, **options):
    return lambda model: kind(model.parameters(), lr=0.1, fused=True, **options)


def called_around(model):
    optimizer = fused(AdamW)(model)
    call_around(optimizer, before=[model.parameters], after=[model.parameters])
    return optimizer


BUILDS = {
    "AdamW": (fused(AdamW), True),
    "Adam": (fused(Adam, weight_decay=0.1, amsgrad=True), True),
    "SGD": (fused(SGD, momentum=0.9), True),
    "not fused": (lambda model: AdamW(model.parameters(), lr=0.1), False),
    "other kernel": (fused(Adagrad), False),
    "called around": (called_around, True),
    "guarded": (lambda model: GuardedOptimizer(fused(AdamW)(model), skip_nonfinite=True), True),
}


@pytest.mark.parametrize("name", BUILDS)
def test_the_step_is_that_of_gradients_clipped_before(name):
    build, in_kernel = BUILDS[name]
    for max_norm in (LARGE, SMALL):
        plain, norm, _ = stepped(build, max_norm, True)
        mine, found, late = stepped(build, max_norm, False)
        assert found.item() == pytest.approx(norm.item(), rel=1e-6)
        assert late == (in_kernel or max_norm == SMALL)
        for own, other in zip(mine.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-6, atol=1e-7)  # clipped afterwards


def test_fp64_keeps_its_digits():
    plain, _, _ = stepped(fused(AdamW), LARGE, True, torch.float64)
    mine, _, late = stepped(fused(AdamW), LARGE, False, torch.float64)
    assert not late
    for own, other in zip(mine.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-12, atol=0)


def test_who_looks_before_the_step_sees_clipped_gradients():
    seen = []

    def build(model):
        optimizer = fused(AdamW)(model)
        optimizer.register_step_pre_hook(lambda *_: seen.append(model.weight.grad.clone()))
        return optimizer

    stepped(build, LARGE, True)
    assert not stepped(build, LARGE, False)[2]
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-6, atol=1e-7)


def test_gradients_beside_the_optimizer_are_clipped_too():
    mine, other = model_with_gradients(), model_with_gradients()
    torch.nn.utils.clip_grad_norm_(other.parameters(), LARGE)
    _, step = clipped_step(mine.parameters(), AdamW([mine.weight], fused=True), LARGE)
    step()
    torch.testing.assert_close(mine.bias.grad, other.bias.grad)


def test_a_step_that_fails_or_is_skipped_leaves_nothing_behind():
    model = model_with_gradients()
    inner = AdamW(model.parameters(), fused=True)
    optimizer = GuardedOptimizer(inner, skip_nonfinite=True, stop_nonfinite=True)
    model.weight.grad[0, 0] = float("nan")
    norm, step = clipped_step(model.parameters(), optimizer, LARGE)
    assert norm.isnan()
    with pytest.raises(Exception, match="inf or nan"):
        step()
    assert not hasattr(inner, "grad_scale")
    before = copy.deepcopy(model.state_dict())
    optimizer.stop_nonfinite = False
    clipped_step(model.parameters(), optimizer, LARGE)[1]()
    assert optimizer.step_was_skipped
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    with pytest.raises(ValueError, match="max_norm"):
        clipped_step(model.parameters(), inner, 0.0)


def test_masters_are_clipped_in_the_kernel_and_loss_scales_before_it():
    model = model_with_gradients(torch.bfloat16)
    masters = MasterWeights(model.parameters())
    inner = masters.optimizer(lambda params: AdamW(params, lr=0.1, fused=True), model.parameters())
    norm, step = clipped_step(model.parameters(), GuardedOptimizer(inner, master=masters), LARGE)
    step()
    gradients = torch.cat([master.grad.flatten() for master in masters.of.values()])
    assert gradients.norm().item() == pytest.approx(LARGE, rel=1e-5)
    assert norm.item() > LARGE
    model = model_with_gradients()
    scaled = GuardedOptimizer(AdamW(model.parameters(), fused=True), scaler=LossScaler("cpu", initial_scale=1.0))
    scaled.scaled(torch.ones((), requires_grad=True))
    clipped_step(model.parameters(), scaled, LARGE)
    clipped = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert clipped.norm().item() == pytest.approx(LARGE, rel=1e-5)


def clipped_late_under(strategy):
    model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 3))
    batch = torch.ones(2, 8)
    job = mw.accelerate(
        model, AdamW, None, lambda _, output: output.square().mean(), strategy=strategy, sample_batch=batch,
        optim_args={"fused": True},
    )  # fmt: skip
    job.loss_func(batch, job.model(batch)).backward()
    before = [parameter.grad.clone() for parameter in job.model.parameters()]
    _, step = clipped_step(job.model.parameters(), job.optim, 1e-3)
    late = all(torch.equal(p.grad, each) for p, each in zip(job.model.parameters(), before, strict=True))
    step()
    return late and not any(torch.equal(p.grad, g) for p, g in zip(job.model.parameters(), before, strict=True))


def test_sharded_gradients_are_clipped_in_the_kernel_too(ranks):
    for strategy in ([], ["zero2"], ["fsdp"]):
        assert ranks(2).run(clipped_late_under, strategy) == [True, True]
