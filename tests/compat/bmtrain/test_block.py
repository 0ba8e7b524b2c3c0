"""What goes through a Block, what it is, and what it refuses."""

import dataclasses
import importlib
from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from meshwright import LaunchError, ModelError, runtime
from meshwright.compat.bmtrain.block import Block, CheckpointBlock, note_gather, take_gather_order
from meshwright.compat.bmtrain.block_list import TransformerBlockList
from meshwright.compat.bmtrain.distributed_module import DistributedModule
from meshwright.compat.bmtrain.model_setup import grouped_parameters, init_parameters
from meshwright.compat.bmtrain.optim_manager import OptimManager
from meshwright.compat.bmtrain.parameter import DistributedParameter, ParameterInitializer
from meshwright.compat.bmtrain.pipeline_block_list import PipelineTransformerBlockList
from meshwright.inspect import inspect_tensor, record_tensor
from tests.compat.bmtrain.seed_models import (
    DIM,
    IN,
    Layer,
    Linear,
    PlainLayer,
    build,
    full,
    gradients,
    largest_difference,
    weights,
)

block_module = importlib.import_module("meshwright.compat.bmtrain.block")
Pair = namedtuple("Pair", "first second")


class Nested(nn.Module):
    """Takes tensors from everywhere and returns them in a shape that is asked for."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x, pair=(0.0, 0.0), *rest, shape="tensor", named=None, **more):
        out = self.linear(x + pair[0]) * (1 + sum(rest)) + pair[1]
        if named is not None:
            out = out * named["scale"]["deep"][0]
        out = out + more.get("extra", 0.0)
        return {
            "tensor": out, "list": [out, x], "tuple": (out,), "dict": {"out": out, "n": 3}, "pair": Pair(out, 1),
            "output": _model_output(out) if shape == "output" else None, "nothing": None,
        }[shape]  # fmt: skip


def _model_output(tensor):
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=tensor)


def _calls():
    def inputs():
        generator = torch.Generator().manual_seed(1)
        return [torch.randn(3, DIM, generator=generator).requires_grad_() for _ in range(6)]

    for shape in ("tensor", "list", "tuple", "dict", "pair", "output"):
        found = []
        for wrap in (lambda module: module, Block, lambda module: Block(module, use_checkpoint=False)):
            torch.manual_seed(0)
            module, (x, a, b, c, scale, extra) = wrap(Nested()), inputs()
            out = module(x, (a, b), c, 2, shape=shape, named={"scale": {"deep": [scale]}}, extra=extra)
            tensors = [leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, torch.Tensor)]
            sum((tensor**2).sum() for tensor in tensors).backward()
            grads = [leaf.grad for leaf in (x, a, b, c, scale, extra)] + list(gradients(module).values())
            found.append((type(out), grads))
        assert all(kind is found[0][0] for kind, _ in found), shape
        for _, grads in found[1:]:
            assert all(torch.allclose(one, other, rtol=1e-5) for one, other in zip(grads, found[0][1], strict=True))
    assert Block(Nested())(torch.ones(1, DIM), shape="nothing") is None


def test_any_arguments_and_results(ranks):
    ranks(2).run(_calls)


def _identity():
    module = PlainLayer()
    names = [name for name, _ in module.named_parameters()]
    block = Block(module)
    assert isinstance(block, Block)
    assert isinstance(block, PlainLayer)
    assert type(block).__name__.endswith("Layer")
    assert [name for name, _ in block.named_parameters()] == names
    assert list(block.state_dict()) == ["scale", *names]
    assert block.up is module.up
    block.anything = 5
    assert module.anything == 5
    assert CheckpointBlock is Block
    sequential = Block(nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM)))
    assert type(sequential[:1]) is nn.Sequential
    assert len(sequential) == 3
    shared = [PlainLayer() for _ in range(2)]
    layers = TransformerBlockList([shared[0], shared[1], shared[0]])
    assert layers[0] is not layers[2]
    assert len(list(layers.parameters())) == 8
    assert layers[0].up.weight is layers[2].up.weight
    assert isinstance(PipelineTransformerBlockList([PlainLayer()])(torch.ones(1, DIM)), torch.Tensor)
    assert TransformerBlockList([])(1) == 1


def test_a_block_is_its_module(ranks):
    ranks(2).run(_identity)


def _shared_trains():
    """One module in several places of a list, against plain torch."""
    x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(2))
    plain_layers = [build("plain").layers[k] for k in (0, 1, 0)]
    plain_layers[2] = plain_layers[0]
    made = build("plain").layers
    layers = TransformerBlockList([made[0], made[1], made[0]])
    for _ in range(3):
        out, expected = layers(x, 0.7), x
        for layer in plain_layers:
            expected = layer(expected, 0.7)
        assert torch.allclose(out, expected, atol=1e-6)
        out.square().sum().backward()
        expected.square().sum().backward()
        plain, found = nn.ModuleList(plain_layers), gradients(layers)
        for name, grad in gradients(plain).items():
            assert torch.allclose(found[name], grad, rtol=1e-4, atol=1e-5), name
        with torch.no_grad():
            for parameter in (*layers.parameters(), *plain.parameters()):
                parameter -= 0.01 * parameter.grad
                parameter.grad = None


def test_one_module_in_several_places(ranks):
    ranks(2).run(_shared_trains)


class Halves(nn.Module):
    """fp16 weights with fp32 norms, as mixed models have them."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(DIM), nn.Linear(DIM, DIM).bfloat16()
        self.frozen = nn.Linear(DIM, DIM).double().requires_grad_(False)

    def forward(self, x):
        return x + self.linear(self.norm(x).bfloat16()).float() + self.frozen(x.double()).float()


