import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from meshwright import ConfigError, ModelError, runtime
from meshwright.compat.bmtrain.optim_manager import OptimManager
from meshwright.compat.bmtrain.overflow import any_nonfinite
from meshwright.errors import CheckpointError, NonFiniteError
from meshwright.lr_scheduler import warmup_decay
from meshwright.optim import AdamOffloadOptimizer, AdamOptimizer, GuardedOptimizer
from tests.optim.helpers import equal, loss_of, net, whole

INF = float("inf")


def managed(model, **options):
    """Torch's SGD and AdamW and our two Adams, each over a part of the model; two have schedulers."""
    manager = OptimManager(**options)
    sgd = torch.optim.SGD(model.first.parameters(), lr=0.05, momentum=0.9)
    manager.add_optimizer(sgd, torch.optim.lr_scheduler.StepLR(sgd, 2, 0.7))
    manager.add_optimizer(torch.optim.AdamW([model.second.weight], lr=0.02, fused=True))
    ours = AdamOptimizer([model.second.bias], lr=0.02)
    manager.add_optimizer(ours, warmup_decay(ours, num_steps=30, warmup_steps=3))
    manager.add_optimizer(AdamOffloadOptimizer(model.last.parameters(), lr=0.02))
    return manager


def run(model, manager, steps, start=0, clip=None):
    """The norms, and the weights afterwards; two micro-batches a step, two optimizers clipped together, one alone."""
    norms = []
    for step in range(start, start + steps):
        manager.zero_grad()
        for micro in (0, 1):
            manager.backward(loss_of(model, 2 * step + micro))
        if clip is not None:
            for optimizers in (manager.optimizers[:2], manager.optimizers[2:3]):
                groups = [group for optimizer in optimizers for group in optimizer.param_groups]
                norms.append(manager.clip_grad_norm(groups, clip).item())
        manager.step()
    return norms, whole(model)


def sharded_run(clip):
    model = net(sharded=True)
    return run(model, managed(model, loss_scale=2.0**10), 10, clip=clip)


def by_hand(clip):
    """The same without a manager, in one process."""
    model, norms = net(), []
    manager = managed(model)
    for step in range(10):
        manager.zero_grad()
        for micro in (0, 1):
            loss_of(model, 2 * step + micro).backward()
        first = [*model.first.parameters(), model.second.weight]
        for group in (first, [model.second.bias]):
            norms.append(torch.nn.utils.clip_grad_norm_(group, clip).item())
        for optimizer, scheduler in zip(manager.optimizers, manager.lr_schedulers, strict=True):
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
    return norms, whole(model)


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_four_kinds_of_optimizer_under_one_scale_train_like_plain_ones(ranks, world):
    true_norms, true_weights = by_hand(0.05)
    for norms, weights in [sharded_run(0.05)] if world == 1 else ranks(world).run(sharded_run, 0.05):
        assert norms == pytest.approx(true_norms, rel=1e-4)
        assert min(norms[::2]) > 0.05  # clipping did something
        for ours, theirs in zip(weights, true_weights, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-6)


@pytest.mark.parametrize("scale", [None, 4096.0])
def test_unscaling_happens_once_whatever_is_clipped_when_and_by_whom(scale):
    """Powers of two are exact, so every way ends in the same bits."""
    ways = {
        "none": lambda manager, model: None,
        "all": lambda manager, model: manager.clip_grad_norm(model.parameters(), INF),
        "twice": lambda manager, model: [manager.clip_grad_norm(model.parameters(), INF) for _ in range(2)],
        "some": lambda manager, model: manager.clip_grad_norm(manager.optimizers[1].param_groups, INF),
        "touched": lambda manager, model: [
            manager.clip_grad_norm(model.parameters(), INF),
            model.first.bias.grad.mul_(1),
        ],
    }
    ends = []
    for way in ways.values():
        model = net()
        manager = managed(model, loss_scale=scale)
        for step in range(3):
            manager.zero_grad()
            manager.backward(loss_of(model, step))
            way(manager, model)
            manager.step()
        ends.append(whole(model))
    assert all(equal(end, ends[0]) for end in ends)


