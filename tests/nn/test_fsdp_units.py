"""Weights that a forward between backward and update has gathered are not those of the next step."""

import pytest
import torch
from torch import nn

import meshwright as mw
from tests.compat.bmtrain.seed_models import DIM

BATCHES = torch.randn(10, 4, DIM, generator=torch.Generator().manual_seed(3))


def build():
    torch.manual_seed(0)
    return nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(2))


def train(layers, own, manager=None, optim=None):
    optim = optim or torch.optim.AdamW(layers.parameters(), lr=1e-2)
    if manager is not None:
        manager.add_optimizer(optim)

    def forward(x):
        for layer in layers:
            x = x + layer(x)
        return x.square().mean()

    for number, batch in enumerate(BATCHES):
        optim.zero_grad()
        forward(batch[own]).backward()
        if number % 2:
            forward(batch[own])  # keeps what it gathers for a backward that never comes
        else:
            with torch.inference_mode():
                forward(batch[own])
        (manager or optim).step()
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for p in layers.parameters()]


def blocks(level, managed):
    layers = nn.ModuleList(mw.Block(layer, use_checkpoint=False, zero_level=level) for layer in build())
    return train(layers, slice(mw.rank(), None, 2), mw.optim.OptimManager() if managed else None)


@pytest.mark.parametrize(
    ("level", "managed"), [(2, True), (1, False), *(pytest.param(3, x, marks=pytest.mark.long) for x in (True, False))]
)
def test_blocks_train_alike_with_a_forward_before_the_update(ranks, level, managed):
    expected = train(build(), slice(None))
    for weights in ranks(2).run(blocks, level, managed):
        for found, wanted in zip(weights, expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def failing_blocks():
    layers = nn.ModuleList(mw.Block(layer, use_checkpoint=False, zero_level=2) for layer in build())
    expected = [p.full_tensor() for p in layers.parameters()]

    def fail(gradient):
        raise torch.OutOfMemoryError("backward")

    layers[1](layers[0](BATCHES[0])).square().mean().backward()
    before = [p.grad.full_tensor() for p in layers[0].parameters()]
    middle = layers[0](BATCHES[0])
    middle.register_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        layers[1](middle).square().mean().backward()
    with torch.no_grad():
        layers[0](BATCHES[0])
    # What the failed pass did not reach still has the gradients of the one before.
    assert all(map(torch.equal, [p.grad.full_tensor() for p in layers[0].parameters()], before))
    for parameter in layers.parameters():
        parameter.grad = None
    found = []
    for _ in range(2):
        layers[1](layers[0](BATCHES[0])).square().mean().backward()
        found.append([p.grad.full_tensor() for p in layers.parameters()])
        for parameter in layers.parameters():
            parameter.grad = None
    assert all(map(torch.equal, [p.full_tensor() for p in layers.parameters()], expected))
    return found


def test_blocks_recover_from_a_backward_that_failed(ranks):
    layers = build()
    layers[1](layers[0](BATCHES[0])).square().mean().backward()
    for twice in ranks(2).run(failing_blocks):
        for gradients in twice:
            for found, parameter in zip(gradients, layers.parameters(), strict=True):
                torch.testing.assert_close(found, parameter.grad, rtol=0, atol=1e-6)
