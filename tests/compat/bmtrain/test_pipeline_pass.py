"""BMTrain's test_inspector_hidden: what is recorded inside a list of blocks is the same whatever kind of list it is."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshwright as bmt
from meshwright import runtime
from meshwright.compat.bmtrain.block import Block
from meshwright.compat.bmtrain.distributed_module import DistributedModule
from meshwright.compat.bmtrain.parameter import DistributedParameter
from meshwright.compat.bmtrain.pipeline_block_list import PipelineTransformerBlockList
from meshwright.errors import InspectError, LaunchError
from meshwright.inspect import inspect_model, inspect_tensor, record_tensor
from tests.compat.bmtrain.pipeline_models import stages
from tests.compat.bmtrain.seed_models import Linear, PlainLinear, full, normal

DIM, TIME, LAYERS, PER_RANK = 6, 3, 5, 4


def pair_class(linear, base):
    class Pair(base):
        def __init__(self, index):
            super().__init__()
            self.m1, self.m2, self.index = linear(DIM, DIM), linear(DIM, DIM), index

        def forward(self, x):
            x = record_tensor(self.m1(x), "hidden")
            if self.index % 2:
                record_tensor(x.flatten(0, 1), "rows", group="odd")
                record_tensor(x.argmax(-1), "choice")
            return self.m2(x)

    return Pair


class Model(nn.Module):
    """``kind``: "plain", "modules" (gathered on use), "blocks", "list" or "pipeline"."""

    def __init__(self, kind):
        super().__init__()
        linear, base = (PlainLinear, nn.Module) if kind == "plain" else (Linear, DistributedModule)
        pair = pair_class(linear, base)
        self.kind = kind
        self.pre = linear(DIM, DIM)
        layers = [pair(index) for index in range(LAYERS)]
        if kind in ("plain", "modules"):
            self.layers = nn.ModuleList(layers)
        elif kind == "blocks":
            self.layers = nn.ModuleList(Block(layer) for layer in layers)
        else:  # the one line that changes
            list_class = PipelineTransformerBlockList if kind == "pipeline" else bmt.TransformerBlockList
            self.layers = list_class([Block(layer) for layer in layers])
        self.post = linear(DIM, DIM)

    def forward(self, x):
        x = self.pre(x)
        if self.kind in ("list", "pipeline"):
            x, hidden = self.layers(x, return_hidden_states=True)
            return self.post(x), hidden
        hidden = []
        for layer in self.layers:
            hidden.append(x)
            x = layer(x)
        return self.post(x), torch.stack(hidden)


def build(kind):
    """ "wrapped": a plain model that was wrapped whole, whose blocks were then put into a pipeline."""
    torch.manual_seed(5)
    model = Model("plain" if kind == "wrapped" else kind)
    if kind == "wrapped":
        model = bmt.BMTrainModelWrapper(model)
        model.layers, model.kind = PipelineTransformerBlockList(model.layers), "pipeline"
    elif kind != "plain":
        bmt.init_parameters(model)
    return model


def tables(model, inputs, weights):
    """Losses and all tables: a loss of recorded tensors alone, then one of the output and hidden states."""
    with inspect_tensor() as inspector:
        model(inputs)
    found = [inspector.get_summary()]
    loss = sum(
        (line["tensor"] * weight).sum()
        for line, weight in zip((each for each in inspector.summary if each["name"] == "hidden"), weights, strict=False)
    )
    with inspect_tensor() as during_backward:
        loss.backward()
    assert during_backward.get_summary() == []
    found += [inspector.get_summary(), inspect_model(model)]
    with inspect_tensor() as inspector:
        logits, hidden = model(inputs)
    last = (logits * weights[-1]).sum() + (hidden[2] * weights[0]).sum() + (hidden[-1] * weights[1]).sum()
    last.backward()
    return [loss.item(), last.item(), hidden.detach()], [*found, inspector.get_summary(), inspect_model(model)]


def assert_same(found, expected, grad_scale):
    assert [line["name"] for line in found] == [line["name"] for line in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["shape"] == theirs["shape"]
        for key in ("max", "min", "std", "mean", "grad_std", "grad_mean"):
            # BMTrain's test takes no gradient for a gradient of nothing, too.
            wanted = (theirs[key] or 0.0) * (grad_scale if key.startswith("grad") else 1.0)
            assert (ours[key] or 0.0) == pytest.approx(wanted, rel=1e-4, abs=2e-5), (ours["name"], key)


def data(world):
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(world * PER_RANK, TIME, DIM, generator=generator)
    return inputs, torch.randn(LAYERS - 1, world * PER_RANK, TIME, DIM, generator=generator)


def _kinds(expected_hidden, expected):
    world, rank = runtime.world_size(), runtime.rank()
    inputs, weights = data(world)
    mine, own_weights = inputs.chunk(world)[rank], weights.chunk(world, dim=1)[rank]
    losses = {}
    with stages(2, num_micro_batches=4):
        for kind in ("modules", "blocks", "list", "wrapped", "pipeline"):
            model = build(kind)
            (*losses[kind], hidden), found = tables(model, mine, own_weights)
            torch.testing.assert_close(hidden, expected_hidden.chunk(world, dim=1)[rank], rtol=1e-5, atol=1e-6)
            for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
                # Gradients of parameters are the mean over ranks; activations have those of their own rank's loss.
                assert_same(ours, theirs, grad_scale=1 / world if index in (2, 4) else 1.0)
        assert all(value == pytest.approx(losses["list"], rel=1e-5) for value in losses.values())
        _assert_refused(model, mine)
        _assert_dropout_is_recomputed()


def _record_mean(module, args, output):
    record_tensor(output.mean(), "mean")


def _assert_refused(model, inputs):
    """On every rank, with the same words."""
    with inspect_tensor() if runtime.rank() == 0 else torch.enable_grad(), pytest.raises(LaunchError, match="inspect"):
        model(inputs)
    last = model.layers[LAYERS - 1 if runtime.stage_index() else 0].m2
    last.register_forward_hook(_record_mean)
    with inspect_tensor(), pytest.raises(InspectError, match="'mean' cannot be divided"):
        model(inputs)


class Dropping(DistributedModule):
    """What it adds is linear in its weight. The norm's dtype makes it an FSDP2 unit of its own inside a Block."""

    def __init__(self):
        super().__init__()
        self.weight = DistributedParameter(torch.empty(DIM), init_method=normal())
        self.norm = nn.LayerNorm(DIM, bias=False, dtype=torch.float64)

    def forward(self, x):
        return x + F.dropout(self.norm(x.double()).float() * self.weight, 0.5)


