"""Which gradients replicas average, while parameters are frozen and unfrozen."""

import copy

import pytest
import torch

import meshwright as mw
from meshwright.store.model_file import whole_state_dict
from tests import tiny

LR = {"lr": 0.1}


def unfreezing(strategy, all_frozen, options):
    """How far weights are from those of one process, and how far these moved."""
    model = tiny.plain(num_layers=3)
    frozen = list(model.parameters()) if all_frozen else list(model.blocks[0].parameters())
    for parameter in frozen:
        parameter.requires_grad_(False)
    start, alone = copy.deepcopy(model), copy.deepcopy(model)
    job = mw.accelerate(
        model, torch.optim.SGD, loss_func=tiny.loss_func, strategy=strategy, optim_args=LR, **options,
        sample_batch=torch.zeros(4, tiny.SEQ_LEN, dtype=torch.long),
    )  # fmt: skip
    optimizer = torch.optim.SGD(alone.parameters(), **LR)
    for index in range(12):
        if index == (0 if all_frozen else 4):
            job.model.requires_grad_(True)
            alone.requires_grad_(True)
        if index == 8 and options.get("find_unused_parameters"):
            for each in (mw.store.entries.unwrapped(job.model), alone):
                each.blocks[1].requires_grad_(False)
        ids = torch.randint(tiny.VOCAB, (8, tiny.SEQ_LEN), generator=torch.Generator().manual_seed(index))
        job.step(ids[job.replica :: 2])
        optimizer.zero_grad()
        tiny.loss_func(ids, alone(ids)).backward()
        optimizer.step()
    own = list(job.model.parameters())
    expected = list(alone.parameters())
    return (
        max((a - b).abs().max().item() for a, b in zip(own, expected, strict=True)),
        max((a - b).abs().max().item() for a, b in zip(start.parameters(), expected, strict=True)),
    )


@pytest.mark.parametrize(
    ("all_frozen", "options"),
    [(False, {}), (False, {"num_micro_batches": 2}), (True, {}), (False, {"find_unused_parameters": True})],
)
def test_what_is_unfrozen_later_is_averaged(ranks, all_frozen, options):
    for apart, moved in ranks(2).run(unfreezing, [], all_frozen, options):
        assert apart < 1e-5 < 0.01 < moved


def _squares(batch, output):
    return (output - batch.sum(-1, keepdim=True)).square().mean()


class Scaled(torch.nn.Module):
    """A layer with a scalar, which no method shards, or with a factor for each feature."""

    def __init__(self, *shape):
        super().__init__()
        self.layer, self.scale = torch.nn.Linear(8, 8), torch.nn.Parameter(torch.full(shape, 0.5))

    def forward(self, x):
        return x + self.scale * self.layer(x)


