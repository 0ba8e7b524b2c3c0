"""``loss_weight``: parts with different numbers of items train as one process does on the whole batch."""

import collections
import itertools
import math
import sys
import types

import pytest
import torch
import torch.nn.functional as F

import meshwright as mw
from meshwright.store.entries import unwrapped
from meshwright.training import accelerated as training
from meshwright.training.accelerated import divided
from tests import tiny
from tests.methods import expert_runs
from tests.methods.pipeline_runs import batches
from tests.methods.split_runs import whole_weights

BATCH, LAYERS = 8, 4
SGD = {"lr": 0.1, "momentum": 0.9}


def labels_of(ids):
    """The next tokens, for as many places as the sample's first token says; samples without any are frequent."""
    counted = (ids[:, :1] - 20).clamp(min=0) % tiny.SEQ_LEN
    return torch.where(torch.arange(1, tiny.SEQ_LEN) <= counted, ids[:, 1:], -100)


def loss_func(ids, logits):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels_of(ids).flatten())


def count(ids):
    return (labels_of(ids) != -100).sum()


def build(strategy=()):
    torch.manual_seed(3)
    return expert_runs.build("stacked") if "expert_parallel" in strategy else tiny.plain(num_layers=LAYERS)


def walks_alone(strategy):
    """Rank 0 looks through its loader once more, before the first step and in the middle: what is told."""
    job, told = accelerated(strategy), []
    for others_too in (False, True, False):
        if mw.rank() == 0 or others_too:
            list(job.dataloader)
        if others_too:
            job.dataloader.set_epoch(7)
        try:
            job.step(next(iter(job.dataloader)))
        except mw.DataError as error:
            told.append(str(error))
    return told


def test_a_rank_that_goes_through_an_epoch_alone_is_told(ranks):
    for rank, (first, second) in enumerate(ranks(2).run(walks_alone, [])):
        assert "Ranks are in different epochs" in first
        assert f"epoch {1 - rank} on this rank, 0.5 on average" in first
        assert "on average" in second


def accelerated(strategy, weight=count, micro=2, loss=loss_func):
    return mw.accelerate(
        build(strategy), torch.optim.SGD, tiny.Tokens(), loss, strategy=strategy, optim_args=SGD,
        dataloader_args={"batch_size": BATCH}, num_micro_batches=micro, loss_weight=weight,
    )  # fmt: skip


def reference(strategy):
    """A plain loop in one process: losses, weights before and after, and the loss of a batch then."""
    model = build(strategy)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    optim, losses = torch.optim.SGD(model.parameters(), **SGD), []
    for ids in batches():
        optim.zero_grad()
        losses.append(loss_func(ids, model(ids)))
        losses[-1].backward()
        optim.step()
    with torch.no_grad():
        last = loss_func(batches()[0], model(batches()[0])).item()
    return [loss.item() for loss in losses], before, dict(model.named_parameters()), last


def train(strategy, micro=2):
    job = accelerated(strategy, micro=micro)
    losses = [job.step(batch).loss.item() for batch in job.dataloader]
    own = batches()[0].unflatten(0, (job.num_replicas, -1))[job.replica]
    return losses, whole_weights(unwrapped(job.model)), job.evaluate(own).item()


def mesh(**axes):
    return "parallel_mode", axes


