"""Blocks spread over the stages of a pipeline, against the same blocks on every rank."""

import pytest
import torch
from torch.distributed.tensor import DTensor

import meshwright as bmt
from meshwright import runtime
from tests.nn.pipeline_models import LAYERS, Model, build, stages
from tests.nn.seed_models import DIM, IN

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
        assert worst < 1e-5 * moved, (worst / moved)
        return one, model, (worst / moved).item()


def _trains(pipe_size, micros):
    *_, worst = assert_trains_as_one_stage(pipe_size, micros)
    return worst


def test_two_stages_train_as_one(ranks):
    print(ranks(2).run(_trains, 2, 4))
