"""A small model whose blocks are one list, on one stage or several: only the class of the list differs."""

import contextlib

import torch
import torch.nn.functional as F
from torch import nn

from meshwright import runtime
from meshwright.compat.bmtrain.block import Block
from meshwright.compat.bmtrain.distributed_module import DistributedModule
from meshwright.compat.bmtrain.model_setup import init_parameters
from meshwright.compat.bmtrain.parameter import DistributedParameter
from meshwright.compat.bmtrain.pipeline_block_list import PipelineTransformerBlockList
from meshwright.runtime import processes
from tests.compat.bmtrain.seed_models import DIM, IN, Linear, normal

LAYERS = 3  # two on the first of two stages


@contextlib.contextmanager
def stages(size, **options):
    """The pool's ranks as if they had called ``init_distributed(pipe_size=size)``."""
    before, processes._settings = processes._settings, None
    try:
        runtime.init_distributed(backend="gloo", timeout_s=120.0, pipe_size=size, **options)
        yield
    finally:
        processes._settings = before


class Layer(DistributedModule):
    """Two hidden states, a mask with a row per sample, a bias for all; a buffer and an ordinary parameter."""

    def __init__(self):
        super().__init__()
        self.up, self.down = Linear(DIM, 2 * DIM), Linear(2 * DIM, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, DIM))

    def forward(self, x, y, mask, *, bias):
        change = self.down(F.gelu(self.up(self.norm(x + 0.1 * y)) + bias)) * self.scale
        return x + change * mask, 0.5 * y + x


class Model(DistributedModule):
    """Parameters outside: distributed, ordinary, and one that all blocks get."""

    def __init__(self):
        super().__init__()
        self.embed = Linear(IN, DIM)
        layers = [Block(Layer()), Layer(), Block(Layer(), use_checkpoint=False, zero_level=2)]
        self.layers = PipelineTransformerBlockList(layers, num_hidden=2)
        self.bias = DistributedParameter(torch.empty(2 * DIM), init_method=normal())
        self.head = nn.Linear(DIM, IN)

    def forward(self, x, gate):
        x = self.embed(x)
        out = self.layers(x, x.tanh(), gate, bias=self.bias, batch_related=[0], return_hidden_states=True)
        return self.head(out[0]) + out[1].sum(-1, keepdim=True), out


def build():
    torch.manual_seed(5)
    model = Model()
    init_parameters(model)
    return model
