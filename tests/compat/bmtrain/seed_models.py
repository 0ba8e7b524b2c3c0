"""A small model in BMTrain's style, and the same model in plain torch with the same names."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.compat.bmtrain.block import Block
from meshwright.compat.bmtrain.block_list import TransformerBlockList
from meshwright.compat.bmtrain.distributed_module import DistributedModule
from meshwright.compat.bmtrain.model_setup import BMTrainModelWrapper, init_parameters
from meshwright.compat.bmtrain.parameter import DistributedParameter, ParameterInitializer

DIM, IN, LAYERS = 10, 7, 5


def normal(std=0.15):
    return ParameterInitializer(nn.init.normal_, std=std)


class Linear(DistributedModule):
    def __init__(self, num_in, num_out, dtype=torch.float32):
        super().__init__()
        weight = torch.empty(num_out, num_in, dtype=dtype)
        self.weight = DistributedParameter(weight, init_method=normal())
        self.bias = DistributedParameter(torch.empty(num_out, dtype=dtype), init_method=normal(), group="bias")

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class PlainLinear(nn.Linear):
    def reset_parameters(self):
        nn.init.normal_(self.weight, std=0.15)
        nn.init.normal_(self.bias, std=0.15)


def layer_class(linear, base):
    class Layer(base):
        """Residual MLP; a buffer, dropout, an argument with a default and one that is keyword-only."""

        def __init__(self, dim=DIM, dropout=0.0):
            super().__init__()
            self.up, self.down = linear(dim, 3 * dim), linear(3 * dim, dim)
            self.dropout = nn.Dropout(dropout)
            self.register_buffer("scale", torch.linspace(0.5, 1.5, dim))

        def forward(self, x, factor=1.0, *, shift=0.0):
            return x + factor * self.dropout(self.down(F.gelu(self.up(x)))) * self.scale + shift

    return Layer


Layer = layer_class(Linear, DistributedModule)
PlainLayer = layer_class(PlainLinear, nn.Module)


class Model(DistributedModule):
    """``form``: how the layers are held: "blocks", "kept" (no recompute), "list", "sqrt", "zero2", "zero1"."""

    def __init__(self, form="list", num_layers=LAYERS, dropout=0.0):
        super().__init__()
        self.embed = Linear(IN, DIM)
        layers = [Layer(dropout=dropout) for _ in range(num_layers)]
        self.form = form
        if form in ("blocks", "kept"):
            self.layers = nn.ModuleList(Block(layer, use_checkpoint=form == "blocks") for layer in layers)
        elif form in ("zero1", "zero2"):
            self.layers = TransformerBlockList([Block(layer, zero_level=int(form[-1])) for layer in layers])
        else:
            self.layers = TransformerBlockList(layers, sqrt=form == "sqrt")
        self.gain = DistributedParameter(torch.ones(DIM))

    def forward(self, x, factor=1.0):
        x = self.embed(x)
        if self.form in ("blocks", "kept"):
            for layer in self.layers:
                x = layer(x, factor)
        else:
            x = self.layers(x, factor)
        return F.linear(x * self.gain, self.embed.weight.t())


class PlainModel(nn.Module):
    def __init__(self, num_layers=LAYERS, dropout=0.0):
        super().__init__()
        self.embed = PlainLinear(IN, DIM)
        self.layers = nn.ModuleList(PlainLayer(dropout=dropout) for _ in range(num_layers))
        self.gain = nn.Parameter(torch.ones(DIM))

    def forward(self, x, factor=1.0):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, factor)
        return F.linear(x * self.gain, self.embed.weight.t())


FORMS = ("blocks", "kept", "list", "sqrt", "zero2", "zero1")


def build(form, seed=5, **options):
    """The same initial values in every form: "plain", "wrapped" (a wrapped plain model), or one of FORMS."""
    torch.manual_seed(seed)
    if form in ("plain", "wrapped"):
        model = PlainModel(**options)
        return BMTrainModelWrapper(model) if form == "wrapped" else model
    model = Model(form, **options)
    init_parameters(model)
    return model


def full(tensor):
    """A copy of the whole tensor."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def weights(model):
    return {name: full(parameter) for name, parameter in model.named_parameters()}


def gradients(model):
    return {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def largest_difference(one, other):
    """Of all elements, as a fraction of the largest magnitude."""
    assert list(one) == list(other)
    scale = max(value.abs().max().item() for value in other.values())
    return max((one[name] - other[name]).abs().max().item() for name in one) / scale
