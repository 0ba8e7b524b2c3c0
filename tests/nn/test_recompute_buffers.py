"""Recomputing code that calls TorchScript, which must save the same tensors in every run."""

import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.nn import recompute_contexts
from meshwright.runtime.torch_internals.autograd import set_script_profiling


class Tail(nn.Module):
    def forward(self, x):
        return torch.tanh(x) * x.sigmoid()


def fresh():
    """Functions and a module that TorchScript has never run, in a process in which it may profile them."""
    set_script_profiling(True)

    @torch.jit.script
    def norm(x, weight):
        dtype = x.dtype
        variance = x.to(torch.float32).pow(2).mean(dim=-1, keepdim=True)
        return (x * torch.rsqrt(variance + 1e-5)).to(dtype) * weight

    @torch.jit.script
    def act(x):
        if x.shape[0] > 3:
            return 0.5 * x * (1.0 + torch.tanh(0.79788456 * x * (1.0 + 0.044715 * x * x)))
        return norm(x, x.detach())

    return norm, act, torch.jit.script(Tail())


def gradients(run, x, weight):
    x, weight = x.detach().clone().requires_grad_(x.requires_grad), weight.detach().clone().requires_grad_()
    return run(x, weight), x, weight


@pytest.mark.parametrize("seed", range(12))
def test_scripted_code_is_recomputed_whenever_and_wherever_else_it_runs(seed):
    """Blocks that call and end in it, of several shapes and dtypes, alone and nested, between calls from elsewhere."""
    draw = random.Random(seed)
    norm, act, tail = fresh()

    def block(x, weight):
        return tail(norm(act(x), weight)) + act(x)

    def recomputed(x, weight):
        return checkpoint(block, x, weight, use_reentrant=False, **recompute_contexts([tail]))

    def nested(x, weight):
        def outer(x, weight):
            return act(recomputed(recomputed(act(x), weight), weight))

        return checkpoint(outer, x, weight, use_reentrant=False, **recompute_contexts([tail]))

    def plain_nested(x, weight):
        return act(block(block(act(x), weight), weight))

    waiting = []
    for _ in range(12):
        shape, dtype = draw.choice([(4, 4), (5, 7), (2, 3), (2, 4, 4)]), draw.choice([torch.float32, torch.bfloat16])
        x, weight = (
            torch.randn(shape, dtype=dtype, requires_grad=draw.random() < 0.8),
            torch.ones(shape[-1], dtype=dtype),
        )
        if draw.random() < 0.3:
            with torch.set_grad_enabled(draw.random() < 0.5):
                act(x), norm(x, weight), tail(x)  # from elsewhere
        ours, alone = draw.choice([(recomputed, block), (nested, plain_nested)])
        waiting.append((gradients(ours, x, weight), gradients(alone, x, weight)))
        if draw.random() < 0.5:
            continue
        for (out, *found), (expected, *wanted) in waiting:
            out.float().sum().backward()
            expected.float().sum().backward()
            for mine, its in zip(found, wanted, strict=True):
                torch.testing.assert_close(mine.grad, its.grad)
        waiting.clear()


def test_an_error_in_recomputed_scripted_code_stays_the_error():
    runs = []

    @torch.jit.script
    def fails(x, second: bool):
        if second:
            raise ValueError("on purpose")
        return x.tanh()

    def block(x):
        runs.append(1)
        return fails(x, len(runs) > 1).exp()

    x = torch.randn(3, requires_grad=True)
    out = checkpoint(block, x, use_reentrant=False, **recompute_contexts([]))
    with pytest.raises(torch.jit.Error, match="on purpose"):
        out.sum().backward()
