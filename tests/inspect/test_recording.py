import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.errors import InspectError
from meshwright.inspect import captured, hand_over, inspect_tensor, record_tensor, recording_active


class Layer(nn.Module):
    def __init__(self, dim=4):
        super().__init__()
        self.first, self.second = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x):
        hidden = self.first(x).tanh()
        record_tensor(hidden, "hidden")  # BMTrain's style: the result is not used
        return self.second(hidden)


class Stack(nn.Module):
    """Three layers, each run by ``around(layer, x)``."""

    def __init__(self, around):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.around = around

    def forward(self, x):
        for layer in self.layers:
            x = self.around(layer, x)
        return record_tensor(x, "output", group="model")


def plainly(layer, x):
    return layer(x)


def recomputed(layer, x):
    return checkpoint(layer, x, use_reentrant=False)


def reentrant(layer, x):
    return checkpoint(layer, x, use_reentrant=True)


def in_capture(layer, x):
    with captured() as records:
        output = layer(x)
    hand_over(records, [record.tensor for record in records])
    return output


def in_two_captures(layer, x):
    return in_capture(lambda y: in_capture(layer, y), x)


def carried_out(layer, x):
    """As a block does it: recorded tensors leave the recomputed function as outputs."""

    def inner(y):
        with captured() as records:
            output = layer(y)
        return output, records, [record.tensor for record in records]

    output, records, tensors = checkpoint(inner, x, use_reentrant=False)
    hand_over(records, tensors)
    return output


INPUT = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
WAYS = [recomputed, in_capture, in_two_captures, carried_out]


def run(around, loss_of):
    """Names, tensors, summary and parameter gradients; the backward runs under a second inspector."""
    model = Stack(around)
    with inspect_tensor() as inspector:
        output = model(INPUT.clone().requires_grad_())
    loss = loss_of(output, inspector)
    with inspect_tensor() as during_backward:
        loss.backward()
    assert during_backward.summary == []
    names = [line["summary_name"] for line in inspector.summary]
    tensors = [line["tensor"].detach() for line in inspector.summary]
    return names, tensors, inspector.get_summary(), [parameter.grad for parameter in model.parameters()]


def from_output(output, inspector):
    return output.square().sum()


def from_records(output, inspector):
    return sum((line["tensor"] * (k + 1)).pow(3).sum() for k, line in enumerate(inspector.summary[:2]))


@pytest.mark.parametrize("loss_of", [from_output, from_records])
@pytest.mark.parametrize("around", WAYS)
def test_recorded_once_with_the_gradients_of_the_plain_model(around, loss_of):
    expected, found = run(plainly, loss_of), run(around, loss_of)
    assert found[0] == expected[0] == ["0.hidden", "1.hidden", "2.hidden", "model.0.output"]
    for mine, theirs in zip(found[1] + found[3], expected[1] + expected[3], strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.equal(mine, theirs)
    assert found[2] == expected[2]
    reached = expected[2] if loss_of is from_output else expected[2][:2]
    assert all(line["grad_std"] > 0 for line in reached)
    assert all(line["grad_std"] is None for line in expected[2][len(reached) :])


def test_reentrant_recomputation_is_not_recorded_either():
    names, tensors, summary, gradients = run(reentrant, from_output)
    _, expected, _, plain_gradients = run(plainly, from_output)
    assert names == ["0.hidden", "1.hidden", "2.hidden", "model.0.output"]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(tensors, expected, strict=True))
    assert [line["grad_mean"] is None for line in summary] == [True, True, True, False]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(gradients, plain_gradients, strict=True))


