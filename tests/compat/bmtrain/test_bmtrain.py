"""BMTrain's parts together, as its own tests hold them: train, resume, overflow; against plain torch."""

import copy

import pytest
import torch
import torch.nn.functional as F

import meshwright as bmt
from meshwright import runtime
from tests.compat.bmtrain.seed_models import IN, build, full, weights

STEPS, PER_RANK, NUM_LAYERS = 100, 3, 2


def data(steps=STEPS):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(steps, runtime.world_size(), PER_RANK, IN, generator=generator)
    return inputs, inputs.argmax(-1)


def optimizer_for(name, parameters):
    options = {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.1}
    if name == "torch":
        return torch.optim.AdamW(parameters, **options)
    kind = bmt.optim.AdamOptimizer if name == "adam" else bmt.optim.AdamOffloadOptimizer
    return kind(parameters, **options)


def plainly_trained(inputs, targets):
    """What plain torch makes of the batches of all ranks together."""
    model = build("plain", num_layers=NUM_LAYERS)
    optimizer = optimizer_for("torch", model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(n / 10, 1.0))
    losses = []
    for x, y in zip(inputs, targets, strict=True):
        loss = F.cross_entropy(model(x.flatten(0, 1)), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses, weights(model)


def seed_loop(model, optimizer, scheduler, inputs, targets, loss_func, **scale):
    """The training loop of BMTrain's README."""
    manager = bmt.optim.OptimManager(**scale)
    manager.add_optimizer(optimizer, scheduler)
    losses, norms = [], []
    for x, y in zip(inputs[:, runtime.rank()], targets[:, runtime.rank()], strict=True):
        loss = loss_func(model(x), y)
        losses.append(bmt.sum_loss(loss).item())
        manager.zero_grad()
        manager.backward(loss)
        norms.append(manager.clip_grad_norm(optimizer.param_groups, max_norm=0.5))
        manager.step()
    assert max(norms) > 0.5  # something was clipped
    return losses, manager


def _trains(combinations, steps):
    inputs, targets = data(steps)
    start = weights(build("plain", num_layers=NUM_LAYERS))
    reference, expected = plainly_trained(inputs, targets)
    assert sum(reference[-10:]) < sum(reference[:10]) - 0.2
    for form, optimizer_name, loss_name, scale in combinations:
        model = build(form, num_layers=NUM_LAYERS)
        optimizer = optimizer_for(optimizer_name, model.parameters())
        scheduler = bmt.lr_scheduler.NoDecay(optimizer, start_lr=1e-3, warmup_iter=10, end_iter=STEPS)
        loss_func = bmt.loss.FusedCrossEntropy() if loss_name == "fused" else torch.nn.CrossEntropyLoss()
        losses, _ = seed_loop(model, optimizer, scheduler, inputs, targets, loss_func, **scale)
        case = (form, optimizer_name, loss_name, scale)
        assert losses == pytest.approx(reference, rel=1e-5), case
        moved = max((value - start[name]).abs().max() for name, value in expected.items())
        assert moved > 0.02
        for name, value in weights(model).items():
            assert (value - expected[name]).abs().max() < 1e-4 * moved, (case, name)


SCALED = {"loss_scale": 1024.0}
COMBINATIONS = {
    1: [("list", "adam", "fused", {})],
    2: [("blocks", "torch", "fused", SCALED), ("wrapped", "offload", "fused", {})],
    4: [("list", "adam", "torch", SCALED)],
}


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.long), 4])
def test_trains_as_plain_torch(ranks, world):
    # A single rank, which sees fewer data, twice as far; all the way they go in the long run.
    ranks(world).run(_trains, COMBINATIONS[world], 60 if world == 1 else 30)


@pytest.mark.long
@pytest.mark.parametrize("world", COMBINATIONS)
def test_trains_as_plain_torch_for_long(ranks, world):
    ranks(world).run(_trains, COMBINATIONS[world], STEPS)


def _job(form, kind, seed, **options):
    """A model, optimizer, schedule and manager; everything but the form differs with the seed."""
    model = build(form, seed=seed)
    optimizer = kind(model.parameters(), **{"lr": 1e-3 * seed, "weight_decay": 0.01 * seed, **options})
    scheduler = bmt.lr_scheduler.Cosine(optimizer, start_lr=1e-3 * seed, warmup_iter=seed, end_iter=100 * seed)
    manager = bmt.optim.OptimManager(loss_scale=2.0**seed, loss_scale_steps=3)
    manager.add_optimizer(optimizer, scheduler)
    return model, manager