def scalars_unfrozen(strategy):
    """Scalars of this rank and of one process, and how far these have moved."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(Scaled(), Scaled(), torch.nn.Linear(8, 1))
    model[0].requires_grad_(False)
    alone = copy.deepcopy(model)

    job = mw.accelerate(model, torch.optim.SGD, loss_func=_squares, strategy=strategy, optim_args=LR)
    optimizer = torch.optim.SGD(alone.parameters(), **LR)
    for index in range(12):
        if index == 3:
            job.model[0].requires_grad_(True)
            alone[0].requires_grad_(True)
        batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(index))
        job.step(batch[job.replica :: 2])
        optimizer.zero_grad()
        _squares(batch, alone(batch)).backward()
        optimizer.step()
    return job.model[0].scale.item(), alone[0].scale.item(), abs(alone[0].scale.item() - 0.5)


@pytest.mark.parametrize("strategy", ["fsdp", "zero1"])
def test_scalars_that_are_unfrozen_later_are_averaged_beside_shards(ranks, strategy):
    for own, expected, moved in ranks(2).run(scalars_unfrozen, [strategy]):
        assert own == pytest.approx(expected, abs=1e-6)
        assert moved > 1e-3


class Towers(torch.nn.Module):
    """Two that share nothing, so that a backward may run through one of them."""

    def __init__(self):
        super().__init__()
        self.one, self.two = tiny.Mlp(), tiny.Mlp()

    def forward(self, x):
        return self.one(x), self.two(x)


def units_unfrozen(strategy):
    """How far a unit that trains from step 3 on is from that of one process in fp32, and how far that moved."""
    torch.manual_seed(0)  # three blocks, each a unit
    model = torch.nn.Sequential(torch.nn.Sequential(*(Scaled(8) for _ in range(3))), torch.nn.Linear(8, 1))
    model[0][0].requires_grad_(False)
    start, alone = copy.deepcopy(model[0][0].layer.weight), copy.deepcopy(model)
    job = mw.accelerate(model, torch.optim.SGD, loss_func=_squares, strategy=strategy, optim_args={"lr": 0.02})
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.02)
    for index in range(14):
        for each in (job.model[0][0], alone[0][0]) if index in (3, 8, 10) else ():
            each.requires_grad_(index != 8)
        batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(index))
        job.step(batch[job.replica :: 2])
        optimizer.zero_grad()
        _squares(batch, alone(batch)).backward()
        optimizer.step()
    expected = alone[0][0].layer.weight
    return (job.model[0][0].layer.weight.full_tensor() - expected).norm().item(), (start - expected).norm().item()


@pytest.mark.parametrize("precision", ["half", "amp_native"])
@pytest.mark.parametrize("method", ["fsdp", "zero1"])
def test_units_that_are_unfrozen_later_train_beside_half_precision(ranks, method, precision):
    for apart, moved in ranks(2).run(units_unfrozen, [method, (precision, {"dtype": "bf16"})]):
        assert apart < 0.02 * moved
        assert moved > 0.05


def _together(outputs):
    loss = sum(each.square().mean() for each in outputs)
    torch.autograd.grad(loss, outputs, retain_graph=True)  # no gradient of a parameter: DDP waits all the same
    loss.backward(retain_graph=True)
    (2 * loss).backward()


def _apart(outputs):
    for each in outputs:
        each.square().mean().backward()


def several_backwards(backward):
    """The largest difference from one process's gradients in any of three steps, and the largest gradient."""
    torch.manual_seed(0)
    model = Towers()
    alone = copy.deepcopy(model)
    job = mw.accelerate(model, torch.optim.SGD, loss_func=_together, strategy=[], optim_args=LR, batch_size=8)
    found = []
    for _ in range(3):
        batch = torch.randn(8, 7, generator=torch.Generator().manual_seed(len(found)))
        backward(job.model(batch[job.replica :: 2]))
        backward(alone(batch))
        pairs = list(zip(model.parameters(), alone.parameters(), strict=True))
        found.append(max((one.grad - other.grad).abs().max().item() for one, other in pairs))
        largest = max(other.grad.abs().max().item() for _, other in pairs)
        job.optim.step()
        job.optim.zero_grad()
        with torch.no_grad():
            for one, other in pairs:
                other.copy_(one)
                other.grad = None
    return max(found), largest


@pytest.mark.parametrize("backward", [_together, _apart])
def test_every_backward_through_one_forward_is_averaged(ranks, backward):
    for apart, largest in ranks(2).run(several_backwards, backward):
        assert apart < 1e-5 < 0.01 < largest


def freezing():
    model = tiny.plain(num_layers=2)
    job = mw.accelerate(
        model, torch.optim.SGD, loss_func=tiny.loss_func, strategy=[], optim_args=LR,
        sample_batch=torch.zeros(4, tiny.SEQ_LEN, dtype=torch.long),
    )  # fmt: skip
    model.blocks[1].requires_grad_(False)
    with pytest.raises(mw.ModelError, match=r"were frozen after .* Got blocks\.1.*find_unused_parameters=True"):
        job.step(torch.zeros(4, tiny.SEQ_LEN, dtype=torch.long))


def test_what_is_frozen_later_is_named(ranks):
    ranks(2).run(freezing)


