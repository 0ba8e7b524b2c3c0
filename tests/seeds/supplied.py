"""What BMTrain's documents leave open: the transformer block that their modules are made of."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import meshwright as bmt

DIM = 16


def block_class(module, parameter):
    """The same block, made with the two names that the README replaces."""

    class SomeTransformerBlock(module):
        def __init__(self):
            super().__init__()
            self.gain = parameter(torch.ones(DIM))
            self.weight = parameter(torch.empty(DIM, DIM))

        def forward(self, x, first, second, third):
            normed = F.layer_norm(x, (DIM,)) * self.gain
            return first * x + second / third * torch.tanh(F.linear(normed, self.weight))

    return SomeTransformerBlock


PlainTransformerBlock = block_class(nn.Module, nn.Parameter)
DistributedTransformerBlock = block_class(bmt.DistributedModule, bmt.DistributedParameter)
