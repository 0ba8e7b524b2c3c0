"""Checkpoints without the weights that are not trained."""

import json

import pytest
import torch
from torch import nn

from meshwright.errors import CheckpointError
from meshwright.store import CheckpointStore, TrainingState


def build(seed, frozen, layout="plain"):
    """A frozen layer between two that are trained, stepped once; the frozen one is the same for every seed."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2))
    model[1].load_state_dict({"weight": torch.eye(6), "bias": torch.ones(6)})
    model[1].requires_grad_(False)
    if layout == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)  # frozen parameters are in its groups, too
    model(torch.ones(2, 4)).sum().backward()
    optim.step()
    return TrainingState(model, optim, frozen=frozen)


def full(state):
    return {
        name: (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()
        for name, tensor in state.model.state_dict().items()
    }


def saved_and_loaded(directory, layout):
    state = build(0, False, layout)
    path = CheckpointStore(directory).save(state)
    other = build(1, False)
    assert not torch.equal(full(other)["0.weight"], full(state)["0.weight"])
    CheckpointStore(directory).load(other)
    assert all(torch.equal(tensor, full(state)[name]) for name, tensor in full(other).items())
    names = json.loads((path / "state.json").read_text())["tensors"]
    return sorted(name for name in names if name.startswith("model."))


TRAINED = ["model.0.bias", "model.0.weight", "model.2.bias", "model.2.weight"]


def test_frozen_weights_are_left_out_and_found_in_the_model(ranks, tmp_path):
    assert saved_and_loaded(tmp_path / "one", "plain") == TRAINED
    assert ranks(2).run(saved_and_loaded, tmp_path / "two", "fsdp") == [TRAINED, TRAINED]


def test_a_whole_checkpoint_fits_and_one_without_them_does_not_make_a_whole_model(tmp_path):
    whole = build(0, True)
    CheckpointStore(tmp_path / "whole").save(whole)
    other = build(1, False)
    with torch.no_grad():
        other.model[1].weight.mul_(3)
    CheckpointStore(tmp_path / "whole").load(other)
    assert torch.equal(other.model[0].weight, whole.model[0].weight)
    assert torch.equal(other.model[1].weight, 3 * torch.eye(6))  # left alone
    CheckpointStore(tmp_path / "part").save(build(0, False))
    with pytest.raises(CheckpointError, match=r"missing: 1\.bias, 1\.weight"):
        CheckpointStore(tmp_path / "part").load(build(1, True))
