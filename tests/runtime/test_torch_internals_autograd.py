"""Autograd functions give the gradients of plain calls when they are compiled, whatever their forward returns."""

import pytest
import torch

from meshwright.runtime.torch_internals.autograd import EarlierFunction, Function

FORWARDS = {
    "new": lambda x: x * 2,
    "written in place": lambda x: x.clone().mul_(2),
    "filled": lambda x: torch.empty_like(x).copy_(x),
    "cast to its own type": lambda x: (x * 2).to(x.dtype),
    "several": lambda x: (x.clone().mul_(2), (x * 3).to(x.dtype)),
}


def function_of(base, forward):
    class Tripled(base):
        @staticmethod
        def forward(ctx, x, call):
            return call(x)

        @staticmethod
        def backward(ctx, *gradients):
            return 3 * sum(gradients), None

    return lambda x: Tripled.apply(x, forward)


@pytest.mark.parametrize("base", [Function, EarlierFunction])
@pytest.mark.parametrize("name", FORWARDS)
def test_compiled_gradients_are_those_of_the_plain_call(base, name):
    call = function_of(base, FORWARDS[name])
    factors = torch.tensor([1.0, 2.0, 3.0])

    def loss(x):
        result = call(x * 5)
        return sum((each * factors).sum() for each in (result if isinstance(result, tuple) else (result,)))

    gradients = []
    for run in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        x = torch.ones(3, requires_grad=True)
        run(x).backward()
        gradients.append(x.grad)
    assert gradients[0].abs().min() > 0
    assert torch.equal(*gradients)
    torch.compiler.reset()


def test_results_of_plain_calls_can_be_written_to():
    x = torch.ones(3, requires_grad=True)
    result = function_of(EarlierFunction, FORWARDS["written in place"])(x)
    result.mul_(2)
    result.sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 6.0))
