import pytest
import torch
import torch.distributed as dist

from meshwright.optim import Lamb, factored as block
from meshwright.optim.adafactor import Adafactor
from meshwright.optim.came import CAME
from meshwright.optim.factored import BlockedSquares, Blocks, FactoredMoment, kept_means
from meshwright.optim.sharded import Layout
from tests.optim.sharded.layouts import layouts_of, start_values

SHAPES = [(5, 7), (2, 5, 7)]
ROUNDS = {Lamb: 1, Adafactor: 2, CAME: 3}


def chunk_of(shape, count=3):
    """The chunk that a step makes of equal parameters."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.randn(shape)
    (chunk,) = Adafactor(parameters)._chunks()
    return chunk


@pytest.mark.parametrize("elements", [1, 30, 35, 80, 1000])
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_cover_every_element_once(shape, elements, monkeypatch):
    monkeypatch.setitem(block._BLOCK_ELEMENTS, "cpu", elements)
    chunk = chunk_of(shape)
    counts, blocks = chunk.weights.map(torch.zeros_like), Blocks(chunk)
    row_width = shape[-1] * (shape[0] if len(shape) == 3 else 1)
    for views in blocks.of(counts):
        assert sum(view.numel() for view in views) <= max(elements, row_width)
        for view in views:
            view += 1
    assert all(count.eq(1).all() for count in counts)


@pytest.mark.parametrize("elements", [40, 1000])
@pytest.mark.parametrize("shape", SHAPES)
def test_factors_are_those_of_the_paper(shape, elements, monkeypatch):
    monkeypatch.setitem(block._BLOCK_ELEMENTS, "cpu", elements)
    chunk = chunk_of(shape)
    moment, squares = FactoredMoment(chunk, "exp_avg_sq", 0.75, 1e-3, scale=2.0), BlockedSquares(chunk)
    for part in squares:
        moment.add(part)
    moment.take([request.partial for request in moment.requests()])
    sums = moment.scaled_sums(squares)
    moment.scale_(torch.tensor([1.0, 2.0, 3.0]))
    scaled = chunk.gradients.map(torch.clone)
    for views, factors in zip(Blocks(chunk).of(scaled), moment.factors(), strict=True):
        torch._foreach_mul_(views, factors)
    for index, gradient in enumerate(chunk.gradients):
        mean = 0.25 * (2 * gradient.double() ** 2 + 1e-3)
        rows, cols = mean.mean(-1, keepdim=True), mean.mean(-2, keepdim=True)
        expected = gradient / (rows * cols / rows.mean(-2, keepdim=True)).sqrt()
        torch.testing.assert_close(sums[index].double(), expected.square().sum(), rtol=1e-6, atol=0)
        torch.testing.assert_close(
            chunk.states["exp_avg_sq_row"].tensors[index].double(), rows.squeeze(-1), rtol=1e-6, atol=0
        )
        torch.testing.assert_close(
            chunk.states["exp_avg_sq_col"].tensors[index].double(), cols.squeeze(-2), rtol=1e-6, atol=0
        )
        torch.testing.assert_close(scaled.tensors[index].double(), expected * (index + 1), rtol=1e-6, atol=0)


def test_states_have_the_dims_that_are_left():
    forms = kept_means(Layout((4, 6, 10), (4, 6, 10)), "exp_avg_sq")
    assert {name: (form.shape, form.dims) for name, form in forms.items()} == {
        "exp_avg_sq_row": ((4, 6), (0, 1)),
        "exp_avg_sq_col": ((4, 10), (0, 2)),
    }


def reductions_in_a_step(kind, count):
    """All-reduces of the second step of ``count`` parameters of several shapes that two ranks share."""
    reduced = dist.all_reduce
    calls = []
    place = layouts_of(2)["fsdp"]
    parameters = []
    while len(parameters) < count:
        for name, whole in start_values().items():
            parameters.append(torch.nn.Parameter(place(name, whole)))
            parameters[-1].grad = place(name, whole)
    optimizer = kind(parameters[:count], **({"lr": 0.1} if kind is CAME else {}))
    optimizer.step()
    dist.all_reduce = lambda *args, **kwargs: (calls.append(1), reduced(*args, **kwargs))[1]
    try:
        optimizer.step()
    finally:
        dist.all_reduce = reduced
    return len(calls)


def reductions():
    return {(kind, count): reductions_in_a_step(kind, count) for kind in ROUNDS for count in (10, 300)}


def test_a_step_reduces_as_often_for_ten_parameters_as_for_hundreds(ranks):
    for answer in ranks(2).run(reductions):
        assert answer == {(kind, count): rounds for kind, rounds in ROUNDS.items() for count in (10, 300)}
