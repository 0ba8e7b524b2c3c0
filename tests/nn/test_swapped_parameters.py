"""Tensors are lent to modules for the time of a call."""

import functools
import warnings
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils.parametrizations import weight_norm

import meshwright as mw
from meshwright.nn import FakeTensors, call_with, run_with, swapped_parameters
from tests import tiny


class Twice(nn.Module):
    """A module under two names, a weight of two modules, a buffer, and a weight that is computed."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = self.a
        self.blocks = nn.ModuleList([nn.BatchNorm1d(4)] * 3)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.a.weight
        self.computed = weight_norm(nn.Linear(4, 4))

    def forward(self, x, scale=1.0):
        x = self.computed(self.tied(self.b(self.a(x))))
        for block in self.blocks:
            x = block(x)
        return x * scale


def own(module):
    return {
        (id(each), name): tensor
        for each in module.modules()
        for name, tensor in (*each._parameters.items(), *each._buffers.items())
    }


@pytest.mark.parametrize("fails", [False, True])
def test_modules_get_their_own_tensors_back(fails):
    torch.manual_seed(0)
    module, other, x = Twice(), Twice(), torch.randn(8, 4)
    before = own(module)
    state = dict(other.state_dict(keep_vars=True))
    state = {name: state[name] for name, _ in (*module.named_parameters(), *module.named_buffers())}
    if fails:
        with pytest.raises(RuntimeError):
            call_with(module, state, (x[:, :3],))
    else:
        assert torch.equal(call_with(module, state, (x,), {"scale": 2.0}), other(x, scale=2.0))
        assert torch.equal(run_with(lambda model, inputs: model(inputs) * 2, module, state, x), other(x, scale=2.0))
    after = own(module)
    assert before.keys() == after.keys()
    assert all(after[place] is tensor for place, tensor in before.items())


def test_what_has_no_name_stays():
    module, x = Twice().eval(), torch.randn(8, 4)
    lent = call_with(module, {"a.weight": torch.zeros(4, 4)}, (x,))
    assert torch.equal(lent, lent[:1].expand_as(lent))
    assert not torch.equal(module(x), lent)


@functools.lru_cache
def ramp(size):
    return torch.arange(size)


class Remembers(nn.Module):
    """Makes its mask and a table late, counts its calls, and keeps what it has seen."""

    def __init__(self):
        super().__init__()
        self.linear, self.mask, self.tables, self.seen, self.calls = nn.Linear(4, 4), None, {}, [], 0
        self.register_buffer("late", None)
        self.steps = torch.zeros(())

    def forward(self, x):
        self.calls += 1
        self.steps += 1
        if self.mask is None:
            self.mask = self.late = torch.ones(x.shape[1])
        self.tables.setdefault(x.shape[1], [torch.arange(x.shape[1])])
        self.seen.append(x)
        return self.linear(x) * self.mask * self.late + ramp(x.shape[1])


class Moves(nn.Module):
    """A loss with a weight and running statistics, as centres and margins are."""

    def __init__(self):
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.ones(4)), 0
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.calls += 1
        self.count += 1
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return ((x - self.mean) * self.weight).square().mean()


def test_a_pass_without_data_leaves_no_trace():
    """It runs on one rank: what it left behind would part that rank from the others, or hold no data in training."""
    model, loss = Remembers(), Moves()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    state = {name: fake.from_tensor(each.detach()).requires_grad_() for name, each in model.named_parameters()}
    with fake:
        run_with(lambda model, x: loss(model(x)), model, state, torch.ones(2, 4)).backward()
    assert all(each.grad is not None for each in state.values())
    assert model.mask is model.late is None
    assert (model.tables, model.seen, model.calls, model.steps.item()) == ({}, [], 0, 0)
    assert (loss.calls, loss.count.item(), loss.mean.tolist(), loss.weight.grad) == (0, 0, [0.0] * 4, None)
    assert ramp(4).tolist() == [0, 1, 2, 3]
    loss(model(torch.ones(2, 4))).backward()
    assert (loss.calls, loss.count.item(), len(model.seen)) == (1, 1, 1)
    assert loss.weight.grad is not None


def cached(function):
    """Cache a method as transformers does, behind a function of its own."""
    known = functools.lru_cache(function)
    return functools.wraps(function)(lambda self, size: known(self, size))


def counted():
    made = {}
    return lambda size: made.setdefault(size, torch.arange(size))


TABLES: dict[int, torch.Tensor] = {9: torch.zeros(9)}
IS_SAID = False
in_closure = counted()


def in_default(size, made={}):  # noqa: B006
    return made.setdefault(size, torch.arange(size))


class Angles:
    """A plain object that makes its table late, and keeps another inside."""

    def __init__(self, inner=None):
        self.table, self.inner = None, inner

    def __call__(self, size):
        if self.table is None:
            self.table = torch.arange(size)
        return self.table + (0 if self.inner is None else self.inner(size))


class Keeps(nn.Module):
    """Keeps tensors wherever code can, but in a module."""

    table = None
    tables: ClassVar[dict[int, torch.Tensor]] = {}

    def __init__(self):
        super().__init__()
        self.linear, self.angles, self.listed = nn.Linear(4, 4), Angles(Angles()), [Angles()]

    @cached
    def behind(self, size):
        return torch.arange(size)

    def forward(self, x):
        global IS_SAID
        IS_SAID, size = True, x.shape[1]
        if Keeps.table is None:
            Keeps.table = torch.arange(size)
        TABLES.setdefault(size, torch.arange(size))
        self.tables.setdefault(size, torch.arange(size))
        places = (
            Keeps.table, TABLES[size], self.tables[size], in_closure(size), in_default(size), self.behind(size),
            self.angles(size), self.listed[0](size),
        )  # fmt: skip
        return self.linear(x) + sum(places)


def test_a_pass_without_data_leaves_no_fake_tensor_outside_modules():
    model, x = Keeps(), torch.ones(2, 4)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    state = {name: fake.from_tensor(each.detach()).requires_grad_() for name, each in model.named_parameters()}
    for _ in range(2):
        with fake:
            run_with(lambda model, x: model(x).sum(), model, state, x).backward()
    assert (Keeps.table, Keeps.tables, list(TABLES), model.angles.table, IS_SAID) == (None, {}, [9], None, True)
    expected = model.linear(x) + 9 * torch.arange(4)  # nine places, of which one is in two objects
    assert torch.equal(model(x), expected)
    with fake:  # what holds data stays
        run_with(lambda model, x: model(x).sum(), model, state, x)
    assert (Keeps.table.tolist(), TABLES[4].tolist(), model.angles.table.tolist()) == ([0, 1, 2, 3],) * 3
    assert torch.equal(model(x), expected)


def test_a_model_of_many_modules_leaves_none_either(monkeypatch):
    monkeypatch.setattr(swapped_parameters, "_MOST_PLACES", 2_000)
    model = Keeps()
    model.others = nn.ModuleList(nn.Identity() for _ in range(2_000))
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    state = {name: fake.from_tensor(each.detach()).requires_grad_() for name, each in model.named_parameters()}
    with fake:
        run_with(lambda model, x: model(x).sum(), model, state, torch.ones(2, 4))
    assert not isinstance(model.behind(4), FakeTensor)
    assert model.angles.table is None


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
@pytest.mark.parametrize("own", ["cpu", "meta"])
def test_fake_tensors_are_like_real_ones(own, device, recwarn):
    weight = nn.Parameter(torch.empty(4, 3, device=own).t())
    fakes = FakeTensors(device)
    inputs = fakes.like_all({"x": weight, "scale": 2.0})
    fake = inputs["x"]
    assert (fake.shape, fake.stride(), fake.dtype) == (weight.shape, weight.stride(), weight.dtype)
    assert fake.device.type == (own if device is None else "cpu")
    assert not fake.requires_grad
    assert inputs["scale"] == 2.0
    with fakes.running():
        assert type(torch.ones(2)) is type(fake)
        warnings.warn("a model's own", stacklevel=1)
    assert type(torch.ones(2)) is torch.Tensor
    assert not recwarn.list


class Criterion(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, inputs, output):
        return (output * self.scale).square().mean()


def _gradient_stays(before):
    criterion = Criterion()
    criterion.scale.grad = before
    mw.accelerate(
        nn.Linear(4, 3), torch.optim.SGD, None, criterion.forward, optim_args={"lr": 0.1}, sample_batch=torch.ones(2, 4)
    )
    return criterion.scale.grad is before


@pytest.mark.parametrize("before", [None, torch.ones(3)])
def test_a_plan_leaves_a_criterion_that_is_no_module_in_the_loss_its_gradients(ranks, before):
    assert ranks(1).run(_gradient_stays, before) == [True]


def teacher():
    model = tiny.build("plain")
    model.register_buffer("calls", torch.zeros(()))  # DDP takes rank 0's in every forward
    return model


def distilled(strategy):
    """Losses of two steps towards a teacher that is distributed, and how far its answers are from a plain one's."""
    ids, apart = torch.arange(2 * tiny.SEQ_LEN).view(2, -1) % tiny.VOCAB, []
    sharded, plain = mw.accelerate(teacher(), strategy=strategy).model, teacher()

    def loss_func(inputs, output):
        with torch.no_grad():
            answer = sharded(inputs)
        apart.append(torch.dist(answer, plain(inputs)).item())
        return (output - answer).square().mean()

    job = mw.accelerate(
        tiny.build("plain", seed=4), torch.optim.SGD, None, loss_func, strategy=["fsdp"], optim_args={"lr": 0.1},
        sample_batch=ids,
    )  # fmt: skip
    losses = [job.step(ids).loss.item() for _ in range(2)]
    return losses, apart


@pytest.mark.parametrize("strategy", [["fsdp"], [("parallel_mode", {"data": 2})]], ids=["fsdp", "data"])
def test_a_distributed_model_in_the_loss_is_not_run_without_data(ranks, strategy):
    """Predictions would leave it with tensors that hold nothing, on rank 0 alone, or wait for the others."""
    for losses, apart in ranks(2).run(distilled, strategy):
        assert max(apart) < 1e-5
        assert len(apart) == 2
        assert losses[1] < losses[0]
