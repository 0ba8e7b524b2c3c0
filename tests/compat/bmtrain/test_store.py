"""Models whose ``state_dict`` is BMTrain's ``_save_to_rank0``, as ModelCenter's are; objects for all ranks."""

import threading

import pytest
import torch
from torch import nn

import meshwright as bmt
from meshwright import ConfigError
from meshwright.compat.bmtrain.config import config
from tests.compat.bmtrain.tensor_models import tensor_groups

VOCAB, DIM = 11, 6


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = bmt.nn.VPEmbedding(VOCAB, DIM, dtype=torch.float32)
        self.layers = bmt.TransformerBlockList([bmt.nn.Linear(DIM, DIM) for _ in range(2)])
        self.register_buffer("scale", torch.full((1,), 2.0))

    def forward(self, ids):
        return self.layers(self.embedding(ids)) * self.scale

    def state_dict(self, destination=None, prefix="", keep_vars=False):
        return bmt.store._save_to_rank0(self, destination, prefix)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.head = bmt.nn.Linear(DIM, 3)

    def forward(self, ids):
        return self.head(self.backbone(ids))


def _trained(model, steps):
    optimizer = bmt.optim.AdamOffloadOptimizer(model.parameters(), lr=1e-2)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    data = torch.Generator().manual_seed(bmt.rank())
    losses = []
    for _ in range(steps):
        ids = torch.randint(VOCAB, (4, 5), generator=data)
        loss = model(ids).square().mean()
        losses.append(bmt.sum_loss(loss).item())
        manager.zero_grad()
        manager.backward(loss)
        manager.step()
    return losses


def _saves_and_loads(folder):
    for kind in (Backbone, Classifier):
        model = kind()
        bmt.init_parameters(model)
        first = _trained(model, 10)
        assert first[-1] < 0.9 * first[0]
        file = f"{folder}/{kind.__name__}.pt"
        bmt.save(model, file)
        names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
        stored = torch.load(file)
        assert sorted(stored) == sorted(names)
        again = kind()
        bmt.load(again, file)
        for mine, other in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(_whole(mine), _whole(other))
        assert _trained(again, 3) == _trained(model, 3)
        # Shards and whole tensors go into it, whatever it says its state dict is.
        again.load_state_dict(stored)
        assert torch.equal(_whole(dict(again.named_parameters())[names[0]]), stored[names[0]])
    backbone = Backbone()
    bmt.init_parameters(backbone)
    values = {name: _whole(value) for name, value in backbone.named_parameters()}
    for found in (backbone.state_dict(), bmt.store._save_to_rank0(backbone, prefix="a.")):
        found = {name.removeprefix("a."): value for name, value in found.items()}
        assert set(found) == ({*values, "scale"} if bmt.rank() == 0 else set())
        assert all(torch.equal(found[name], value) for name, value in values.items() if found)


def _whole(tensor):
    return getattr(tensor, "full_tensor", lambda: tensor)().detach()


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.long), 3])
def test_a_model_with_the_state_dict_of_rank_0_trains_saves_and_loads(ranks, world, tmp_path):
    ranks(world).run(_saves_and_loads, str(tmp_path))


def _objects(folder):
    rank = bmt.rank()
    assert bmt.store.allgather_objects({"rank": rank}) == [{"rank": each} for each in range(4)]
    assert bmt.store.broadcast_object([rank], config["comm"], src=2) == [2]
    with pytest.raises(ConfigError, match="src is not a rank of the group"):
        bmt.store.broadcast_object(rank, config["comm"], src=4)
    with tensor_groups(2):
        assert bmt.store.broadcast_object(rank, config["tp_comm"], src=1) == rank - rank % 2 + 1
    file = f"{folder}/{rank}.pt"
    writer = threading.Thread(target=bmt.store.async_save_to_file, args=({"x": torch.ones(2)}, file))
    writer.start()
    writer.join()
    assert torch.load(file)["x"].tolist() == [1, 1]


def test_objects_travel_to_all_ranks(ranks, tmp_path):
    ranks(4).run(_objects, str(tmp_path))
