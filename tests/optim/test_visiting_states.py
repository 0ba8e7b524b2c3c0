"""States that visit a device: every order in which copies may happen gives the numbers of the plain optimizer."""

import copy
import itertools
import random

import pytest
import torch
from torch import nn

from meshwright.optim import GuardedOptimizer, HostWeights
from meshwright.optim.offload_storage import DirectCopies, HostRoom

STEPS = 6


class Queue:
    """A stream of copies: each runs when all before it are over, and what it waits for is, too."""

    def __init__(self):
        self.copies, self.done = [], 0

    def may_go_on(self):
        return self.done < len(self.copies) and self.copies[self.done][0].is_over()

    def go_on(self):
        after, targets, sources = self.copies[self.done]
        after.wait()
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        self.done += 1


class Point:
    """Stand for what a queue has done once so many copies are over; without a queue, for the device's own work."""

    def __init__(self, queue=None, number=0):
        self.queue, self.number = queue, number

    def is_over(self):
        return self.queue is None or self.queue.done >= self.number

    @torch.no_grad()
    def wait(self):
        while not self.is_over():
            self.queue.go_on()

    synchronize = wait


class ShuffledCopies(DirectCopies):
    """Copies that run some time between the moment they may and the moment somebody waits for them."""

    queued = True

    def __init__(self, seed, eagerness):
        self._random, self._eagerness = random.Random(seed), eagerness
        self._queues = {"to_host": Queue(), "to_device": Queue()}

    @torch.no_grad()
    def mark(self):
        while self._random.random() < self._eagerness:
            ready = [queue for queue in self._queues.values() if queue.may_go_on()]
            if not ready:
                break
            self._random.choice(ready).go_on()
        return Point()

    def _queued(self, name, after, targets, sources):
        queue = self._queues[name]
        queue.copies.append((after, targets, sources))
        point = Point(queue, len(queue.copies))
        self.mark()
        return point

    def to_host(self, host, device, after, *, held=False):
        return self._queued("to_host", after, host, device)

    def to_device(self, device, host, after, *, held=False):
        return self._queued("to_device", after, device, host)

    def join(self):
        queue = self._queues["to_device"]
        Point(queue, len(queue.copies)).wait()


def build(dtype):
    torch.manual_seed(0)
    widths = (3, 40, 70, 40, 3)
    layers = [nn.Linear(first, second) for first, second in itertools.pairwise(widths)]
    return nn.Sequential(*layers, Scaled()).to(dtype)