def _run(model, manager, inputs, targets):
    for x, y in zip(inputs[:, runtime.rank()], targets[:, runtime.rank()], strict=True):
        manager.zero_grad()
        manager.backward(F.cross_entropy(model(x).float(), y))
        manager.clip_grad_norm(manager.optimizers[0].param_groups, max_norm=1.0)
        manager.step()


def _resumes(path, kind, dtype):
    inputs, targets = data(20)
    model, manager = _job("list", kind, seed=5)
    model = model.to(dtype)
    inputs = inputs.to(dtype)
    _run(model, manager, inputs[:10], targets[:10])
    bmt.save(model, path)
    state = copy.deepcopy(manager.state_dict())  # torch's hold the live tensors
    _run(model, manager, inputs[10:], targets[10:])
    again, other = _job("list", kind, seed=7)
    again = again.to(dtype)
    bmt.load(again, path)
    other.load_state_dict(state)
    assert other.loss_scale != 2.0**7
    _run(again, other, inputs[10:], targets[10:])
    resumed = weights(again)
    for name, value in weights(model).items():
        assert torch.equal(resumed[name], value), name
    assert other.lr_schedulers[0].current_lr == manager.lr_schedulers[0].current_lr
    assert other.loss_scale == manager.loss_scale


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param(bmt.optim.AdamOptimizer, torch.float32, marks=pytest.mark.long),
        pytest.param(bmt.optim.AdamOptimizer, torch.bfloat16, marks=pytest.mark.long),
        (bmt.optim.AdamOffloadOptimizer, torch.bfloat16),
        pytest.param(torch.optim.AdamW, torch.float32, marks=pytest.mark.long),
    ],
)
def test_resumes_to_the_bit_with_other_hyperparameters(ranks, tmp_path, kind, dtype):
    ranks(2).run(_resumes, tmp_path / "model.pt", kind, dtype)


def _overflow():
    """fp16 in Blocks, three kinds of optimizer; one rank's gradient overflows."""
    torch.manual_seed(0)
    model = build("list", num_layers=NUM_LAYERS).half()
    names = dict(model.named_parameters())
    parts = [[p for n, p in names.items() if n.startswith(prefix)] for prefix in ("embed", "layers", "gain")]
    optimizers = [
        torch.optim.SGD(parts[0], lr=0.1, momentum=0.9),
        bmt.optim.AdamOffloadOptimizer(parts[1], lr=1e-2),
        bmt.optim.AdamOptimizer(parts[2], lr=1e-2),
    ]
    manager = bmt.optim.OptimManager(loss_scale=256.0, loss_scale_steps=100)
    for optimizer in optimizers:
        manager.add_optimizer(
            optimizer, bmt.lr_scheduler.NoDecay(optimizer, 1e-2, warmup_iter=10, end_iter=50, num_iter=1)
        )
    inputs, targets = data(8)
    after = weights(model)
    for step in range(8):
        before = after
        rates = [scheduler.current_lr for scheduler in manager.lr_schedulers]
        loss = F.cross_entropy(model(inputs[step, runtime.rank()].half()).float(), targets[step, runtime.rank()])
        poisoned = step == 4 and runtime.rank() == 2
        manager.zero_grad()
        manager.backward(loss * float("inf") if poisoned else loss)
        manager.clip_grad_norm([group for o in optimizers for group in o.param_groups], max_norm=10.0)
        manager.step()
        after = weights(model)
        same = [torch.equal(value, before[name]) for name, value in after.items()]
        if step == 4:
            assert manager.step_was_skipped
            assert all(same)
            assert manager.loss_scale == 128.0
            assert rates == [scheduler.current_lr for scheduler in manager.lr_schedulers]
        else:
            assert not manager.step_was_skipped
            assert sum(same) <= 2  # rounding may hide a small change of a bias
    assert all(scheduler.num_iter == 8 for scheduler in manager.lr_schedulers)
    assert all(torch.isfinite(full(p)).all() for p in model.parameters())


def test_an_overflow_on_one_rank_of_four(ranks):
    ranks(4).run(_overflow)