def exact_norms():
    """Sharded, replicated and plain gradients on two meshes, with empty shards; against the concatenated vector."""
    world = runtime.world_size()
    flat = init_device_mesh("cpu", (world,), mesh_dim_names=("zero",))
    square = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "zero"))
    torch.manual_seed(1)
    values = [torch.randn(shape) for shape in [(7, 5), (1, 3), (16,), (3, 4), (2, 2)]]
    layouts = [
        (flat, [Shard(0)]),
        (flat, [Shard(0)]),
        (square, [Replicate(), Shard(0)]),
        (square, [Shard(1), Shard(0)]),
        None,
    ]
    parameters = []
    for value, layout in zip(values, layouts, strict=True):
        held = value if layout is None else distribute_tensor(value, *layout)
        parameters.append(nn.Parameter(torch.zeros_like(held)))
        parameters[-1].grad = held.clone() * 64
    manager = OptimManager(loss_scale=64.0)
    found = [manager.clip_grad_norm(parameters, INF, norm_type=p).item() for p in (2, 1, 3.0, "inf", INF)]
    true = torch.cat([value.flatten() for value in values])
    assert found == pytest.approx([true.norm(p).item() for p in (2, 1, 3.0, INF, INF)], rel=1e-6)
    manager.clip_grad_norm([{"params": parameters[:2]}, *parameters[2:]], 0.5)
    for parameter, value in zip(parameters, values, strict=True):
        clipped = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        torch.testing.assert_close(clipped / 64, value * 0.5 / true.norm())
    mine = parameters if runtime.rank() == 0 else []  # a pipeline stage without parameters: others' shards are missing
    assert manager.clip_grad_norm(mine, INF).item() > 0
    with pytest.raises(ConfigError, match="nothing to clip"):
        manager.clip_grad_norm([], 1.0)
    broken = nn.Parameter(torch.zeros(2))
    broken.grad = torch.tensor([1.0, float("nan") if runtime.rank() == 1 else 1.0])
    assert not torch.isfinite(manager.clip_grad_norm([broken], 1.0, "inf"))
    partial = nn.Parameter(DTensor.from_local(torch.ones(3), flat, [Replicate()]))
    partial.grad = DTensor.from_local(torch.ones(3), flat, [Partial()])
    with pytest.raises(ModelError, match="partial sum"):
        manager.clip_grad_norm([partial], 1.0)


@pytest.mark.parametrize("world", [2, 4])
def test_norms_are_those_of_one_vector(ranks, world):
    ranks(world).run(exact_norms)


def overflow_on_one_rank():
    """fp16 parameters in FSDP2; rank 2 gets an infinite gradient in one of two optimizers."""
    model = net(torch.float16, sharded=True)
    manager = OptimManager(loss_scale=2.0**8, loss_scale_steps=3)
    first = AdamOptimizer(model.first.parameters(), lr=0.02)
    second = torch.optim.SGD([*model.second.parameters(), *model.last.parameters()], lr=0.01)
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (first, second)]
    for each, schedule in zip((first, second), schedules, strict=True):
        manager.add_optimizer(each, schedule)
    story = []
    for step in range(5):
        manager.backward(loss_of(model, step))
        if step == 1 and runtime.rank() == 2:
            gradient = model.first.weight.grad.to_local()
            gradient.view(-1)[0] = INF
        if step == 2:
            manager.clip_grad_norm(first.param_groups, 1.0)
        before = whole(model)
        manager.step()
        moved = not equal(whole(model), before)
        lrs = [schedule.get_last_lr()[0] for schedule in schedules]
        story.append(
            (manager.step_was_skipped, moved, manager.loss_scale, int(first.state[model.first.weight]["step"]), *lrs)
        )
        if manager.step_was_skipped:
            assert all(parameter.grad is None for parameter in model.parameters())
        manager.zero_grad()
    return story


def test_an_overflow_on_one_rank_of_four_stops_everybody_once(ranks):
    for story in ranks(4).run(overflow_on_one_rank):
        assert story == [
            (False, True, 256, 1, 0.01, 0.005),
            (True, False, 128, 1, 0.01, 0.005),
            (False, True, 128, 2, 0.005, 0.0025),
            (False, True, 128, 3, 0.0025, 0.00125),
            (False, True, 256, 4, 0.00125, 0.000625),
        ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [INF, -INF, float("nan")])
