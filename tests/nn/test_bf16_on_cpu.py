import copy

import pytest
import torch
from torch import nn

from meshwright.nn import bf16_on_cpu as half_linear
from meshwright.nn.bf16_on_cpu import has_bf16_products, widen_products

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def without_bf16(monkeypatch):
    monkeypatch.setattr(half_linear, "has_bf16_products", lambda: False)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 48, bias=False), nn.Linear(48, 8))


def trained(net, autocast, checkpoint=False):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 20, 64, generator=generator)
    x = x if autocast else x.bfloat16()
    x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False) if checkpoint else net(x)
    y.float().square().sum().backward()
    return [y, x.grad, *(parameter.grad for parameter in net.parameters())]


@pytest.mark.parametrize("autocast", [True, False])
def test_results_are_those_of_bf16_up_to_rounding(autocast):
    plain = model() if autocast else model().bfloat16()
    widened = copy.deepcopy(plain)
    assert widen_products(widened, CPU) == 3
    assert isinstance(widened[0], nn.Linear)
    assert widened.state_dict().keys() == plain.state_dict().keys()
    for again in (False, True):
        plain.zero_grad()
        widened.zero_grad()
        for mine, theirs in zip(trained(widened, autocast, again), trained(plain, autocast), strict=True):
            assert mine.dtype == theirs.dtype
            error = (mine.float() - theirs.float()).norm() / theirs.float().norm()
            assert error < 2**-8, error


def test_backward_keeps_the_same_bytes():
    def saved(net):
        kept = {}
        x = torch.randn(40, 64)

        def pack(tensor):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", torch.bfloat16):
            y = net(x)
        return sum(kept.values()), y

    widened = model()
    widen_products(widened, CPU)
    assert saved(widened)[0] == saved(model())[0]


def test_what_is_left_alone(monkeypatch):
    class Own(nn.Linear):
        def forward(self, input):
            return super().forward(input) + 1

    net = nn.Sequential(Own(64, 64), nn.Linear(64, 64))
    assert widen_products(net, torch.device("cuda")) == 0
    assert widen_products(net, CPU) == 1
    monkeypatch.setattr(half_linear._WidenedLinear, "apply", None)  # would fail if it was called
    with torch.autocast("cpu", torch.bfloat16):
        net(torch.randn(2, 64))  # few rows
    net(torch.randn(64, 64))  # fp32
    with torch.autocast("cpu", torch.float16):
        net(torch.randn(64, 64))
    torch.func.vmap(net)(torch.randn(2, 40, 64))
    monkeypatch.setattr(half_linear, "has_bf16_products", lambda: True)
    assert widen_products(model(), CPU) == 0


def test_a_cpu_is_asked():
    assert isinstance(has_bf16_products(), bool)
