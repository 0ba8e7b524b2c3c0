import copy
import inspect

import pytest
import torch
from torch import nn

from meshwright import ModelError
from meshwright.nn import check_forward, check_initialized, class_name, find_blocks, modules_of, outermost, wrap_method
from tests import tiny


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        ("plain", ["blocks.0", "blocks.1"]),
        ("gpt2", ["transformer.h.0", "transformer.h.1"]),
        ("llama", ["model.layers.0", "model.layers.1"]),
        ("bert", ["bert.encoder.layer.0", "bert.encoder.layer.1"]),
    ],
)
def test_blocks_are_what_the_forward_loops_over(name, paths):
    assert [path for path, _ in find_blocks(tiny.build(name))] == paths


def test_lists_inside_blocks_and_lists_without_parameters_are_none():
    model = nn.ModuleDict(
        {"layers": nn.ModuleList([nn.Sequential(nn.ModuleList([nn.Linear(1, 1)]))]),
         "acts": nn.ModuleList([nn.GELU()])}
    )  # fmt: skip
    assert [path for path, _ in find_blocks(model)] == ["layers.0"]


class Stage(nn.Module):
    """A module with a list inside, which runs layer by layer."""

    def __init__(self, heads=1):
        super().__init__()
        self.heads, self.norm = nn.ModuleList(nn.Linear(2, 2) for _ in range(heads)), nn.LayerNorm(2)

    def forward(self, x):
        return self.norm(sum(head(x) for head in self.heads))


class Between(Stage):
    """What stands between stages."""


def test_blocks_are_what_a_sequential_repeats():
    mlp, stem = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    model = nn.Sequential(stem, nn.Sequential(Stage(), Stage(2)), Between(), nn.Sequential(Stage(3), Stage()), mlp)
    names = ["1.0", "1.1", "3.0", "3.1"]
    assert [path for path, _ in find_blocks(model)] == [names[0], names[1], "2.heads.0", names[2], names[3]]
    whole = nn.Sequential(nn.Embedding(3, 2), Stage(), Stage(), Stage(), nn.LayerNorm(2), Between(), nn.Linear(2, 3))
    assert [path for path, _ in find_blocks(whole)] == ["1", "2", "3"]
    assert find_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == []
    wrap_method(whole[2], "forward", lambda forward, x: forward(x))
    assert [path for path, _ in find_blocks(whole)] == ["1", "2", "3"]


class Holder(nn.Module):
    """A container of the user's own: its parts are called by the model."""

    def __init__(self):
        super().__init__()
        self.attention = nn.Linear(2, 2)


def test_blocks_are_the_modules_in_containers_that_run():
    shared = nn.Linear(2, 2)
    model = nn.Module()
    model.layers = nn.ModuleList(
        [nn.ModuleList([shared, nn.ModuleDict({"norm": nn.LayerNorm(2), "act": nn.GELU()}), None]),
         nn.ModuleList([shared, nn.Linear(2, 2)]), Holder(), nn.ParameterList([torch.ones(2)]), nn.Linear(2, 2)]
    )  # fmt: skip
    assert [path for path, _ in find_blocks(model)] == [
        "layers.0.0", "layers.0.1.norm", "layers.1.1", "layers.2.attention", "layers.4",
    ]  # fmt: skip
    with pytest.raises(ModelError, match=r"checkpoint: layers.2 has no forward.*Got Holder"):
        check_forward(modules_of(model, ["Holder"], method="checkpoint"), method="checkpoint")


def test_classes_are_found_by_bare_and_qualified_names_and_by_their_bases():
    model = tiny.Mlp()
    for reference in ("Linear", class_name(nn.Linear)):
        found = [path for path, _ in modules_of(model, [reference], method="fsdp")]
        assert found == ["first", "layers.0.0", "layers.1.0", "layers.2.0", "last"]
    nested = modules_of(model, ["Sequential", "Linear"], method="fsdp")
    assert [path for path, _ in outermost(nested)] == ["first", "last", "layers.0", "layers.1", "layers.2"]
    with pytest.raises(ModelError, match=r"fsdp.*did you mean 'Linear'.*Expected classes.*Got 'Linea'"):
        modules_of(model, ["Linea"], method="fsdp")


def test_a_wrapped_method_leaves_everything_else_as_it_was():
    layer = nn.Linear(2, 2)
    plain = copy.deepcopy(layer)
    wrap_method(layer, "forward", lambda forward, x: forward(x) + 1)
    wrap_method(layer, "forward", lambda forward, x: forward(x) * 2)
    x = torch.randn(1, 2)
    expected = (plain(x) + 1) * 2
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(copy.deepcopy(layer)(x), expected)
    assert isinstance(layer, nn.Linear)
    assert class_name(type(layer)) == class_name(nn.Linear)
    assert list(layer.state_dict()) == ["weight", "bias"]
    assert inspect.signature(layer.forward) == inspect.signature(plain.forward)
    torch.testing.assert_close(nn.Linear(2, 2)(x).shape, x.shape)


def test_lazy_modules_are_refused_until_they_have_run():
    model = nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(2), nn.LazyBatchNorm1d())
    with pytest.raises(ModelError, match=r"1\.weight.*2\.running_mean"):
        check_initialized(model)
    model(torch.randn(2, 3))
    check_initialized(model)