def _dtypes():
    torch.manual_seed(0)
    plain, wrapped = Halves(), Halves()
    wrapped.load_state_dict(plain.state_dict())
    block = Block(wrapped)
    x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(2))
    for module in (plain, block):
        module(x).square().sum().backward()
    found = gradients(block)
    for name, grad in gradients(plain).items():
        assert torch.allclose(found[name], grad, rtol=1e-2), name
    assert {p.dtype for p in block.parameters()} == {torch.float32, torch.bfloat16, torch.float64}


def test_several_dtypes_in_one_block(ranks):
    ranks(2).run(_dtypes)


def _scalar():
    module = nn.Linear(2, 2)
    module.gain = nn.Parameter(torch.ones(()))
    return Block(module)


def _two_dtypes():
    module = nn.Linear(2, 2)
    module.bias = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    return Block(module)


def _shared_parameter():
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.weight = one.weight
    return Block(one), Block(other)


def _twice():
    block = Block(nn.Linear(2, 2))
    return TransformerBlockList([block, Block(nn.Linear(2, 2)), block])


def _other_options():
    module = nn.Linear(2, 2)
    return Block(module), Block(module, zero_level=2)


REFUSALS = {
    "scalar": (_scalar, ("gain", "(1,)")),
    "two dtypes": (_two_dtypes, ("bfloat16", "Linear")),
    "shared": (_shared_parameter, ("weight", "another Block")),
    "nested": (lambda: Block(nn.Sequential(Block(nn.Linear(2, 2)))), ("do not nest",)),
    "a Block of a Block": (lambda: Block(Block(nn.Linear(2, 2))), ("no Block yet", "a Block")),
    "no module": (lambda: Block(3), ("nn.Module", "int")),
    "twice": (_twice, ("twice", "the Block at 0")),
    "options": (_other_options, ("zero_level=3", "zero_level=2")),
    "level": (lambda: Block(nn.Linear(2, 2), zero_level=4), ("1, 2 or 3", "4")),
    "mode": (lambda: Block(nn.Linear(2, 2), mode="1D"), ("'BLOCK' or 'PIPE'", "1D")),
    "hidden": (lambda: TransformerBlockList([], num_hidden=0), ("num_hidden",)),
    "too few": (lambda: TransformerBlockList([], num_hidden=2)(1), ("2 leading arguments",)),
    "parameter of a parameter": (lambda: DistributedParameter(DistributedParameter(torch.ones(2))), ("full_tensor",)),
    "scalar parameter": (lambda: DistributedParameter(torch.ones(())), ("(1,)",)),
}


def _refused(name):
    make, words = REFUSALS[name]
    try:
        make()
    except (ModelError, TypeError) as error:
        return [word for word in words if word not in str(error)]
    return ["no error"]


@pytest.mark.parametrize("name", list(REFUSALS))
def test_clear_refusals(ranks, name):
    assert ranks(2).run(_refused, name) == [[], []]


def _half_applied():
    """A refused module is as it was."""
    module = nn.Linear(2, 2)
    module.bias = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    before = dict(module.named_parameters())
    with pytest.raises(ModelError):
        Block(module)
    assert dict(module.named_parameters()) == before
    assert type(module) is nn.Linear


def test_a_refused_module_is_untouched(ranks):
    ranks(2).run(_half_applied)


@pytest.mark.parametrize(
    "use",
    [
        lambda: DistributedParameter(torch.ones(2)),
        lambda: Block(nn.Linear(2, 2)),
        lambda: TransformerBlockList([nn.Linear(2, 2)]),
        lambda: init_parameters(nn.Linear(2, 2)),
    ],
)
def test_before_init_distributed(use):
    assert not torch.distributed.is_initialized()
    with pytest.raises(LaunchError, match="init_distributed"):
        use()


def _levels():
    """``init_distributed(zero_level=2)`` holds for every Block that is not told otherwise."""
    before = block_module.settings
    block_module.settings = lambda: dataclasses.replace(before(), zero_level=2)
    try:
        block, other = Block(PlainLayer()), Block(PlainLayer(), zero_level=3)
    finally:
        block_module.settings = before
    for each, gathered in ((block, True), (other, False)):
        out = nn.Sequential(each)(torch.ones(1, DIM))
        # What is registered after forward tells whether the whole parameters were kept.
        assert (type(each.up.weight) is nn.Parameter) == gathered
        out.sum().backward()
        assert isinstance(each.up.weight, torch.distributed.tensor.DTensor)