def grouped(strategy):
    seen = []

    def groups(model):
        seen.extend(name for name, _ in model.named_parameters())
        return [{"params": model.blocks.parameters(), "lr": 0.5}, {"params": model.token_embedding.parameters()}]

    job = mw.accelerate(
        tiny.plain(num_layers=2), torch.optim.SGD, loss_func=tiny.loss_func, strategy=strategy, optim_args=LR,
        optim_param_func=groups, sample_batch=torch.zeros(4, tiny.SEQ_LEN, dtype=torch.long),
    )  # fmt: skip
    return [group["lr"] for group in job.optim.param_groups], [name for name in seen if name.startswith("module.")]


@pytest.mark.parametrize("strategy", [[], ["zero2"]], ids=str)
def test_groups_are_made_of_the_model_that_the_user_wrote(ranks, strategy):
    for rates, wrapped in ranks(2).run(grouped, strategy):
        assert rates == [0.5, 0.1]
        assert not wrapped


def frozen_whole(strategy):
    model = tiny.plain(num_layers=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.requires_grad_(False).fill_(1.0 + mw.rank())
    job = mw.accelerate(
        model, torch.optim.SGD, loss_func=tiny.loss_func, strategy=strategy, optim_args=LR,
        sample_batch=torch.zeros(4, tiny.SEQ_LEN, dtype=torch.long),
    )  # fmt: skip
    return {value for parameter in job.model.parameters() for value in parameter.unique().tolist()}


@pytest.mark.parametrize("strategy", [[], ["half"]], ids=str)
def test_models_frozen_whole_begin_with_rank_0s_weights(ranks, strategy):
    assert ranks(2).run(frozen_whole, strategy) == [{1.0}, {1.0}]


class Normed(torch.nn.Module):
    """A layer with statistics, a centre that begins to follow the samples later, and a cache that no checkpoint has."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = torch.nn.Linear(8, 8, bias=False), torch.nn.BatchNorm1d(8)
        self.register_buffer("centre", torch.zeros(2, 4).t())
        self.register_buffer("latest", torch.zeros(()), persistent=False)

    def forward(self, x):
        if self.training:
            self.latest = x.detach().mean()
            if self.norm.num_batches_tracked >= 7:  # the ranks compare in the eighth update
                self.centre.lerp_(x.detach()[0].view(4, 2), 0.1)
        return x + self.norm(self.layer(x)) - self.centre.mean()


def with_statistics(strategy):
    """How far weights and buffers are from those of one process that runs both halves, and how far these moved."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(Normed(), Normed(), torch.nn.Linear(8, 1))
    start, alone = copy.deepcopy(model), copy.deepcopy(model)
    job = mw.accelerate(model, torch.optim.SGD, loss_func=_squares, strategy=strategy, optim_args={"lr": 0.02})
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.02)
    for index in range(20):
        batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(index)) * torch.linspace(0.1, 1, 8)[:, None]
        job.step(batch[job.replica :: 2])
        optimizer.zero_grad()
        before = {name: buffer.clone() for name, buffer in alone.named_buffers()}
        (_squares(batch[1::2], alone(batch[1::2])) / 2).backward()
        for name, buffer in alone.named_buffers():
            buffer.copy_(before[name])
        (_squares(batch[::2], alone(batch[::2])) / 2).backward()
        optimizer.step()
    job.model.eval(), alone.eval()
    found, expected = whole_state_dict(job.model), alone.state_dict()
    losses = [job.evaluate(batch).item(), _squares(batch, alone(batch)).item()]
    apart = max((found[name] - each).abs().max().item() for name, each in expected.items()) if found else 0.0
    own = dict(mw.store.entries.unwrapped(job.model).named_buffers())
    buffers = {name: (buffer - own[name]).abs().max().item() for name, buffer in alone.named_buffers()}
    moved = min((start.state_dict()[name] - each).abs().max().item() for name, each in expected.items())
    return apart, buffers, losses, moved


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "fsdp"])
def test_buffers_that_follow_the_samples_are_those_of_the_first_replica(ranks, strategy):
    latest = []
    for apart, buffers, (loss, expected), moved in ranks(2).run(with_statistics, [strategy]):
        assert apart < 1e-5 < 1e-3 < moved
        latest.append([buffers.pop(f"{block}.latest") for block in (0, 1)])
        assert max(buffers.values()) < 1e-5
        assert loss == pytest.approx(expected, rel=1e-5)
    assert latest[0] != latest[1]