@pytest.mark.parametrize(
    ("world", "strategy", "micro"),
    [
        (2, [], 2),
        (2, ["fsdp"], 2),
        (2, [mesh(pipeline=2), "pipeline_parallel"], 4),
        pytest.param(2, [], 1, marks=pytest.mark.long),
        pytest.param(2, ["zero1"], 2, marks=pytest.mark.long),
        pytest.param(2, ["zero2"], 4, marks=pytest.mark.long),
        pytest.param(2, [mesh(tensor=2), "tensor_parallel"], 4, marks=pytest.mark.long),
        pytest.param(2, [mesh(sequence=2), "sequence_parallel"], 4, marks=pytest.mark.long),
        pytest.param(2, [mesh(context=2), "context_parallel"], 4, marks=pytest.mark.long),
        *(
            pytest.param(2, [mesh(pipeline=2), ("pipeline_parallel", schedule)], 4, marks=pytest.mark.long)
            for schedule in ({"schedule": each} for each in ("gpipe", "interleaved", "zbv", "dualpipev"))
        ),
        pytest.param(2, ["expert_parallel", mesh(expert=2)], 2, marks=pytest.mark.long),
        pytest.param(4, ["fsdp", mesh(zero=2, data=2)], 2, marks=pytest.mark.long),
        pytest.param(4, ["fsdp", mesh(zero=2, sequence=2), "sequence_parallel"], 2, marks=pytest.mark.long),
        pytest.param(4, ["zero1", mesh(zero=2, pipeline=2), "pipeline_parallel"], 4, marks=pytest.mark.long),
    ],
    ids=str,
)  # fmt: skip
def test_parts_with_different_numbers_of_items_train_as_one_process(ranks, world, strategy, micro):
    counts = torch.stack([count(sample[None]) for batch in batches() for sample in batch]).unflatten(0, (-1, 2))
    assert (counts.sum(1) == 0).any()  # parts whose own mean is nan
    expected_losses, before, after, expected = reference(strategy)
    every = ranks(world).run(train, strategy, micro)
    weights = {name: value for _, own, _ in every for name, value in own.items()}
    for losses, _, last in every:
        assert losses == pytest.approx(expected_losses, rel=1e-5)
        assert last == pytest.approx(expected, rel=1e-5)
    off = math.sqrt(sum((weights[name] - value).square().sum().item() for name, value in after.items()))
    moved = math.sqrt(sum((before[name] - value).square().sum().item() for name, value in after.items()))
    assert off < 1e-5 * moved, off / moved


def trained_with(loss_weight):
    job = accelerated([], loss_weight, 4, tiny.loss_func)
    losses = [job.step(batch).loss.item() for batch in job.dataloader]
    return losses, torch.cat([value.flatten() for value in whole_weights(unwrapped(job.model)).values()])


def equal_weights():
    expected_losses, expected = trained_with(None)
    losses, found = trained_with(lambda ids: torch.tensor(7, dtype=torch.int32))
    return losses == expected_losses, torch.equal(found, expected)


def test_equal_weights_change_nothing(ranks):
    assert ranks(2).run(equal_weights) == [(True, True)] * 2


def no_items(strategy):
    job = accelerated(strategy, lambda ids: 0)
    before = whole_weights(unwrapped(job.model))
    results = [job.step(batch) for _, batch in zip(range(2), job.dataloader, strict=False)]
    after = whole_weights(unwrapped(job.model))
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert job.evaluate(torch.zeros(4, tiny.SEQ_LEN, dtype=torch.long)).item() == 0  # whose own mean is nan
    return [(result.loss.item(), result.grad_norm.item(), result.skipped) for result in results]


@pytest.mark.parametrize(
    "strategy", [["fsdp", ("amp_native", "fp16")], [mesh(pipeline=2), "pipeline_parallel"]], ids=str
)
def test_a_batch_without_items_has_no_loss_and_no_gradients(ranks, strategy):
    assert ranks(2).run(no_items, strategy) == [[(0.0, 0.0, False)] * 2] * 2


def alone_in_replicas():
    """The loss of both replicas' batches, that of the own one, and that of a step with it."""
    strategy = [("outer", {"sync_every": 100}), mesh(replica=2)]
    job = accelerated(strategy, lambda ids: 1 + 2 * mw.rank(), loss=tiny.loss_func)
    own = batches()[mw.rank()]
    return job.evaluate(own).item(), tiny.loss_func(own, job.model(own)).item(), job.step(own).loss.item()


def test_replicas_weigh_alone_and_evaluate_together(ranks):
    (loss, first, step), (other_loss, second, other_step) = ranks(2).run(alone_in_replicas)
    assert loss == other_loss == pytest.approx((first + 3 * second) / 4, rel=1e-5)
    assert (step, other_step) == (pytest.approx(first, rel=1e-5), pytest.approx(second, rel=1e-5))


def wrong_weights():
    """On the last rank alone; the others learn of it, and the job goes on afterwards."""
    given = {}
    job = accelerated([], lambda ids: given.get(mw.rank(), count(ids)))
    batch = next(iter(job.dataloader))
    told = []
    for wrong in (-1.0, torch.tensor(math.nan), torch.ones(3), "7", math.inf, None):
        given[mw.world_size() - 1] = wrong
        with pytest.raises(mw.ConfigError, match="loss_weight returned no weight") as caught:
            job.step(batch)
        told.append(caught.value.got)
    given.clear()
    return told, math.isfinite(job.step(batch).loss.item())


