"""Complex parameters, and sparse gradients, under methods that send or copy numbers: as one process trains them."""

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.cost import memory
from meshwright.errors import CheckpointError
from meshwright.planner import measured_state
from meshwright.store import CheckpointStore, TrainingState

BATCH = torch.randn(12, 8, 7, generator=torch.Generator().manual_seed(2))
EXACT = ("comm", {"reduce": "int8", "min_numel": 10**6})  # its own averages, of whole numbers
CODES = ("comm", {"reduce": "int8", "min_numel": 0})
REPLICAS = ("parallel_mode", {"replica": 2})
EVERY_STEP = {"rule": "local_sgd", "sync_every": 1}


class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(13, 7, dtype=torch.complex64) * 0.3)

    def forward(self, x):
        mixed = torch.einsum("bi,ji->bj", torch.fft.rfft(x.float()), self.weight)
        return torch.fft.irfft(mixed[:, :7], n=13).to(x.dtype)


class Spectral(nn.Module):
    """Complex parameters and a complex buffer beside real ones; sizes are odd."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(7, 13), nn.Linear(13, 3)
        self.layers = nn.ModuleList(Mix() for _ in range(2))
        self.register_buffer("turn", torch.polar(torch.ones(13), torch.linspace(0, 3, 13)))

    def forward(self, x):
        x = self.first(x)
        x = torch.view_as_real(x.float() * self.turn).sum(-1).to(x.dtype)
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x)


class Rows(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self):
        super().__init__()
        self.embed, self.last = nn.Embedding(50, 13, sparse=True), nn.Linear(13, 3)
        self.embed.weight.data.mul_(0.1)  # of the size that the steps move

    def forward(self, x):
        return self.last(self.embed((x[:, :4].abs() * 10).long() % 50).mean(1))


def build(kind):
    torch.manual_seed(1)
    return kind()


def loss_func(inputs, output):
    return output.float().square().mean()


def sgd(params, momentum=0.9):
    return torch.optim.SGD(params, lr=0.05, momentum=momentum)


def accelerate(kind, strategy, optim=sgd):
    return mw.accelerate(
        build(kind), optim, None, loss_func, strategy=strategy, sample_batch=BATCH[0][:4], batch_size=8
    )


def step(job, batch):
    return job.step(batch.chunk(job.num_replicas)[job.replica])


def whole(value):
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


def weights(job):
    return {name: whole(p) for name, p in getattr(job.model, "module", job.model).named_parameters()}


def train(kind, strategy):
    job = accelerate(kind, strategy)
    for batch in BATCH:
        step(job, batch)
    predicted = memory(job.plan.step, job._job.coordinate)
    for name, size in measured_state(job.model, job.optim).items():
        if kind is Spectral:  # how many rows a sparse gradient has, the data decides
            assert getattr(predicted, name) == size, (strategy, name)
    return weights(job)


def train_each(kind, strategies):
    return [train(kind, strategy) for strategy in strategies]


def plain(kind):
    model = build(kind)
    optim = sgd(model.parameters())
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    average = None  # of the weights, as ema keeps it
    for number, batch in enumerate(BATCH):
        optim.zero_grad()
        loss_func(None, model(batch)).backward()
        optim.step()
        now = [parameter.detach().clone() for parameter in model.parameters()]
        share = min(0.9, number / (9 + number))  # ema's warm-up
        average = (
            now if average is None else [torch.lerp(new, old, share) for new, old in zip(now, average, strict=True)]
        )
    names = [name for name, _ in model.named_parameters()]
    return before, dict(model.named_parameters()), dict(zip(names, average, strict=True))


def check(kind, strategies, every, tolerance):
    before, after, _ = plain(kind)
    for found in every:
        for strategy, own, same in zip(strategies, found, every[0], strict=True):
            for name, value in own.items():
                moved = (after[name] - before[name]).norm()
                assert (value - after[name]).norm() < tolerance * moved, (strategy, name)
                assert torch.equal(value, same[name]), (strategy, name)


def test_complex_parameters_train_as_in_one_process(ranks):
    strategies = [
        ["parallel_mode", EXACT],
        ["fsdp", EXACT],
        [REPLICAS, ("outer", EVERY_STEP)],
        [REPLICAS, ("outer", {**EVERY_STEP, "split": True})],
        [REPLICAS, ("outer", {**EVERY_STEP, "inner_state": "average"})],
        ["zero1", "ema"],
    ]
    exact = [each for each in strategies if each[0] != REPLICAS]
    check(Spectral, exact, ranks(2).run(train_each, Spectral, exact), 1e-5)
    averaged = [each for each in strategies if each[0] == REPLICAS]
    check(Spectral, averaged, ranks(2).run(train_each, Spectral, averaged), 1e-4)


def test_complex_parameters_beside_codes_and_half_precision(ranks):
    check_coded(ranks, [["zero2", ("comm", {**CODES[1], "all_gather": "int8"})], ["fsdp", ("half", "bf16")]])


@pytest.mark.long
def test_so_they_do_under_other_strategies(ranks):
    quantised = [REPLICAS, ("outer", {**EVERY_STEP, "quantise": "int8"})]
    others = [
        ["parallel_mode", CODES],
        quantised,
        ["parallel_mode", ("half", "bf16")],
        ["fsdp", ("amp_native", "bf16")],
    ]
    check_coded(ranks, others)


def check_coded(ranks, strategies):
    check(Spectral, strategies, ranks(2).run(train_each, Spectral, strategies), 0.2)


def averages(strategy):
    job = accelerate(Spectral, strategy)
    for batch in BATCH:
        step(job, batch)
    names = {id(parameter): name for name, parameter in weights_of(job).items()}
    return {names[id(parameter)]: whole(value) for parameter, value in job.ema.of.items()}


def weights_of(job):
    return dict(getattr(job.model, "module", job.model).named_parameters())


@pytest.mark.parametrize(("strategy", "dtype"), [(["parallel_mode"], "fp32"), (["fsdp"], "bf16")])
def test_averages_of_complex_weights_are_complex(ranks, strategy, dtype):
    *_, expected = plain(Spectral)
    for found in ranks(2).run(averages, [*strategy, ("ema", {"decay": 0.9, "dtype": dtype})]):
        for name, value in found.items():
            exact = dtype == "fp32" or value.is_complex()
            torch.testing.assert_close(
                value.to(expected[name].dtype), expected[name], rtol=0, atol=1e-5 if exact else 0.02
            )


def test_sparse_gradients_are_averaged_beside_comm(ranks):
    strategies = [["parallel_mode"], ["parallel_mode", EXACT]]
    check(Rows, strategies, ranks(2).run(train_each, Rows, strategies), 1e-5)


def resumed(folder, strategy):
    job = accelerate(Rows, strategy)
    for batch in BATCH[:4]:
        step(job, batch)
    CheckpointStore(folder).save(TrainingState(job.model, job.optim))
    losses = [step(job, batch).loss.item() for batch in BATCH[4:]]
    job = accelerate(Rows, strategy)
    CheckpointStore(folder).load(TrainingState(job.model, job.optim))
    return losses, [step(job, batch).loss.item() for batch in BATCH[4:]]


def test_the_momentum_of_sparse_gradients_is_saved(ranks, tmp_path):
    for losses, again in ranks(2).run(resumed, tmp_path, ["parallel_mode"]):
        torch.testing.assert_close(again, losses, rtol=1e-6, atol=0)


def saved_with_sparse_buffer(folder):
    model = nn.Linear(3, 3)
    model.register_buffer("graph", torch.eye(3).to_sparse())
    with pytest.raises(CheckpointError, match=r"graph cannot be saved: files hold dense tensors only.*sparse_coo"):
        CheckpointStore(folder).save(TrainingState(model))
    return True


def test_a_sparse_buffer_is_refused_by_name(ranks, tmp_path):
    assert all(ranks(1).run(saved_with_sparse_buffer, tmp_path))