def _assert_dropout_is_recomputed():
    """Other masks in backward would give another gradient. Two Blocks share a module, on their stage, too."""
    shared = Dropping()
    layers = PipelineTransformerBlockList([shared, Block(shared), Block(Dropping())])
    bmt.init_parameters(layers)
    for stage, place in enumerate((0, 2)):
        out, inputs = layers(torch.randn(8, DIM), return_hidden_states=True)
        added = (out if stage else inputs[1]) - inputs[place]
        layers.zero_grad()
        added.sum().backward()
        mean = bmt.sum_loss(added.sum(0))
        assert 0 < (added == 0).sum() < added.numel()
        if runtime.stage_index() == stage:
            weights = {name: each for name, each in layers.named_parameters() if name.endswith("weight")}
            assert list(weights) == [f"{place}.weight", f"{place}.norm.weight"]
            assert (stage == 1) or layers[0].unit is layers[1].unit
            weight = weights[f"{place}.weight"]
            torch.testing.assert_close(full(weight) * full(weight.grad), mean)


def test_recorded_tensors_are_those_of_the_plain_model(ranks):
    (*_, hidden), expected = tables(build("plain"), *data(2))
    assert len(expected[0]) == LAYERS + 2 * (LAYERS // 2)
    ranks(2).run(_kinds, hidden, expected)
