import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import SGD, AdamW

from meshwright.optim import step_by_layouts


def mixture(mesh, device):
    shard = DTensor.from_local(torch.zeros(2, device=device), mesh, [Shard(0)], run_check=False)
    return [torch.nn.Parameter(torch.zeros(3, device=device)), torch.nn.Parameter(shard)]


def num_groups(parameters, optimizer_class=SGD, **options):
    """In a step; between steps there is one."""
    optimizer, seen = optimizer_class([{"params": parameters}], lr=0.1, **options), []
    optimizer.step = lambda: seen.extend(group["params"] for group in optimizer.param_groups)
    step_by_layouts(optimizer)
    optimizer.step()
    assert [each for group in seen for each in group] == parameters
    assert len(optimizer.param_groups) == 1
    return len(seen)


def counted():
    mesh = init_device_mesh("cpu", (2,))
    here, elsewhere = mixture(mesh, "cpu"), mixture(mesh, "meta")
    assert num_groups(here) == 1  # one tensor at a time
    assert num_groups(here, foreach=True) == num_groups(here, AdamW, fused=True) == 2
    assert num_groups(elsewhere) == num_groups(elsewhere, AdamW) == 2  # foreach, by torch's own choice
    assert num_groups(elsewhere, foreach=False) == 1


def test_plain_tensors_and_shards_are_apart_where_torch_updates_lists(ranks):
    ranks(2).run(counted)