def _another_block_on_one_rank():
    model = build("blocks")
    manager = OptimManager()
    manager.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def step(places):
        x = torch.ones(2, DIM)
        for place in places:
            x = model.layers[place](x)
        manager.backward(x.square().mean())
        manager.step()

    before = weights(model)
    with pytest.raises(ModelError, match="have run different Blocks"):
        step((0, 1 + runtime.rank()))  # equal shapes: nothing fails by itself
    assert largest_difference(weights(model), before) == 0
    manager.zero_grad()
    step((0, 1))
    with torch.no_grad():
        model.layers[2](torch.ones(2, DIM))  # evaluation counts, too
    step((3, 0, 3))
    assert largest_difference(weights(model), before) > 0


def test_ranks_that_run_different_blocks_are_told_before_weights_change(ranks):
    ranks(2).run(_another_block_on_one_rank)


def test_the_global_zero_level(ranks):
    ranks(2).run(_levels)


def _groups():
    model = build("list")
    groups = dict(grouped_parameters(model))
    assert set(groups) == {None, "bias"}
    assert len(groups["bias"]) == 11
    assert all(isinstance(parameter, DistributedParameter) for group in groups.values() for parameter in group)


def test_parameters_by_group(ranks):
    ranks(2).run(_groups)


def test_an_initializer_says_what_it_does():
    assert repr(ParameterInitializer(nn.init.normal_, std=0.5)) == "ParameterInitializer(normal_, std=0.5)"


class Recording(DistributedModule):
    def __init__(self):
        super().__init__()
        self.layer, self.linear = Layer(), Linear(DIM, DIM)

    def forward(self, x):
        hidden = self.layer(x)
        record_tensor(hidden, "hidden")
        return self.linear(hidden)


def _recorded():
    """Tensors recorded inside Blocks: once, equal to plain ones, and a loss made of nothing else trains."""
    results = {}
    for form in ("kept", "blocks", "list", "sqrt"):
        torch.manual_seed(0)
        layers = [Recording() for _ in range(3)]
        if form in ("kept", "blocks"):
            layers = nn.ModuleList(Block(layer, use_checkpoint=form == "blocks") for layer in layers)
        else:
            layers = TransformerBlockList(layers, sqrt=form == "sqrt")
        torch.manual_seed(3)
        init_parameters(layers)
        x = torch.randn(2, DIM, generator=torch.Generator().manual_seed(runtime.rank()))
        with inspect_tensor() as inspector:
            out = x
            for layer in layers:
                out = layer(out)
        assert [line["name"] for line in inspector.get_summary()] == ["0.hidden", "1.hidden", "2.hidden"]
        sum(line["tensor"].square().sum() for line in inspector.summary[:2]).backward()
        values = [line["tensor"].detach().clone() for line in inspector.summary]
        grads = gradients(layers)
        expected = results.setdefault("kept", (values, grads))
        assert grads.keys() == expected[1].keys(), form
        assert all(torch.allclose(one, other) for one, other in zip(values, expected[0], strict=True))
        assert all(torch.allclose(grads[name], expected[1][name], atol=1e-6) for name in grads), form
        assert full(layers[0].layer.up.weight.grad).abs().max() > 0


def test_recording_inside_blocks(ranks):
    ranks(2).run(_recorded)


def _counted():
    """Blocks that run again in backward, alone and in segments, see every batch once."""
    for form in ("blocks", "list", "sqrt"):
        layers = [nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM)) for _ in range(4)]
        model = (
            nn.Sequential(*map(Block, layers))
            if form == "blocks"
            else TransformerBlockList(layers, sqrt=form == "sqrt")
        )
        model(torch.randn(4, DIM)).square().sum().backward()
        assert [int(layer[1].num_batches_tracked) for layer in layers] == [1] * 4, form


def test_running_statistics_are_updated_once(ranks):
    ranks(2).run(_counted)


def _converted():
    """``half`` and ``to`` leave a model what it was: distributed, tied, with its initial values to come."""
    model = build("list")
    model.again = model.embed
    before = dict(model.named_parameters())
    model.bfloat16()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert all(model.get_parameter(name) is parameter for name, parameter in before.items())
    assert all(isinstance(parameter, DistributedParameter) for parameter in model.parameters())
    assert model.embed.weight.shape == (DIM, IN)
    torch.manual_seed(5)
    init_parameters(model)
    assert all(full(parameter).abs().max() > 0 for parameter in model.parameters())
    model(torch.ones(2, IN, dtype=torch.bfloat16)).sum().backward()
    with pytest.raises(ModelError, match="has run"):
        model.float()
    assert model.train().cpu() is model


def test_conversions(ranks):
    ranks(2).run(_converted)


def _order(*places):
    for place in places:
        note_gather(place)
    return take_gather_order()


def test_the_number_tells_what_was_gathered_and_in_which_order():
    take_gather_order()  # of whoever ran before
    assert _order() == 0
    assert _order(0, 1) == _order(0, 1)
    assert len({_order(0), _order(1), _order(0, 0), _order(0, 1), _order(1, 0)}) == 5
    assert 0 <= _order(*range(1000)) < 2**24  # whole in fp32
