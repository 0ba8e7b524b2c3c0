"""Embeddings that scale their rows in forward, in loops that BMTrain's modules run in."""

import pytest
import torch
from torch import nn

from meshwright import ModelError
from meshwright.compat.bmtrain.block import Block
from meshwright.compat.bmtrain.distributed_module import DistributedModule
from meshwright.compat.bmtrain.model_setup import BMTrainModelWrapper


class Outermost(DistributedModule):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 4, max_norm=1.0)

    def forward(self, x):
        return self.embedding(x)


def _refused():
    x = torch.ones(2, dtype=torch.long)
    alone = nn.Sequential(nn.Embedding(8, 4, max_norm=1.0))
    with pytest.raises(ModelError, match="0 changes its weights in forward: max_norm"):
        BMTrainModelWrapper(alone)
    for model in (Outermost(), Block(alone)):
        with pytest.raises(ModelError, match="changes its weights in forward: max_norm"):
            model(x)


def test_they_are_refused_on_several_ranks(ranks):
    ranks(2).run(_refused)