@pytest.mark.parametrize("clipped", [False, True])
def test_every_type_and_kind_of_bad_gradient_is_seen(dtype, bad, clipped, capsys):
    weights = [nn.Parameter(torch.ones(5, dtype=dtype)) for _ in range(2)]
    manager = OptimManager(loss_scale=8.0, min_loss_scale=3.0)
    manager.add_optimizer(AdamOptimizer(weights[:1]))
    manager.add_optimizer(torch.optim.SGD(weights[1:], lr=1.0))
    said = ["change scale from 8.0 to 4.0", "change scale from 4.0 to 3.0", "step skipped; the scale stays at 3.0"]
    for place, line in enumerate(said):
        manager.backward(sum(weight.float().sum() for weight in weights))
        weights[place % 2].grad[3] = bad
        if clipped:
            manager.clip_grad_norm(weights, 1.0, "inf" if place == 1 else 2)
        manager.step()
        assert manager.step_was_skipped
        assert capsys.readouterr().out == f"Gradient overflow, {line}\n"
    assert all(torch.equal(weight, torch.ones_like(weight)) for weight in weights)


def test_gradients_are_looked_at_once_unless_somebody_wrote_to_them(monkeypatch):
    """A clip's norm tells that its gradients are finite; a version tells that they still are those."""
    looked = []

    def counting(tensors):
        looked.append(len(tensors))
        return any_nonfinite(tensors)

    monkeypatch.setattr("meshwright.compat.bmtrain.overflow.any_nonfinite", counting)
    weights = [nn.Parameter(torch.ones(5)) for _ in range(3)]
    manager = OptimManager(loss_scale=8.0)
    manager.add_optimizer(AdamOptimizer(weights))
    for bad in (False, True):
        manager.zero_grad()
        manager.backward(sum(weight.sum() for weight in weights))
        manager.clip_grad_norm(weights[:2], 1.0)
        if bad:
            weights[0].grad[3] = INF
        manager.step()
        assert manager.step_was_skipped == bad
    assert looked == [1, 2]
    (weights[0].sum() * INF).backward()
    assert not torch.isfinite(manager.clip_grad_norm(weights, 1.0))
    for weight in weights:
        weight.grad = None  # somebody has seen the norm and passes over this batch
    manager.backward(weights[0].sum())
    manager.step()
    assert not manager.step_was_skipped