class Scaled(nn.Module):
    """Has a parameter without dims."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, given):
        return given * self.scale


def guarded(model, optim_func, copies, *, fraction=1.0, bucket_bytes=2**13):
    parameters = list(model.parameters())
    chosen = set(parameters[: round(fraction * len(parameters))])
    weights = HostWeights(
        parameters, offloaded=chosen, in_backward=chosen, resident=set(), fp32=True, copies=copies, pin_memory=False,
        disk=None, bucket_bytes=bucket_bytes, on_device=chosen,
    )  # fmt: skip
    kinds = [[p for p in parameters if (p.dim() > 1) is is_matrix] for is_matrix in (True, False)]
    groups = [{"params": kinds[0], "weight_decay": 0.1}, {"params": kinds[1], "lr": 3e-3}]
    return GuardedOptimizer(weights.optimizer(optim_func, groups), master=weights)


def train(model, optimizer, steps=STEPS, first=0, skipped=()):
    data = torch.randn(20, 2, 5, 3, generator=torch.Generator().manual_seed(1))
    frozen = next(iter(model.parameters()))
    for step, parts in enumerate(data[first : first + steps], first):
        optimizer.zero_grad()
        for rows in parts.to(frozen.dtype):
            (model(rows) - rows).float().square().mean().backward()
        if step == 2:
            frozen.grad = None  # the others are a step ahead of it from here on
        optimizer.clip_grad_norm(0.05)
        if step in skipped:
            optimizer.leave_out()
        optimizer.step()
        if step == 3:
            with torch.no_grad():
                frozen.mul_(0.5)  # the copy follows what was written to the parameter
    return [parameter.detach().clone() for parameter in model.parameters()]


OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True, foreach=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False),
    "plain sgd": lambda params: torch.optim.SGD(params, lr=0.1, foreach=True),
    "nadam": lambda params: torch.optim.NAdam(params, lr=1e-2, foreach=False),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-2, momentum=0.5, foreach=False),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2, foreach=False),
    "rprop": lambda params: torch.optim.Rprop(params, lr=1e-2, foreach=False),
}


def plain(dtype, optim_func, skipped=()):
    """The same guards, with copies where they would be without offload."""
    model = build(dtype)
    return model, guarded(model, optim_func, DirectCopies(), fraction=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_copies_may_be_as_late_or_as_early_as_they_like(name, dtype):
    expected = train(*plain(dtype, OPTIMIZERS[name]), skipped=(4,))
    for seed, eagerness in enumerate((0.0, 0.3, 0.7, 1.0)):
        for fraction in (1.0, 0.6):
            model = build(dtype)
            optimizer = guarded(model, OPTIMIZERS[name], ShuffledCopies(seed, eagerness), fraction=fraction)
            assert len(optimizer.master.visits._buckets) > 3
            found = train(model, optimizer, skipped=(4,))
            assert all(map(torch.equal, found, expected)), (name, eagerness, fraction)


def test_states_are_complete_on_the_host_behind_every_step_and_go_into_any_other_optimizer():
    model, other = build(torch.bfloat16), build(torch.bfloat16)
    optimizer = guarded(model, OPTIMIZERS["adamw"], ShuffledCopies(0, 0.0))
    reference = plain(torch.bfloat16, OPTIMIZERS["adamw"])
    for first in range(4):
        train(model, optimizer, 1, first)
        train(*reference, 1, first)
        states = [each.state_dict()["inner"]["state"] for each in (optimizer, reference[1])]
        assert states[0].keys() == states[1].keys()
        for own, expected in ((states[0][key], states[1][key]) for key in states[0]):
            assert own.keys() == expected.keys()
            assert all(torch.equal(own[key], expected[key]) for key in own)
    resumed = guarded(other, OPTIMIZERS["adamw"], ShuffledCopies(1, 0.5))
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    expected = train(*reference, 3, 4)
    assert all(map(torch.equal, train(other, resumed, 3, 4), expected))
    assert all(map(torch.equal, train(model, optimizer, 3, 4), expected))


@pytest.mark.parametrize("kind", ["missing wait", "early return"])
def test_this_would_show_what_is_waited_for_too_little(kind, monkeypatch):
    expected = train(*plain(torch.bfloat16, OPTIMIZERS["adamw"]))
    copies = ShuffledCopies(0, 0.0)
    name = "to_device" if kind == "missing wait" else "to_host"
    queued = getattr(copies, name)

    def unwaited(*args, **options):
        queued(*args, **options)
        return Point()  # of no queue: it is over at once

    monkeypatch.setattr(copies, name, unwaited)
    model = build(torch.bfloat16)
    found = train(model, guarded(model, OPTIMIZERS["adamw"], copies))
    assert not all(map(torch.equal, found, expected))


def test_hooks_of_users_run_once_around_all_buckets():
    model = build(torch.float32)
    optimizer = guarded(model, OPTIMIZERS["adamw"], ShuffledCopies(0, 0.5))
    called = []
    optimizer.inner.inner.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.inner.inner.register_step_post_hook(lambda *_: called.append("after"))
    found = train(model, optimizer)
    assert called == ["before", "after"] * STEPS
    assert all(map(torch.equal, found, train(*plain(torch.float32, OPTIMIZERS["adamw"]))))


def test_a_step_that_fails_leaves_groups_and_states_as_they_are(monkeypatch):
    model = build(torch.float32)
    optimizer = guarded(model, OPTIMIZERS["adamw"], ShuffledCopies(0, 0.0))
    train(model, optimizer, 2)
    inner = optimizer.inner.inner
    listed, states = [[*group["params"]] for group in inner.param_groups], set(inner.state)
    step, calls = inner.step, []

    def failing():
        calls.append(None)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("made up")
        return step()

    monkeypatch.setattr(inner, "step", failing)
    with pytest.raises(torch.OutOfMemoryError):
        train(model, optimizer, 1, 2)
    for group, params in zip(inner.param_groups, listed, strict=True):
        assert all(one is other for one, other in zip(group["params"], params, strict=True))
    assert set(inner.state) == states
    monkeypatch.undo()
    train(model, optimizer, 2, 3)


def test_what_is_on_the_device_at_once_is_a_few_buckets():
    model = build(torch.bfloat16)
    optimizer = guarded(model, OPTIMIZERS["adamw"], DirectCopies(), bucket_bytes=4096)
    train(model, optimizer, 3)
    assert 0 < optimizer.master.visits.device_bytes <= 3 * 3 * (4096 + 64 * 4)
    whole = sum(12 * parameter.numel() for parameter in model.parameters())
    assert optimizer.master.visits.device_bytes < whole


def test_an_optimizer_of_another_kind_updates_on_the_host():
    class Own(torch.optim.AdamW):
        pass

    told = []
    model = build(torch.float32)
    parameters = list(model.parameters())
    weights = HostWeights(
        parameters, offloaded=set(parameters), in_backward=set(parameters), resident=set(), fp32=False,
        copies=DirectCopies(), pin_memory=False, disk=None, bucket_bytes=2**12, on_device=set(parameters),
        note_host=told.append,
    )  # fmt: skip
    optimizer = GuardedOptimizer(weights.optimizer(lambda params: Own(params, fused=True), parameters), master=weights)
    assert weights.visits is None
    assert told == [optimizer.inner.inner]
    model(torch.ones(2, 3)).sum().backward()
    assert all(parameter.grad is None for parameter in parameters), "they leave in backward"


def test_tensors_share_blocks_of_host_memory(monkeypatch):
    made, empty = [], torch.empty

    def noted(*args, pin_memory=False, **options):
        made.append(args[0])
        return empty(*args, **options)

    monkeypatch.setattr(torch, "empty", noted)
    room = HostRoom(pin=True)
    likes = [empty(100, 3), empty(7, dtype=torch.bfloat16), empty(5, 6).t(), empty(()), empty(0, 4), empty(300)]
    tensors = [room.take(like) for like in likes]
    for number, (tensor, like) in enumerate(zip(tensors, likes, strict=True)):
        assert (tensor.shape, tensor.stride(), tensor.dtype) == (like.shape, like.stride(), like.dtype)
        tensor.fill_(number)
    assert all((tensor == number).all() for number, tensor in enumerate(tensors))
    assert all(size & (size - 1) == 0 for size in made)
    assert len(made) < 5
