"""Layers split over tensor groups, against the same layers whole."""

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

import meshwright as bmt
from meshwright import runtime
from meshwright.distributed import all_gather
from tests.nn.seed_models import gradients, largest_difference, weights
from tests.nn.tensor_models import LENGTH, VOCABULARY, build, build_plain, tensor_groups

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
    assert largest_difference(gradients(model), gradients(plain)) < 1e-5
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
    for each in (fresh, third):
        assert all(torch.equal(value, stored[name]) for name, value in weights(each).items())


def _trains(layouts, folder):
    with tensor_groups(2):
        for layout in layouts:
            model, plain = assert_trains_as_one_process(layout)
        assert_inspected(model, plain)
        assert_saved(model, plain, folder)
        parameters = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
        return sum(p.numel() for p in parameters), sum(p.to_local().numel() for p in parameters)


def test_two_tensor_ranks_train_as_one_process(ranks, tmp_path):
    ranks(2).run(_trains, ("split", "whole"), tmp_path)


def test_two_groups_of_two_train_as_one_process(ranks, tmp_path):
    for whole, held in ranks(4).run(_trains, ("split",), tmp_path):
        assert held < 0.4 * whole
