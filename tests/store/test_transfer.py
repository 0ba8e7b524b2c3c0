"""Whole tensors to ranks whose meshes do not cover the world, as norms beside split layers lie."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from meshwright import runtime
from meshwright.store.transfer import collect, spread


def on_meshes_side_by_side():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))["data"]
    target = distribute_tensor(torch.zeros(5), mesh, (Shard(0),))
    wanted = torch.arange(5.0)
    spread(wanted if runtime.rank() == 0 else None, target)
    whole = collect(target)
    return torch.equal(target.to_local(), wanted), whole is None or torch.equal(whole, wanted)


def test_every_mesh_gets_the_values_of_rank_0(ranks):
    assert ranks(2).run(on_meshes_side_by_side) == [(True, True)] * 2
