import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from meshwright import runtime
from meshwright.optim import AdamOffloadOptimizer, AdamOptimizer
from meshwright.store import CheckpointStore, TrainingState
from tests.optim.helpers import equal, give_gradients, net, whole


def two_dims():
    """Tensor parallel and FSDP2 on 2 x 2 ranks: shards of shards, and parameters on two meshes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("zero", "tensor"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6), nn.LayerNorm(6))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["zero"])


def states(optim):
    return [
        optim.state[parameter][name].to_local()
        for group in optim.param_groups
        for parameter in group["params"]
        for name in ("exp_avg", "exp_avg_sq")
    ]


def every_way_between_two_layouts():
    model = two_dims()
    optim = AdamOptimizer(model.parameters(), lr=0.02)
    for step in range(2):
        for index, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, 0.1 * index + step)
            parameter.grad.to_local().mul_(
                torch.arange(parameter.to_local().numel()).view(parameter.to_local().shape) + 1
            )
        optim.step()
    ways = {
        "local": lambda other, to: other.load_state_dict(copy.deepcopy(optim.state_dict())),
        "gathered": lambda other, to: other.load_state_dict(optim.state_dict(gather=True)),
        "torch": lambda other, to: set_optimizer_state_dict(to, other, get_optimizer_state_dict(model, optim)),
    }
    for name, way in ways.items():
        to = two_dims()
        other = AdamOffloadOptimizer(to.parameters(), lr=0.5)
        way(other, to)
        assert equal(states(other), states(optim)), name
        assert other.param_groups[0]["lr"] == 0.02
        assert {int(state["step"]) for state in other.state.values()} == {2}


def test_states_of_tensor_parallel_shards_survive_every_way(ranks):
    ranks(4).run(every_way_between_two_layouts)


def through_the_store(directory, save):
    model = net(torch.bfloat16, sharded=True, seed=3 if save else 4)
    kind = AdamOptimizer if save else AdamOffloadOptimizer
    state = TrainingState(model, kind(model.parameters(), lr=0.02 if save else 0.5))
    if save:
        _given(state, range(3))
        CheckpointStore(directory).save(state)
    else:
        CheckpointStore(directory).load(state)
    _given(state, range(3, 6))
    return whole(model)


def _given(state, steps):
    for step in steps:
        give_gradients(state.model, step)
        state.optim.step()


@pytest.mark.parametrize("world", [1, 2])
def test_the_checkpoint_store_moves_masters_to_another_world(ranks, tmp_path, world):
    expected = ranks(2 if world == 1 else 4).run(through_the_store, tmp_path, save=True)[0]
    found = (
        ranks(2).run(through_the_store, tmp_path, save=False) if world == 2 else [through_the_store(tmp_path, False)]
    )
    assert runtime.world_size() == 1
    for weights in found:
        for ours, theirs in zip(weights, expected, strict=True):
            torch.testing.assert_close(ours.float(), theirs.float(), rtol=8e-3, atol=0)  # one bf16 step
