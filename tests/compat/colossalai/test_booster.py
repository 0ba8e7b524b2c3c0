"""Every plugin trains as one process does."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffload

import meshwright as mw
from meshwright.compat.colossalai import (
    Booster,
    GeminiPlugin,
    HybridParallelPlugin,
    LazyInitContext,
    LowLevelZeroPlugin,
    MoeHybridParallelPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from meshwright.optim import average_of
from tests import tiny
from tests.compat.colossalai import helpers


def hybrid(zero_stage=0, **changes):
    return HybridParallelPlugin(tp_size=1, pp_size=1, zero_stage=zero_stage, precision="fp32", **changes)


FP32 = [
    (TorchDDPPlugin(broadcast_buffers=False, bucket_cap_mb=1, static_graph=True), "sgd", 1),
    (LowLevelZeroPlugin(stage=1, precision="fp32"), "sgd", 2),
    (LowLevelZeroPlugin(stage=2, precision="fp32", communication_dtype=torch.float32), "adamw", 1),
    (hybrid(), "own", 2),
    (hybrid(3, methods=["checkpoint"]), "sgd", 1),
    (MoeHybridParallelPlugin(ep_size=1, precision="fp32"), "adagrad", 1),
    (GeminiPlugin(precision="fp32"), "adamw", 2),
    (GeminiPlugin(precision="fp32", shard_param_frac=0.0), "adamw", 1),
    (TorchFSDPPlugin(sharding_strategy="SHARD_GRAD_OP"), "sgd", 1),
]
FP32 += [
    (LowLevelZeroPlugin(stage=2, precision="fp32", cpu_offload=True), "adamw", 2),
    (GeminiPlugin(precision="fp32", offload_optim_frac=0.6, offload_param_frac=0.3), "sgd", 1),
]
# Layouts that those have, under another plugin's name or with another optimizer.
MORE_FP32 = [
    (TorchDDPPlugin(), "adamw", 1),
    (hybrid(1), "adagrad", 1),
    (hybrid(2), "own", 1),
    (TorchFSDPPlugin(sync_module_states=True), "adamw", 1),
    (TorchFSDPPlugin(cpu_offload=CPUOffload(offload_params=True)), "adamw", 1),
    (hybrid(cpu_offload=True), "sgd", 1),
]


def runs(cases):
    results = []
    for plugin, optimizer, accumulate in cases:
        job = helpers.boosted(plugin, optimizer)
        losses = helpers.train(*job, accumulate=accumulate)
        results.append((losses, helpers.whole(job[1])))
    return results


@pytest.mark.parametrize("cases", [FP32, pytest.param(MORE_FP32, marks=pytest.mark.long)], ids=["some", "more"])
def test_fp32_is_that_of_one_process(ranks, cases):
    start = helpers.start()
    expected = {name: helpers.plain_run(name) for name in helpers.OPTIMIZERS}
    for found in ranks(2).run(runs, cases):
        for (plugin, optimizer, _), (losses, weights) in zip(cases, found, strict=True):
            wanted_losses, wanted = expected[optimizer]
            assert losses == pytest.approx(wanted_losses, rel=1e-5), plugin
            assert (weights - wanted).norm() < 1e-4 * (wanted - start).norm(), plugin


def lazily():
    results = []
    for plugin, optimizer, accumulate in FP32:
        if optimizer != "adagrad":
            job = helpers.boosted(plugin, optimizer, context=LazyInitContext())
            assert not any(parameter.is_meta for parameter in job[1].parameters())
            results.append((optimizer, helpers.train(*job, accumulate=accumulate), helpers.whole(job[1])))
    return results


def test_models_of_a_lazy_context_train_as_built_ones(ranks):
    start = helpers.start()
    expected = {name: helpers.plain_run(name) for name in helpers.OPTIMIZERS}
    for found in ranks(2).run(lazily):
        for optimizer, losses, weights in found:
            wanted_losses, wanted = expected[optimizer]
            assert losses == pytest.approx(wanted_losses, rel=1e-5)
            assert (weights - wanted).norm() < 1e-4 * (wanted - start).norm()


HALF = [
    (LowLevelZeroPlugin(stage=1, precision="bf16"), "adamw", 2),
    (LowLevelZeroPlugin(stage=2, precision="bf16"), "sgd", 1),
    (LowLevelZeroPlugin(stage=2, precision="fp16", initial_scale=128.0), "adamw", 1),
    (HybridParallelPlugin(tp_size=1, pp_size=1, precision="bf16"), "adamw", 2),
    (HybridParallelPlugin(tp_size=1, pp_size=1, precision="fp16", zero_stage=1, initial_scale=128.0), "sgd", 1),
    (GeminiPlugin(precision="bf16", force_outputs_fp32=True), "adamw", 1),
]


def test_half_precision_follows_the_loss_of_fp32(ranks):
    expected = {name: helpers.plain_run(name)[0] for name in ("adamw", "sgd")}
    for found in ranks(2).run(runs, HALF):
        for (plugin, optimizer, _), (losses, _) in zip(HALF, found, strict=True):
            assert losses == pytest.approx(expected[optimizer], rel=3e-2), plugin


def other_ways():
    clipped = helpers.boosted(hybrid(2, max_norm=0.5))
    losses = helpers.train(*clipped)
    assert losses == pytest.approx(helpers.plain_run(clip=0.5)[0], rel=1e-5)
    assert losses[-1] != pytest.approx(helpers.plain_run()[0][-1], rel=1e-3)
    _, model, optim, criterion, loader, schedule = clipped
    assert 0 < optim.get_grad_norm() < 10
    assert schedule.optimizer is optim.unwrap()
    assert [group["lr"] for group in optim.param_groups] == pytest.approx([1e-2 / 4, 0.03 / 4])
    assert isinstance(model.unwrap(), tiny.Mlp)
    assert isinstance(criterion, nn.MSELoss), "fp32 needs no wrapper"
    assert loader is clipped[4]
    by_methods = helpers.boosted(TorchDDPPlugin(methods=[("grad_clip", 0.5), "ema"]))
    assert helpers.train(*by_methods) == pytest.approx(losses, rel=1e-5)
    assert average_of(by_methods[2]).num_updates == helpers.STEPS
    amp = helpers.boosted(TorchDDPPlugin(), mixed_precision="bf16")
    assert amp[0].strategy().names == ("parallel_mode", "amp_native")
    assert helpers.train(*amp) == pytest.approx(helpers.plain_run()[0], rel=3e-2)
    assert isinstance(amp[1].unwrap(), tiny.Mlp)
    return True


def test_clipping_schedules_and_autocast(ranks):
    assert all(ranks(2).run(other_ways))


def pipeline():
    plugin = hybrid(1, microbatch_size=2)
    booster, model, optim, _, loader, _ = helpers.boosted(plugin)
    names = [name for name, _ in model.named_parameters()]

    def criterion(outputs, batch):
        assert len(batch[0]) == 2
        return (outputs - batch[0][:, :3]).square().mean()

    batch = [next(iter(loader))[0]]
    reached = booster.execute_pipeline(iter([batch]), model, criterion, None, return_outputs=True)
    assert reached["outputs"].shape == (len(batch[0]), 3)
    assert not reached["loss"].requires_grad
    assert all(p.grad is None for p in model.parameters())
    again = booster.execute_pipeline(iter([batch]), model, criterion, optim)
    assert again["loss"].item() == pytest.approx(reached["loss"].item())
    assert again["outputs"] is None
    gradients = [p.grad.full_tensor() for p in model.parameters()]
    plain = helpers.build()[0]
    every = torch.cat([helpers.dataset().tensors[0][: helpers.BATCH]])
    (plain(every) - every[:, :3]).square().mean().backward()
    for name, mine, theirs in zip(names, gradients, plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.grad, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: name + text)
    return True


def test_execute_pipeline_with_one_stage(ranks):
    assert all(ranks(2).run(pipeline))


def world_of_one():
    booster = Booster()
    model, optim, schedule = helpers.build()
    given = model, optim, schedule
    model, optim, criterion, loader, schedule = booster.boost(model, optim, nn.MSELoss(), [1, 2], schedule)
    assert (model.unwrap(), optim.unwrap(), schedule) == given
    assert loader == [1, 2]
    inputs, targets = helpers.dataset().tensors
    for value in (0.1, 10.0):
        optim.zero_grad()
        optim.backward(criterion(model(inputs), targets) * 100)
        optim.clip_grad_by_value(value)
        assert max(p.grad.abs().max().item() for p in model.parameters()) == pytest.approx(value)
    assert Booster().boost(tiny.Mlp())[1:] == (None, None, None, None)
    return True


def test_a_booster_without_a_plugin(ranks):
    assert all(ranks(1).run(world_of_one))


def scale_moves():
    plugin = LowLevelZeroPlugin(stage=1, precision="fp16", initial_scale=64.0, min_scale=16.0, growth_interval=2)
    _, model, optim, criterion, _, _ = helpers.boosted(plugin)
    inputs, targets = (tensor[:4] for tensor in helpers.dataset().tensors)
    scales, skipped = [], []
    for factor in (1, 1e30, 1e30, 1e30, 1e30, 1, 1):
        optim.zero_grad()
        optim.backward(criterion(model(inputs), targets) * factor)
        before = helpers.whole(model)
        optim.step()
        scales.append(optim.scaler.get_scale())
        skipped.append(optim.step_was_skipped)
        assert torch.equal(before, helpers.whole(model)) == skipped[-1]
    return scales, skipped


def test_the_loss_scale_has_patience_and_bounds(ranks):
    for scales, skipped in ranks(2).run(scale_moves):
        assert scales == [64, 64, 32, 16, 16, 16, 32]
        assert skipped == [False, True, True, True, True, False, False]


def copied():
    """Losses of a boosted model and of its copy, each in a loop of its own."""
    _, model, optim, criterion, loader, _ = helpers.boosted(TorchDDPPlugin(), "sgd")
    twin = copy.deepcopy(model)
    assert twin.unwrap() is twin.module
    assert twin.module is not model.unwrap()
    copied_optim = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    told = []
    for each, stepped, backward in ((twin, copied_optim, torch.Tensor.backward), (model, optim, optim.backward)):
        for group in stepped.param_groups:
            group["lr"] = 0.1
        losses = []
        for inputs, targets in loader:
            loss = criterion(each(inputs), targets)
            backward(loss)
            stepped.step()
            stepped.zero_grad()
            losses.append(mw.sum_loss(loss.detach()).item())
        told.append((losses, helpers.whole(each)))
    return told


def test_a_boosted_model_is_deep_copied(ranks):
    for (losses, weights), (expected_losses, expected) in ranks(2).run(copied):
        assert losses == expected_losses
        assert torch.equal(weights, expected)


def drawn(plugin):
    """What a script draws after boost, on ranks that it has seeded alike."""
    launched = torch.get_rng_state()
    try:
        model, optim, _ = helpers.build()
        torch.manual_seed(11)
        Booster(plugin=plugin).boost(model, optim)
        return torch.randn(5)
    finally:
        torch.set_rng_state(launched)


@pytest.mark.parametrize("plugin", [TorchDDPPlugin(), LowLevelZeroPlugin(precision="fp32")], ids=["ddp", "zero"])
def test_boost_leaves_the_generators_alone(ranks, plugin):
    torch.manual_seed(11)
    expected = torch.randn(5)
    assert all(torch.equal(each, expected) for each in ranks(2).run(drawn, plugin))
