"""Activations on the host: the same gradients, every storage once, and back in time."""

import gc
import weakref

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.methods.offload_activations import ActivationOffload
from meshwright.optim.offload_storage import DirectCopies


class Logged(DirectCopies):
    """Notes the bytes of every copy, and keeps nothing alive."""

    def __init__(self):
        self.log, self.alive = [], []

    def to_host(self, host, device, after, **how):
        self.log.append(("out", host[0].numel()))
        self.alive.append(weakref.ref(host[0]))
        return super().to_host(host, device, after, **how)

    def to_device(self, device, host, after, **how):
        self.log.append(("back", host[0].numel()))
        return super().to_device(device, host, after, **how)


class Odd(nn.Module):
    """Saves one storage twice, a view, an integer tensor, and changes a tensor in place after it was saved."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))
        self.register_buffer("scale", torch.linspace(1, 2, width))

    def forward(self, x):
        hidden = x @ self.weight.t()
        product = hidden * hidden[:, :1] * self.scale
        product = torch.nn.functional.relu(product, inplace=True)
        return x + (product * product.max(1, keepdim=True).values).sin_()


def gradients(model, offload=None, **kwargs):
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(2)).requires_grad_()
    loss = model(x).square().sum()
    loss.backward(**kwargs)
    if kwargs:
        loss.backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


def build(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*(Odd(4) for _ in range(3)))


def test_gradients_are_equal_and_storages_are_copied_once():
    expected = gradients(build())
    model, copies = build(), Logged()
    offload = ActivationOffload(list(model), copies, pin_memory=False, prefetch=1)
    assert all(map(torch.equal, gradients(model), expected))
    out = [size for kind, size in copies.log if kind == "out"]
    assert sum(out) == offload.num_bytes
    assert {64, 16}.isdisjoint(out), "weights and buffers stay where they are"
    assert sorted(out) == sorted(size for kind, size in copies.log if kind == "back")
    gc.collect()
    assert not any(reference() is not None for reference in copies.alive), "freed behind backward"
    with torch.no_grad():
        model(torch.ones(5, 4))
    assert len(copies.log) == 2 * len(out), "nothing is saved without gradients"


def test_the_next_block_comes_back_while_one_runs_backward():
    for prefetch, expected in ((0, 2), (1, 3), (5, 4)):  # every block saves its output, which is the next one's input
        model, copies = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))), Logged()
        ActivationOffload(list(model), copies, pin_memory=False, prefetch=prefetch)
        output = model(torch.ones(5, 4, requires_grad=True))
        assert sum(kind == "out" for kind, _ in copies.log) == 4
        assert output.grad_fn._saved_result is not None  # as the first node of backward asks for it
        assert sum(kind == "back" for kind, _ in copies.log) == expected


def test_a_graph_that_is_kept_can_run_backward_twice():
    expected = gradients(build(), retain_graph=True)
    model = build()
    ActivationOffload(list(model)[:2], DirectCopies(), pin_memory=False, prefetch=1)
    assert all(map(torch.equal, gradients(model, retain_graph=True), expected))


class Stack(nn.Module):
    """Blocks with weights of their own and in modules, and one that the model lends them."""

    def __init__(self):
        super().__init__()
        self.lent = nn.Parameter(torch.randn(4, 4))
        self.blocks = nn.ModuleList(Lends() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x, self.lent)
        return x


class Lends(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = nn.Parameter(torch.randn(4, 4) / 2)
        self.inner = nn.Linear(4, 4)

    def forward(self, x, lent):
        return torch.tanh(self.inner(x @ self.own) @ lent)


def with_older_graphs(strategy=None):
    """Ten steps; a graph of the weights before each second update is alive while the next one runs."""
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    if strategy is not None:
        job = mw.accelerate(
            model, torch.optim.SGD, None, lambda inputs, output: output.square().mean(), strategy=strategy,
            optim_args={"lr": 0.1}, sample_batch=x,
        )  # fmt: skip
        model, optim = job.model, job.optim
    for _ in range(5):
        for _ in range(2):
            optim.zero_grad()
            model(x).square().mean().backward()
            kept = model(x)
            optim.step()
        del kept
    return [(p.full_tensor() if strategy is not None else p).detach() for p in model.parameters()]


@pytest.mark.parametrize(
    "strategy",
    [
        ["fsdp", ("offload", "activation")],
        ["zero2", "checkpoint", ("offload", "activation")],
        pytest.param(["fsdp", "compile", ("offload", "activation")], marks=pytest.mark.long),
    ],
    ids=str,
)
def test_weights_that_are_gathered_again_are_not_those_of_an_older_graph(ranks, strategy):
    for weights in ranks(2).run(with_older_graphs, strategy):
        for found, expected in zip(weights, with_older_graphs(), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


class Queued(Logged):
    """Copies that a device has yet to wait for: notes who waits, and whether the host does."""

    queued = True

    def to_host(self, host, device, after, **how):
        assert how == {"held": True}
        super().to_host(host, device, after)
        return Waited(self.log, device[0])

    def to_device(self, device, host, after, **how):
        assert how == {"held": True}
        super().to_device(device, host, after)
        return Waited(self.log, None)


class Waited:
    def __init__(self, log, tensor):
        self.log, self.held = log, weakref.ref(tensor) if tensor is not None else lambda: None

    def wait(self):
        self.log.append(("device waits", self.held() is not None))

    def synchronize(self):
        self.log.append(("host waits", self.held() is not None))


def test_the_device_waits_for_the_copies_of_a_block_when_the_next_is_done_and_the_host_never():
    model, copies = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))), Queued()
    ActivationOffload(list(model), copies, pin_memory=False, prefetch=1)
    x = torch.ones(5, 4, requires_grad=True)
    output = model(x)
    kinds = [kind for kind, _ in copies.log]
    assert kinds == ["out", "out", "out", "device waits", "device waits", "out", "device waits"]
    assert all(held for kind, held in copies.log if kind == "device waits"), "its memory is kept until then"
    output.sum().backward()
    assert "host waits" not in [kind for kind, _ in copies.log]
    model(x)  # and is let go of: nobody will wait
    gc.collect()
    assert ("host waits", True) in copies.log