@pytest.mark.parametrize("size", [1, 3, 1000, 100_003])
def test_the_detector_is_right_at_every_place(size):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        values = torch.full((size,), torch.finfo(dtype).max, dtype=dtype)
        assert not any_nonfinite([values, torch.zeros(0)])
        for place in {0, size // 2, size - 1}:
            for bad in (INF, float("nan")):
                broken = values.clone()
                broken[place] = bad
                assert any_nonfinite([values, broken]) == 1


def bad_gradient_without_a_scale():
    model = net(torch.bfloat16, sharded=True)
    manager = OptimManager()
    manager.add_optimizer(AdamOptimizer(model.parameters()))
    before = whole(model)
    manager.backward(loss_of(model, 0) * (float("nan") if runtime.rank() == 0 else 1.0))
    with pytest.raises(NonFiniteError, match=r"not finite.*Expected.*Got.*What to do"):
        manager.step()
    assert equal(whole(model), before)
    assert not manager.optimizers[0].state
    manager.zero_grad()
    manager.backward(loss_of(model, 1))
    manager.step()  # it can go on
    assert not equal(whole(model), before)
    with pytest.raises(CheckpointError, match="not of this manager"):
        manager.load_state_dict({**manager.state_dict(), "optimizers": []})


def test_without_a_scale_a_bad_gradient_is_an_error_on_every_rank(ranks):
    ranks(2).run(bad_gradient_without_a_scale)


def bad_step(manager, weight, value=INF):
    weight.grad = torch.full_like(weight, value)
    manager.scale_loss(weight.sum())
    manager.step()


def test_what_may_be_done_about_bad_gradients(capsys):
    weight = nn.Parameter(torch.ones(2))
    skipping = OptimManager(on_nonfinite="skip", max_skips=3)
    skipping.add_optimizer(torch.optim.SGD([weight], lr=1.0))
    for _ in range(2):
        bad_step(skipping, weight)
    bad_step(skipping, weight, 0.5)  # a good step: the count begins anew
    assert not skipping.step_was_skipped
    for _ in range(2):
        bad_step(skipping, weight)
    with pytest.raises(NonFiniteError, match="3 steps in a row"):
        bad_step(skipping, weight)
    assert weight.tolist() == [0.5, 0.5]
    assert "no loss scale to lower" in capsys.readouterr().out
    fixed = OptimManager(16.0, loss_scale_steps=None)
    fixed.add_optimizer(torch.optim.SGD([weight], lr=1.0))
    bad_step(fixed, weight)
    bad_step(fixed, weight, 8.0)
    assert weight.tolist() == [0.0, 0.0]
    assert (fixed.loss_scale, fixed.on_nonfinite) == (16.0, "skip")
    ignoring = OptimManager(16.0, loss_scale_steps=None, on_nonfinite="ignore")
    ignoring.add_optimizer(torch.optim.SGD([weight], lr=1.0))
    bad_step(ignoring, weight, 16.0)
    assert weight.tolist() == [-1.0, -1.0]
    bad_step(ignoring, weight)
    assert weight.tolist() == [-INF, -INF]


def test_gradients_that_were_scaled_by_hand_count_as_scaled(capfd):
    weights = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    managers = [OptimManager(8.0) for _ in weights]
    for weight, manager in zip(weights, managers, strict=True):
        manager.add_optimizer(torch.optim.SGD([weight], lr=0.5))
        manager.step()  # no gradient, nothing to scale
    assert "loss scale" not in capfd.readouterr().err
    for step in range(3):
        for manager in managers:
            manager.zero_grad()
        managers[0].backward(weights[0].square().sum())
        (managers[1].loss_scale * weights[1].square().sum()).backward()
        weights[2].grad = 8.0 * 2.0 * weights[2].detach()
        for manager, weight in zip(managers, weights, strict=True):
            assert manager.clip_grad_norm([weight], 0.1).item() == pytest.approx(0.95**step * 8**0.5, rel=0.2)
            manager.step()
    assert weights[0].tolist() == weights[1].tolist() == weights[2].tolist()
    assert weights[0][0].item() == pytest.approx(1 - 3 * 0.05 / 2**0.5, rel=1e-4)
    told = capfd.readouterr().err
    assert told.count("gradients are divided by the loss scale 8.0") == 2  # once for each of the two managers


def test_the_loss_is_scaled_in_fp32_and_divided_by_grad_scale():
    manager = OptimManager(2.0**17, grad_scale=4.0)
    scaled = manager.scale_loss(torch.tensor(3.0, dtype=torch.float16))
    assert (scaled.dtype, scaled.item()) == (torch.float32, 3 * 2.0**15)
    assert OptimManager().scale_loss(torch.tensor(3.0)).item() == 3


def test_what_cannot_be_managed_is_refused():
    weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    manager = OptimManager()
    manager.add_optimizer(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))
    another = AdamOptimizer([other])
    refused = {
        "updated by another": (torch.optim.AdamW([other, weight]), None),
        "needs arguments, such as a closure": (torch.optim.LBFGS([other]), None),
        "decides about its steps": (GuardedOptimizer(torch.optim.SGD([other], lr=1.0)), None),
        "belongs to another": (another, torch.optim.lr_scheduler.StepLR(optimizer, 1)),
        "step needs arguments": (another, torch.optim.lr_scheduler.ReduceLROnPlateau(another)),
    }
    for message, pair in refused.items():
        with pytest.raises(ConfigError, match=message):
            manager.add_optimizer(*pair)
    assert manager.optimizers == [optimizer]
    for bad in (
        {"on_nonfinite": "stop"},
        {"loss_scale": 8.0, "on_nonfinite": "raise"},
        {"max_skips": 0},
        {"grad_scale": 0.0},
    ):
        with pytest.raises(ConfigError, match=r"Expected.*Got.*What to do"):
            OptimManager(**bad)
    for arguments in ((0.0,), (1.0, 0.0), (1.0, -2)):
        with pytest.raises(ConfigError, match="to clip at is none"):
            manager.clip_grad_norm([weight], *arguments)
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    manager.add_optimizer(torch.optim.SparseAdam(embedding.parameters()))
    weight.grad = torch.ones(2)
    with pytest.raises(ModelError, match="sparse"):
        manager.step()
    assert weight.tolist() == [1.0, 1.0]


def test_bf16_end_to_end_learns():
    model = net(torch.bfloat16)
    manager = OptimManager()
    manager.add_optimizer(AdamOffloadOptimizer(model.parameters(), lr=0.02))
    losses = []
    for step in range(30):
        loss = loss_of(model, step)
        losses.append(loss.item())
        manager.zero_grad()
        manager.backward(loss)
        manager.clip_grad_norm(model.parameters(), 1.0)
        manager.step()
    assert losses[-1] < 0.2 * losses[0]


