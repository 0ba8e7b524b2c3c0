"""Blocks spread over the stages of a pipeline, against the same blocks on every rank."""

import pytest
import torch
from torch.distributed.tensor import DTensor

import meshwright as bmt
from meshwright import runtime
from tests.compat.bmtrain.pipeline_models import LAYERS, build, stages
from tests.compat.bmtrain.seed_models import DIM, IN

STEPS, PER_RANK = 10, 4


def batches():
    """Inputs and gates of every step and rank."""
    generator = torch.Generator().manual_seed(1)
    shape = (STEPS, runtime.world_size(), PER_RANK)
    return torch.randn(*shape, IN, generator=generator), torch.rand(*shape, 1, generator=generator)


def local_state(model, kind):
    """Whole copies of this rank's parameters or their gradients."""
    found = {name: getattr(p, kind) if kind else p for name, p in model.named_parameters()}
    return {
        name: (each.detach().full_tensor() if isinstance(each, DTensor) else each.detach()).clone()
        for name, each in found.items()
        if each is not None
    }


def trained(model):
    """Losses and norms of all steps; outputs, hidden states and gradients of the first."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    manager = bmt.optim.OptimManager(loss_scale=8.0)
    manager.add_optimizer(optimizer)
    seen, first = [], None
    for x, gate in zip(*batches(), strict=True):
        out, hidden = model(x[runtime.rank()], gate[runtime.rank()])
        # Of the inputs of blocks, too.
        loss = out.square().mean() + 0.1 * hidden[2].square().mean() + 0.1 * hidden[3].square().mean()
        manager.zero_grad()
        manager.backward(loss)
        norm = manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
        if first is None:
            first = [each.detach().clone() for each in (out, *hidden)], local_state(model, "grad")
        manager.step()
        seen.append((bmt.sum_loss(loss).item(), norm.item()))
    return torch.tensor(seen), first


def assert_trains_as_one_stage(pipe_size, micros=None):
    one = build()
    start = local_state(one, "")
    expected, (outputs, grads) = trained(one)
    reached = local_state(one, "")
    with stages(pipe_size, num_micro_batches=micros):
        model = build()
        begun = local_state(model, "")
        assert begun.keys() < start.keys()
        assert all(torch.equal(value, start[name]) for name, value in begun.items())
        found, (own_outputs, own_grads) = trained(model)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
        for ours, theirs in zip(own_outputs, outputs, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        scale = max(value.abs().max() for value in grads.values())
        assert max((value - grads[name]).abs().max() for name, value in own_grads.items()) < 1e-5 * scale
        moved = max((value - start[name]).abs().max() for name, value in reached.items())
        worst = max((value - reached[name]).abs().max() for name, value in local_state(model, "").items())
        assert moved > 0.1
        assert worst < 1e-5 * moved, worst / moved
        return one, model, (worst / moved).item()


def assert_inspected_and_saved(one, model, folder):
    """Complete on every rank; files are those of one stage, and load on any number."""
    found, expected = (bmt.inspect.inspect_model(each) for each in (model, one))
    assert sorted(line["name"] for line in found) == sorted(line["name"] for line in expected)
    expected = {line["name"]: line for line in expected}
    for line in found:
        assert line["shape"] == expected[line["name"]]["shape"]
        assert all(abs(line[key] - expected[line["name"]][key]) < 1e-4 for key in ("max", "min", "std", "grad_std"))
    file = folder / f"{runtime.world_size()}.pt"
    bmt.save(model, file)
    runtime.synchronize()
    stored = torch.load(file)
    assert list(stored) == list(one.state_dict())
    for name, value in local_state(one, "").items():
        torch.testing.assert_close(stored[name], value, rtol=1e-4, atol=1e-5)
    fresh, third = build(), build()
    bmt.load(fresh, file)
    third.load_state_dict(stored)
    for each in (fresh, third):
        assert all(torch.equal(value, stored[name]) for name, value in local_state(each, "").items())
    with pytest.raises(bmt.errors.CheckpointError, match="save_folder"):
        bmt.store.save_folder(model, folder / "folder")
    with pytest.raises(bmt.errors.CheckpointError, match="does not fit"):
        bmt.load(torch.nn.Linear(2, 2), file)
    return stored


def assert_groups(model):
    groups = dict(bmt.grouped_parameters(model))
    assert list(groups) == [None, "bias"]
    assert sum(len(group) for group in groups.values()) == len(list(model.parameters()))
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(torch.optim.Adam(model.parameters()))
    with pytest.raises(bmt.errors.CheckpointError, match="pipeline stages"):
        manager.state_dict(gather_opt=True)


def assert_refused(model):
    """Every rank raises the same, and goes on."""
    x, y, gate = torch.ones(4, DIM), torch.ones(4, DIM), torch.ones(4, 1)
    layers, bias = model.layers, torch.zeros(2 * DIM)
    with pytest.raises(bmt.errors.ModelError, match="unclear"):
        layers(x, y, torch.ones(4), bias=bias)
    with pytest.raises(bmt.errors.ModelError, match="names arguments"):
        layers(x, y, gate, bias=bias, batch_related=[5])
    with pytest.raises(bmt.errors.ModelError, match="not tensors with samples"):
        layers(x, y[:2], gate, bias=bias)
    with pytest.raises(bmt.errors.LaunchError, match="same pipeline alike"):
        layers(*(each[: 4 - 2 * runtime.rank()] for each in (x, y, gate)), bias=bias)
    with pytest.raises(bmt.errors.ModelError, match="cannot be divided"):
        layers(x[:1], y[:1], gate[:1], bias=bias)
    with pytest.raises(RuntimeError, match="must match"):  # in a block
        layers(x, y, gate, bias=torch.zeros(3))
    with pytest.raises(bmt.errors.ModelError, match="change the shape"):
        layers(x, y, torch.ones(4, 2, 1), bias=bias, batch_related=[0])
    with pytest.raises(bmt.errors.ModelError, match="does not hold it"):
        layers[LAYERS - 1 if runtime.stage_index() == 0 else 0](x)
    with pytest.raises(bmt.errors.ModelError, match="more stages than blocks"):
        bmt.PipelineTransformerBlockList([torch.nn.Linear(2, 2)])
    used = bmt.Block(torch.nn.Linear(2, 2))
    used(torch.ones(1, 2))
    with pytest.raises(bmt.errors.ModelError, match="has run"):
        bmt.PipelineTransformerBlockList([torch.nn.Linear(2, 2), used])
    moved = [bmt.Block(torch.nn.Linear(2, 2), True, 3, False, mode) for mode in ("BLOCK", "PIPE")]
    bmt.PipelineTransformerBlockList(moved)
    with pytest.raises(bmt.errors.ModelError, match="has moved to another stage"):
        moved[1 - runtime.stage_index()](torch.ones(1, 2))
    with pytest.raises(bmt.errors.ModelError, match="twice"):
        bmt.PipelineTransformerBlockList([bmt.Block(torch.nn.Linear(2, 2))] * 2)
    shared = torch.nn.Linear(2, 2)
    for twice in ([shared, shared], [bmt.Block(shared), bmt.Block(shared)]):
        with pytest.raises(bmt.errors.ModelError, match="would share"):
            bmt.PipelineTransformerBlockList(twice)
    with torch.no_grad():
        expected = layers(x, y, gate, bias=bias)
    assert not expected[0].requires_grad
    torch.testing.assert_close(layers(x, y, gate, bias=bias), expected)
    assert layers(x, y, gate, bias=bias)[0].requires_grad


def fail_once_on(rank, module):
    """Lets a module fail the next time it runs, on one rank only."""

    def fail(*_):
        handle.remove()
        raise ValueError(f"not on rank {rank}")

    if runtime.rank() == rank:
        handle = module.register_forward_pre_hook(fail)


def assert_one_failure_is_told_to_all(model):
    """Of one rank of a stage, in the first of its blocks; and wrong arguments of one rank. All ranks go on."""
    x, gate = torch.ones(4, IN), torch.ones(4, 1)
    expected = model(x, gate)[0]
    for rank in (1, runtime.world_size() - 1):
        own = [layer for layer in model.layers if isinstance(layer, bmt.Block)]
        fail_once_on(rank, own[0].up)
        with pytest.raises(ValueError, match=f"not on rank {rank}"):
            model(x, gate)
        torch.testing.assert_close(model(x, gate)[0], expected)
    first = torch.ones(4, DIM)
    with pytest.raises(bmt.errors.ModelError, match="not tensors with samples"):
        model.layers(first, None if runtime.rank() == 1 else first, gate, bias=torch.zeros(2 * DIM))


def _two_stages(folder):
    one, model, worst = assert_trains_as_one_stage(2, micros=4)
    with stages(2, num_micro_batches=4):
        assert_inspected_and_saved(one, model, folder)
        assert_groups(model)
        assert_refused(model)
    return worst


def test_two_stages_train_as_one(ranks, tmp_path):
    ranks(2).run(_two_stages, tmp_path)


def _stages_of_two(folder):
    one, model, worst = assert_trains_as_one_stage(2)
    with stages(2):
        assert_inspected_and_saved(one, model, folder)
        assert runtime.stage_axes().zero.mesh.tolist() == [2 * runtime.stage_index(), 2 * runtime.stage_index() + 1]
        held = sum(p.to_local().numel() for p in model.layers.parameters())
        assert_one_failure_is_told_to_all(model)
    return worst, held, sum(p.numel() for p in one.layers.parameters())


@pytest.mark.long
def test_two_stages_of_two_ranks_train_as_one(ranks, tmp_path):
    """A rank holds half of its stage's two blocks, or one."""
    for rank, (_, held, whole) in enumerate(ranks(4).run(_stages_of_two, tmp_path)):
        assert held == whole * (2 if rank < 2 else 1) / LAYERS / 2
