"""A last batch of an epoch that divides neither into micro-batches nor among ranks trains as in one process."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F

import meshwright as mw
from meshwright.data import global_batch_loader
from meshwright.store.model_file import whole_state_dict
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
    (1, [], 4, tiny.loss_func, None), (2, [], 2, tiny.loss_func, None),
    (2, ["fsdp", "checkpoint"], 2, weighted, of_tokens),
    (4, [("parallel_mode", {"data": 2, "zero": 2}), "zero2"], 2, tiny.loss_func, None),
    *(pytest.param(2, strategy, number, tiny.loss_func, None, marks=pytest.mark.long)
      for strategy, number in (([], 4), (["zero1"], 2), (["zero2"], 2), (["fsdp"], 4))),
]  # fmt: skip


@pytest.mark.parametrize(("world", "strategy", "micro_batches", "loss", "weight"), CASES)
def test_batches_that_do_not_divide_are_those_of_one_process(ranks, world, strategy, micro_batches, loss, weight):
    for losses, weights, moved in ranks(world).run(compared, strategy, micro_batches, loss, weight):
        assert losses < 2e-6
        assert weights < 1e-6 < 1e-3 < moved


SAMPLES = 37


def uneven(strategy, batch_size, micro_batches, loss, weight, epochs):
    """Losses of training and validation, and weights, beside one process; and what metrics get to see."""
    torch.manual_seed(3)
    model = tiny.plain(num_layers=4)
    start, alone = copy.deepcopy(model), copy.deepcopy(model)
    dataset, momentum = tiny.Tokens(SAMPLES), {**LR, "momentum": 0.9}
    job = mw.accelerate(
        model, torch.optim.SGD, dataset, loss, strategy=strategy, optim_args=momentum, loss_weight=weight,
        num_micro_batches=micro_batches, dataloader_args={"batch_size": batch_size, "shuffle": False},
    )  # fmt: skip
    losses = [job.step(batch).loss.item() for _ in range(epochs) for batch in job.dataloader]
    optimizer, expected = torch.optim.SGD(alone.parameters(), **momentum), []
    for ids in dataset.ids.split(batch_size) * epochs:
        optimizer.zero_grad()
        value = loss(ids, alone(ids))
        value.backward()
        optimizer.step()
        expected.append(value.item())
    assert len(losses) == len(expected) >= 10
    whole = whole_state_dict(job.model)
    seen, validated = metrics(job, dataset, batch_size)
    with torch.no_grad():
        assert validated == pytest.approx([loss(ids, alone(ids)).item() for ids in dataset.ids.split(batch_size)], 1e-5)
        assert seen["logits"] == pytest.approx(alone(dataset.ids).mean((1, 2)).tolist(), abs=1e-5)
    assert torch.equal(seen["ids"], dataset.ids)
    assert torch.equal(seen["sums"], dataset.ids.sum(1).bfloat16())
    first = start.state_dict()
    pairs = [(whole.get(name, each), each, first[name]) for name, each in alone.state_dict().items()]
    return (
        max(abs(a - b) / b for a, b in zip(losses, expected, strict=True)),
        sum((a - b).square().sum() for a, b, _ in pairs).sqrt().item(),
        sum((b - c).square().sum() for _, b, c in pairs).sqrt().item(),
    )


def metrics(job, dataset, batch_size):
    order = {"batch_size": batch_size, "shuffle": False}
    loader = global_batch_loader(dataset, loader_args=order, replica=job.replica, num_replicas=job.num_replicas)
    parts, losses, logits = [], [], []
    for ids in loader:
        losses.append(job.evaluate(ids).item())
        with torch.no_grad():
            logits += job.gather_for_metrics(job.model(ids)).mean((1, 2)).tolist()
        parts.append(job.gather_for_metrics({"ids": ids, "sums": ids.sum(1).bfloat16()}))
        number = job.gather_for_metrics([ids.sum()])[0]
        assert number.shape == (() if job.num_replicas == 1 else (job.num_replicas,))
    return {key: torch.cat([each[key] for each in parts]) for key in parts[0]} | {"logits": logits}, losses


def pipelines(schedule="1f1b", **axes):
    return [("parallel_mode", {**axes, "pipeline": 2}), ("pipeline_parallel", {"schedule": schedule})]


UNEVEN = [
    (1, [], 8, 4, tiny.loss_func, None), (2, ["fsdp"], 8, 4, tiny.loss_func, None),
    # The last batch: one sample, and repeats of it on two ranks.
    pytest.param(3, [], 9, 2, tiny.loss_func, None, marks=pytest.mark.long),
    (3, ["zero2"], 9, 3, weighted, of_tokens),
    # 5 samples at the end, in pipelines of micro-batches of 2; 3 and a repeat for each of two; and token weights.
    (2, pipelines(), 8, 4, tiny.loss_func, None),
    pytest.param(4, pipelines(data=2), 8, 2, tiny.loss_func, None, marks=pytest.mark.long),
    pytest.param(4, ["zero2", *pipelines(zero=2)], 8, 4, weighted, of_tokens, marks=pytest.mark.long),
    pytest.param(2, pipelines("interleaved"), 8, 4, tiny.loss_func, None, marks=pytest.mark.long),
    pytest.param(2, pipelines("gpipe"), 8, 8, weighted, of_tokens, marks=pytest.mark.long),
]  # fmt: skip


@pytest.mark.parametrize(("world", "strategy", "batch_size", "micro_batches", "loss", "weight"), UNEVEN)
def test_samples_that_fill_the_last_batch_count_nowhere(
    ranks, world, strategy, batch_size, micro_batches, loss, weight
):
    for losses, weights, moved in ranks(world).run(uneven, strategy, batch_size, micro_batches, loss, weight, 2):
        assert losses < 1e-5
        assert weights < 1e-5 * moved


def values_that_do_not_fit():
    job = mw.accelerate(
        tiny.build("plain"), None, tiny.Tokens(SAMPLES), tiny.loss_func, dataloader_args={"batch_size": 8}
    )
    for ids in job.dataloader:
        with pytest.raises(mw.DataError, match="4 rows"):
            job.gather_for_metrics(ids.flatten())
        with pytest.raises(mw.DataError, match="differ in shape"):
            job.gather_for_metrics(ids[:, mw.rank() :])
        break


def test_values_of_other_rows_or_shapes_are_refused(ranks):
    ranks(2).run(values_that_do_not_fit)


def read_ahead():
    """Losses of an epoch and of the next one, each batch taken when the one behind it has been read already."""
    job = mw.accelerate(tiny.build("plain"), None, tiny.Tokens(SAMPLES), tiny.loss_func)
    order = {"batch_size": 8, "shuffle": False}
    loader = global_batch_loader(
        tiny.Tokens(SAMPLES), loader_args=order, replica=job.replica, num_replicas=job.num_replicas
    )
    expected = [job.evaluate(ids).item() for ids in loader]
    batches = itertools.chain(loader, loader)
    found, held = [], next(batches)
    for ahead in batches:
        found.append(job.evaluate(held).item())
        held = ahead
    return [*found, job.evaluate(held).item()], expected


def test_repeats_do_not_count_for_who_reads_ahead_of_the_end_of_an_epoch(ranks):
    for found, expected in ranks(2).run(read_ahead):
        assert found == expected * 2