def test_a_step_waits_once_and_a_clip_never(monkeypatch):
    """What a device would make the host wait for: reading a tensor's value."""
    model = net()
    manager = OptimManager(8.0)
    manager.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    manager.backward(loss_of(model, 0))
    waits = []
    for name in ("item", "tolist", "__bool__", "__float__", "__int__"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda t, original=original, name=name: waits.append(name) or original(t)
        )
    manager.clip_grad_norm(model.parameters(), 1.0)
    assert waits == []
    manager.step()
    assert waits == ["tolist"]


def resumable(seed, sharded, **changes):
    model = net(sharded=sharded, seed=seed)
    manager = managed(model, **{"loss_scale": 2.0**6, "loss_scale_steps": 4, **changes})
    return model, manager


def start_and_save():
    """Five steps, then both kinds of state dict and ten more steps."""
    model, manager = resumable(3, sharded=True)
    run(model, manager, 5, clip=0.05)
    local = copy.deepcopy(manager.state_dict())
    gathered = manager.state_dict(gather_opt=True)
    weights = whole(model)
    run(model, manager, 10, start=5, clip=0.05)
    goes_on = whole(model), manager.loss_scale, manager.optimizers[0].param_groups[0]["lr"]
    resumed = []
    for saved in (local, gathered):
        resumed.append(resume(weights, saved))
    return weights, gathered, goes_on, resumed


def resume(weights, saved):
    """Goes on in a run that was built with other numbers and had begun otherwise."""
    model, manager = resumable(
        4, runtime.world_size() > 1, loss_scale_steps=99, loss_scale_factor=3.0, max_loss_scale=64.0
    )
    for optimizer in manager.optimizers:
        optimizer.param_groups[0]["lr"] = 0.7
    run(model, manager, 1, start=50)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), weights, strict=True):
            local = (
                distribute_tensor(value, parameter.device_mesh, parameter.placements)
                if isinstance(parameter, DTensor)
                else value
            )
            parameter.copy_(local)
    manager.load_state_dict(saved)
    run(model, manager, 10, start=5, clip=0.05)
    return whole(model), manager.loss_scale, manager.optimizers[0].param_groups[0]["lr"]


def same_run(found, expected, atol):
    for ours, theirs in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)
    assert found[1:] == expected[1:]


def test_resumed_on_as_many_ranks_is_bit_equal_and_on_others_the_same_run(ranks, tmp_path):
    answers = ranks(4).run(start_and_save)
    for _, _, goes_on, resumed in answers:
        for found in resumed:
            same_run(found, goes_on, atol=0)
    weights, gathered, goes_on, _ = answers[0]
    assert [len(answer[1]["optimizers"][0]["state"]) > 0 for answer in answers] == [True, False, False, False]
    torch.save(gathered, tmp_path / "manager.pt")
    loaded = torch.load(tmp_path / "manager.pt", weights_only=True)
    for found in [*ranks(2).run(resume, weights, loaded), resume(weights, loaded)]:
        same_run(found, goes_on, atol=5e-6)
    plain = net()
    torch.optim.AdamW([plain.second.weight]).load_state_dict(loaded["optimizers"][1])
    torch.optim.SGD(plain.first.parameters()).load_state_dict(loaded["optimizers"][0])
    with pytest.raises(CheckpointError, match="on other ranks than 0"):
        resume(weights, answers[1][1])
    loaded["optimizers"][1]["state"][0]["exp_avg"] = torch.zeros(3)
    with pytest.raises(CheckpointError, match="exp_avg of shape"):
        resume(weights, loaded)


def test_a_manager_of_other_parts_is_refused_and_unchanged():
    model, manager = resumable(3, sharded=False)
    run(model, manager, 2)
    saved = copy.deepcopy(manager.state_dict())
    other = OptimManager(2.0)
    other.add_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    for wrong in (
        saved,
        {"loss_scale": 1.0},
        {**saved, "optimizers": saved["optimizers"][1:2], "lr_schedulers": [None]},
    ):
        with pytest.raises(CheckpointError, match=r"Expected.*Got.*What to do"):
            other.load_state_dict(wrong)
        assert other.loss_scale == 2
