"""A model whose parameters exceed a rank's memory is built and trained: nobody ever holds it whole."""

import torch

from meshwright.compat.bmtrain.block import Block
from meshwright.compat.bmtrain.block_list import TransformerBlockList
from meshwright.compat.bmtrain.distributed_module import DistributedModule
from meshwright.compat.bmtrain.model_setup import init_parameters
from meshwright.store import load, save
from tests.compat.bmtrain.seed_models import Layer
from tests.live_bytes import peak_bytes

DIM, BLOCKS = 64, 12


class Deep(DistributedModule):
    def __init__(self):
        super().__init__()
        self.layers = TransformerBlockList([Block(Layer(DIM)) for _ in range(BLOCKS)])

    def forward(self, x):
        return self.layers(x)


def _built():
    model = Deep()
    init_parameters(model)
    return model


def _trained(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, DIM)).square().mean().backward()
    optimizer.step()


def _bytes(path):
    model, building = peak_bytes(_built)
    block = sum(parameter.nbytes for parameter in model.layers[0].parameters())
    largest = max(parameter.nbytes for parameter in model.parameters())
    _, training = peak_bytes(_trained, model)
    _, saving = peak_bytes(save, model, path)
    _, loading = peak_bytes(load, model, path)
    return {"block": block, "largest": largest, "build": building, "train": training, "save": saving, "load": loading}


def test_memory_of_four_ranks(ranks, tmp_path):
    for index, found in enumerate(ranks(4).run(_bytes, tmp_path / "model.pt")):
        full = BLOCKS * found["block"]
        shard = full // 4
        assert found["build"] <= shard + found["block"]
        # Beside the parameters: their gradients, and gathered blocks, however many the model has.
        assert found["train"] <= shard + 5 * found["block"] < full
        if index > 0:  # rank 0 reads and writes the whole file
            assert found["save"] <= found["largest"]
            assert found["load"] <= found["largest"]
