"""Layers split over tensor groups, against the same layers whole."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

import meshwright as bmt
from meshwright import runtime
from meshwright.comm import all_gather
from meshwright.compat.bmtrain import distributed_module as roots
from meshwright.optim import local_tensor
from tests.compat.bmtrain.seed_models import gradients, largest_difference, weights
from tests.compat.bmtrain.tensor_models import LENGTH, VOCABULARY, build, build_plain, tensor_groups

STEPS, PER_GROUP = 10, 4


def batches(num_groups):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCABULARY, (STEPS, num_groups, PER_GROUP, LENGTH + 1), generator=generator)


def target_of(ids):
    """The next token of each; a row of nothing, so that groups differ in what counts."""
    target = ids[..., 1:].clone()
    target[..., -1] = torch.where(target[..., -1] < VOCABULARY // 2, -100, target[..., -1])
    return target.flatten()


def trained_plainly(model, data):
    """The mean over tensor groups of their losses; the norms and losses of all steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for step in data:
        loss = sum(F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), target_of(ids)) for ids in step) / len(step)
        optimizer.zero_grad()
        loss.backward()
        seen.append((loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()))
        optimizer.step()
    return torch.tensor(seen)


def trained(model, data):
    group = runtime.config["tp_zero_rank"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    loss_func = bmt.loss.FusedCrossEntropy(parallel=True)
    seen = []
    for step in data:
        loss = loss_func(model(step[group, :, :-1]).flatten(0, 1), target_of(step[group]))
        manager.zero_grad()
        manager.backward(loss)
        norm = manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
        seen.append((bmt.sum_loss(loss).item(), norm.item()))
        manager.step()
    return torch.tensor(seen)


def assert_trains_as_one_process(layout):
    data = batches(runtime.config["tp_zero_size"])
    plain, model = build_plain(), build(layout)
    start = weights(plain)
    assert all(torch.equal(value, start[name]) for name, value in weights(model).items())
    expected, found = trained_plainly(plain, data), trained(model, data)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    assert expected[0, 1] > 1.0 > expected[-1, 0] - expected[0, 0]
    found, expected = gradients(model), gradients(plain)
    assert largest_difference(found, {name: expected[name] for name in found}) < 1e-5  # a stage has its own blocks only
    moved = max((value - start[name]).abs().max() for name, value in weights(plain).items())
    assert moved > 0.1
    for name, value in weights(model).items():
        assert (value - weights(plain)[name]).abs().max() < 1e-5 * moved, (layout, name)
    return model, plain


def assert_inspected(model, plain):
    found, expected = (bmt.inspect.inspect_model(each) for each in (model, plain))
    expected = {line["name"]: line for line in expected}
    assert {line["name"] for line in found} == set(expected)
    for line in found:
        for key, value in line.items():
            same = value == expected[line["name"]][key] or abs(value - expected[line["name"]][key]) < 1e-5
            assert same, (line["name"], key, value, expected[line["name"]][key])


def assert_saved(model, plain, folder):
    """Full shapes in the file; into plain torch, and back into fresh shards."""
    file = folder / f"{runtime.world_size()}.pt"
    bmt.save(model, file)
    runtime.synchronize()
    stored = torch.load(file)
    assert {name: value.shape for name, value in stored.items()} == {
        name: value.shape for name, value in plain.state_dict().items()
    }
    assert all(torch.equal(value, stored[name]) for name, value in weights(model).items())
    other = build_plain()
    other.load_state_dict(stored)
    fresh, third = build("split"), build("split")
    bmt.load(fresh, file)
    third.load_state_dict(stored)  # full tensors
    ids = batches(1)[0, 0, :, :-1]
    logits = all_gather(fresh(ids), runtime.tensor_mesh()).movedim(0, -2).flatten(-2)
    torch.testing.assert_close(logits, other(ids), rtol=1e-5, atol=1e-5)
    with tensor_groups(2):  # of one stage
        other_layout = build("whole")
        bmt.load(other_layout, file)
        assert len(weights(other_layout)) == len(stored)
    for each in (fresh, third, other_layout):
        assert all(torch.equal(value, stored[name]) for name, value in weights(each).items())


def assert_overflow_is_agreed(layout):
    """Half precision under a loss scale: a gradient that is infinite on one stage is passed over on all of them."""
    model = build(layout).half()
    manager = bmt.optim.OptimManager(loss_scale=256.0)
    manager.add_optimizer(bmt.optim.AdamOptimizer(model.parameters(), lr=1e-2))
    loss_func, (first, *_) = bmt.loss.FusedCrossEntropy(parallel=True), batches(runtime.config["tp_zero_size"])
    losses = []
    for step in range(4):
        ids = first[runtime.config["tp_zero_rank"]]
        loss = loss_func(model(ids[:, :-1]).flatten(0, 1), target_of(ids))
        losses.append(bmt.sum_loss(loss.float()).item())
        manager.zero_grad()
        manager.backward(loss)
        if step == 1 and runtime.rank() == runtime.world_size() - 1:
            list(model.layers.parameters())[-1].grad.to_local().fill_(float("inf"))
        manager.step()
        assert manager.step_was_skipped == (step == 1)
        assert manager.loss_scale == (256.0 if step < 1 else 128.0)
    assert losses[0] > losses[1] == losses[2] > losses[3]
    other = bmt.optim.OptimManager(loss_scale=1.0)
    other.add_optimizer(bmt.optim.AdamOptimizer(build(layout).half().parameters(), lr=1.0))
    other.load_state_dict(manager.state_dict())
    assert other.loss_scale == 128.0
    saved, loaded = (each.optimizers[0].state_dict()["state"] for each in (manager, other))
    assert len(saved) == len(list(model.parameters()))
    for key, state in saved.items():
        for name, value in state.items():
            assert torch.equal(local_tensor(torch.as_tensor(value)), local_tensor(torch.as_tensor(loaded[key][name])))


def _trains(layouts, folder, pipe_size=1):
    with tensor_groups(2, pipe_size=pipe_size):
        for layout in layouts:
            roots._seeded = None  # as in a new process
            model, plain = assert_trains_as_one_process(layout)
        states = runtime.gather_objects(torch.get_rng_state().tolist())
        assert len({str(state) for state in states}) == runtime.config["tp_zero_size"]  # a group's ranks draw alike
        assert_inspected(model, plain)
        assert_saved(model, plain, folder)
        if pipe_size > 1:
            assert_overflow_is_agreed(layout)
        parameters = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
        return sum(p.numel() for p in parameters), sum(p.to_local().numel() for p in parameters)


def test_two_tensor_ranks_train_as_one_process(ranks, tmp_path):
    ranks(2).run(_trains, ("split", "whole"), tmp_path)


def _other_ways():
    """What training did not do: accumulate, freeze and thaw, other levels and optimizers; models of whole layers."""
    with tensor_groups(2):
        ids, target = batches(1)[0, 0, :, :-1], target_of(batches(1)[0, 0])
        loss_func = bmt.loss.FusedCrossEntropy(parallel=True)

        def backward(model):
            loss_func(model(ids).flatten(0, 1), target).backward()

        plain = build_plain()
        F.cross_entropy(plain(ids).flatten(0, 1), target).backward()
        expected = gradients(plain)
        for layout, level in (("split", 2), ("whole", 1)):
            model = build(layout, level)
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("ln_attn" not in name and "project_k" not in name)
            backward(model)
            found = gradients(model)
            assert set(expected) - set(found) == {name for name in expected if "ln_attn" in name or "project_k" in name}
            assert largest_difference(found, {name: expected[name] for name in found}) < 1e-5
            model.requires_grad_(True)
            model.zero_grad()
            with bmt.no_sync(model):
                backward(model)
            backward(model)
            assert largest_difference(gradients(model), {name: 2 * value for name, value in expected.items()}) < 1e-5
        _assert_optimizers()
        _assert_wrapped(ids, target)


def _assert_optimizers():
    """Half precision, an offloaded state, a loss scale; then on from the state of rank 0."""
    data, loss_func = batches(1)[:3], bmt.loss.FusedCrossEntropy(parallel=True)
    runs = []
    for kind in (bmt.optim.AdamOptimizer, bmt.optim.AdamOffloadOptimizer):
        model = build("split").bfloat16()
        manager = bmt.optim.OptimManager(loss_scale=64.0)
        manager.add_optimizer(kind(model.parameters(), lr=1e-2))
        for step in data:
            loss = loss_func(model(step[0, :, :-1]).flatten(0, 1), target_of(step[0]))
            manager.zero_grad()
            manager.backward(loss)
            manager.step()
        runs.append((model, manager))
    for name, value in weights(runs[0][0]).items():
        torch.testing.assert_close(weights(runs[1][0])[name], value, rtol=1e-2, atol=1e-3)
    other = bmt.optim.OptimManager(loss_scale=1.0)
    other.add_optimizer(bmt.optim.AdamOffloadOptimizer(runs[1][0].parameters(), lr=1.0))
    other.load_state_dict(runs[1][1].state_dict(gather_opt=True))
    before, after = (each.state_dict(gather_opt=True)["optimizers"][0]["state"] for each in (runs[1][1], other))
    assert before.keys() == after.keys()
    assert len(before) > 0 or runtime.rank() > 0
    for key, state in before.items():
        assert all(torch.equal(value, after[key][name]) for name, value in state.items() if torch.is_tensor(value))


def _assert_wrapped(ids, target):
    """A model of ordinary layers, whose ranks have samples of their own: the mean over all of them."""
    plain, model = build_plain(), bmt.BMTrainModelWrapper(build_plain())
    F.cross_entropy(plain(ids).flatten(0, 1), target, reduction="sum").backward()
    mine = ids.chunk(2)[runtime.rank()], target.chunk(2)[runtime.rank()]
    F.cross_entropy(model(mine[0]).flatten(0, 1), mine[1], reduction="sum").mul(2).backward()
    assert largest_difference(gradients(model), gradients(plain)) < 1e-5


@pytest.mark.long
def test_other_ways_to_train_on_tensor_groups(ranks):
    ranks(2).run(_other_ways)


@pytest.mark.long
def test_two_groups_of_two_train_as_one_process(ranks, tmp_path):
    for whole, held in ranks(4).run(_trains, ("split",), tmp_path):
        assert held < 0.4 * whole


@pytest.mark.long  # two groups of two, and two stages of two ranks, stay
def test_two_stages_of_two_tensor_ranks_train_as_one_process(ranks, tmp_path):
    ranks(4).run(_trains, ("split", "whole"), tmp_path, pipe_size=2)


@pytest.mark.long
def test_two_stages_of_two_groups_train_as_one_process(ranks, tmp_path):
    ranks(8).run(_trains, ("split", "whole"), tmp_path, pipe_size=2)