def test_what_is_no_weight_is_named_on_every_rank(ranks):
    (first, goes_on), (last, _) = ranks(2).run(wrong_weights)
    assert goes_on
    assert first == ["such numbers on this rank, and something else on another"] * 6
    assert last == [
        "float -1.0", "Tensor tensor(nan)", "a tensor of shape (3,)", "str '7'", "float inf", "NoneType None",
    ]  # fmt: skip


def test_a_part_without_items_has_no_gradients_though_its_mean_is_nan():
    logits = torch.randn(3, 5, requires_grad=True)
    part = divided(F.cross_entropy(logits, torch.full((3,), -100)), torch.tensor(math.inf).double())
    part.backward()
    assert part == 0
    assert (logits.grad == 0).all()


def sums_of(strategy):
    """What ranks add up in three steps, and the exchanges that an ``add_up`` costs: its own number and the step's."""
    job, steps = accelerated(strategy), itertools.count(1)
    sums = job.add_up(lambda: [2 ** mw.rank(), next(steps)])
    found = [list(sums())]
    for batch in itertools.islice(job.dataloader, 3):
        job.step(batch)
        found.append(list(sums()))
    return found


SPLIT = [("parallel_mode", ([("tensor", 2), ("data", 2)], None)), "tensor_parallel"]


@pytest.mark.parametrize("strategy", [[], pytest.param(["fsdp"], marks=pytest.mark.long), SPLIT])
def test_numbers_of_all_ranks_come_with_the_loss(ranks, strategy):
    assert ranks(4).run(sums_of, strategy) == [[[], [15, 4], [15, 8], [15, 12]]] * 4


def test_a_gpu_is_asked_for_the_sums_of_the_last_step(monkeypatch):
    monkeypatch.setattr(training, "sum_over", lambda ranks, sums, axes: sums)
    monkeypatch.setattr(training, "HostCopy", lambda sums: sums.cpu)
    mean = training.MeanLoss(types.SimpleNamespace(mesh_axes=types.SimpleNamespace(sizes=())), None)
    sums, found = mean.add_up(lambda: [0]), []
    for number in range(3):
        mean._carry(types.SimpleNamespace(device=torch.device("cuda"), cpu=torch.tensor([number])))
        found.append(list(sums()))
    assert found == [[], [0], [1]]


def calls_of(step):
    """How many Python functions a step calls, of torch's as well."""
    counted = collections.Counter()
    step()
    sys.setprofile(lambda frame, event, _: counted.update([event]))
    try:
        step()
    finally:
        sys.setprofile(None)
    return counted["call"]


def calls_of_data_parallel(num_layers):
    """Calls of a raw loop over DDP, which clips as torch does, and of a step under ``data``."""
    counts, ids = [], torch.arange(2 * tiny.SEQ_LEN).reshape(2, -1) % tiny.VOCAB
    replicas = torch.nn.parallel.DistributedDataParallel(tiny.plain(num_layers=num_layers))
    optim = torch.optim.AdamW(replicas.parameters())

    def raw():
        optim.zero_grad()
        loss_func(ids, replicas(ids)).backward()
        torch.nn.utils.clip_grad_norm_(replicas.parameters(), 1.0)
        optim.step()

    counts.append(calls_of(raw))
    job = mw.accelerate(
        tiny.plain(num_layers=num_layers), torch.optim.AdamW, tiny.Tokens(), loss_func, strategy=[], max_grad_norm=1.0,
        dataloader_args={"batch_size": BATCH},
    )  # fmt: skip
    return [*counts, calls_of(lambda: job.step(ids))]


def test_a_step_makes_no_more_calls_for_a_layer_than_a_raw_loop(ranks):
    (small, large), _ = ranks(2).run(calls_of_two_depths)
    raw, ours = (large[each] - small[each] for each in range(2))
    assert ours <= raw


def calls_of_two_depths():
    return calls_of_data_parallel(2), calls_of_data_parallel(8)
