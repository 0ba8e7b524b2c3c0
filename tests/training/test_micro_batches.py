"""A last batch of an epoch that does not divide into micro-batches trains as in one process."""

import copy

import pytest
import torch
import torch.nn.functional as F

import meshwright as mw
from tests import tiny

EPOCHS = 6  # of two batches: one of 4 samples per rank, and one of 3
LR = {"lr": 0.01}


def of_tokens(inputs):
    return (inputs % 3 != 0).sum()


def weighted(inputs, output):
    """A mean over some tokens only, as with labels of -100."""
    labels = inputs.masked_fill(inputs % 3 == 0, -100)
    return F.cross_entropy(output.flatten(0, 1), labels.flatten(), ignore_index=-100)


def data():
    return tiny.Tokens(7 * mw.world_size()), 4 * mw.world_size()


def compared(strategy, micro_batches, loss, weight):
    """The largest differences of losses and weights from one process, and how far its weights moved."""
    model = tiny.build("plain")
    start, alone = copy.deepcopy(model), copy.deepcopy(model)
    dataset, batch_size = data()
    job = mw.accelerate(
        model, torch.optim.SGD, dataset, loss, strategy=strategy, optim_args=LR, loss_weight=weight,
        num_micro_batches=micro_batches, dataloader_args={"batch_size": batch_size, "shuffle": False},
    )  # fmt: skip
    losses = [job.step(batch).loss.item() for _ in range(EPOCHS) for batch in job.dataloader]
    optimizer, expected = torch.optim.SGD(alone.parameters(), **LR), []
    for ids in dataset.ids.split(batch_size) * EPOCHS:
        optimizer.zero_grad()
        value = loss(ids, alone(ids))
        value.backward()
        optimizer.step()
        expected.append(value.item())
    assert len(losses) == len(expected) == 12
    whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in job.model.parameters()]
    return (
        max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
        max((a - b).abs().max().item() for a, b in zip(whole, alone.parameters(), strict=True)),
        max((a - b).abs().max().item() for a, b in zip(start.parameters(), alone.parameters(), strict=True)),
    )


CASES = [
    (1, [], 4, tiny.loss_func, None), (2, [], 2, tiny.loss_func, None), (2, [], 4, tiny.loss_func, None),
    (2, ["zero1"], 2, tiny.loss_func, None), (2, ["zero2"], 2, tiny.loss_func, None),
    (2, ["fsdp"], 4, tiny.loss_func, None), (2, ["fsdp", "checkpoint"], 2, weighted, of_tokens),
    (4, [("parallel_mode", {"data": 2, "zero": 2}), "zero2"], 2, tiny.loss_func, None),
]  # fmt: skip


@pytest.mark.parametrize(("world", "strategy", "micro_batches", "loss", "weight"), CASES)
def test_batches_that_do_not_divide_are_those_of_one_process(ranks, world, strategy, micro_batches, loss, weight):
    for losses, weights, moved in ranks(world).run(compared, strategy, micro_batches, loss, weight):
        assert losses < 2e-6
        assert weights < 1e-6 < 1e-3 < moved