def test_statistics_are_those_of_torch_and_gradients_appear_after_backward():
    x = torch.randn(3, 4, requires_grad=True)
    with inspect_tensor() as inspector:
        double = record_tensor(x * 2, "double", group="a")
        record_tensor(double.detach(), "double")
        record_tensor(double + 1, "double", group="a", requires_grad=False)
        record_tensor(torch.arange(3), "ids")
    before = inspector.get_summary()
    assert [line["name"] for line in before] == ["a.0.double", "0.double", "a.1.double", "0.ids"]
    assert all(line["grad_std"] is None and line["grad_mean"] is None for line in before)
    assert before[3] | {"name": ""} == {
        "name": "", "shape": (3,), "max": 2.0, "min": 0.0, "std": 1.0, "mean": 1.0, "grad_std": None, "grad_mean": None,
    }  # fmt: skip
    inspector.summary[2]["tensor"].square().sum().backward()
    after = inspector.get_summary()
    assert [line["grad_std"] is None for line in after] == [False, True, True, True]
    gradient = 2 * (double.detach() + 1)
    for line, value in zip(after[:2], (double, double), strict=True):
        assert list(line) == ["name", "shape", "max", "min", "std", "mean", "grad_std", "grad_mean"]
        assert [line[key] for key in ("max", "min", "std", "mean")] == pytest.approx(
            [value.max().item(), value.min().item(), value.std().item(), value.mean().item()], rel=1e-6
        )
    assert (after[0]["grad_std"], after[0]["grad_mean"]) == pytest.approx(
        (gradient.std().item(), gradient.mean().item()), rel=1e-6
    )


def test_tensors_are_found_by_name_group_and_index():
    with inspect_tensor() as inspector:
        tensors = [record_tensor(torch.tensor([float(k)]), "x", group="g" if k % 2 else None) for k in range(5)]
    assert inspector.get_tensor("x") is inspector.get_tensor("x", index=0) is tensors[0]
    assert inspector.get_tensor("x", index=2) is tensors[4]
    assert inspector.get_tensor("x", "g", 1) is tensors[3]
    assert inspector.get_tensor("x", "g", 2) is inspector.get_tensor("x", index=-1) is inspector.get_tensor("y") is None


def test_what_stands_for_a_record_outside_carries_its_gradient_back():
    x = torch.ones(3, requires_grad=True)
    with inspect_tensor() as inspector:
        with captured() as records:
            inside = record_tensor(x * 2, "inside")
        hand_over(records, [inside.double()])
    outside = inspector.get_tensor("inside")
    assert outside.dtype == torch.float64
    (outside.sum() + 4 * inside.sum()).backward()  # both the loss and the model's own way count
    assert inspector.get_summary()[0]["grad_mean"] == 5.0
    assert x.grad.tolist() == [10.0] * 3


def test_without_an_inspector_nothing_is_recorded():
    x = torch.ones(2, requires_grad=True) * 1
    assert record_tensor(x, "x") is x
    assert not x.retains_grad
    assert not recording_active()
    with captured() as records:
        record_tensor(x, "x")
        assert not recording_active()
    assert records == []
    hand_over(records, [])


class Broken(Exception):
    pass


def break_in_a_block():
    record_tensor(torch.ones(1), "before")
    with captured():
        record_tensor(torch.ones(1), "lost")
        raise Broken


def test_errors_leave_nothing_behind():
    with pytest.raises(Broken), inspect_tensor() as inspector:
        break_in_a_block()
    assert not recording_active()
    assert [line["summary_name"] for line in inspector.summary] == ["0.before"]
    with inspect_tensor() as outer:
        with pytest.raises(InspectError, match=r"already active.*Expected.*Got.*What to do"), inspect_tensor():
            pass
        with pytest.raises(Broken), captured():
            raise Broken
        record_tensor(torch.ones(1), "after")
    assert outer.get_tensor("after") is not None


@pytest.mark.parametrize(("thing", "got"), [(nn.Parameter(torch.ones(1)), "a parameter"), ([torch.ones(1)], "list")])
def test_what_cannot_be_recorded_is_refused_even_when_nobody_inspects(thing, got):
    with pytest.raises(InspectError, match=f"'thing'.*Expected.*Got {got}.*What to do"):
        record_tensor(thing, "thing")


def test_more_or_fewer_tensors_than_records_are_refused():
    with inspect_tensor(), captured() as records:
        record_tensor(torch.ones(1), "x")
    with pytest.raises(ValueError, match="zip"):
        hand_over(records, [])
