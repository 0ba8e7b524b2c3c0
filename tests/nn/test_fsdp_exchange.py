"""FSDP2's reduce-scatter by an exchange: its sums and means, and what it refuses."""

import pytest
import torch
import torch.distributed as dist

import meshwright as mw
from meshwright.nn.fsdp_exchange import _Exchange, is_mean


def reductions(dtype):
    rank, world = dist.get_rank(), dist.get_world_size()
    every = [torch.randn(world * 5, generator=torch.Generator().manual_seed(each)).to(dtype) for each in range(world)]
    found = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        own = torch.empty(5, dtype=dtype)
        _Exchange()(own, every[rank].clone(), dist.group.WORLD, op)
        total = torch.stack(every).double().sum(0)[rank * 5 : (rank + 1) * 5]
        found.append((own.double() - (total / world if op == dist.ReduceOp.AVG else total)).abs().max().item())
    return found


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 0.02)])
def test_it_sums_and_averages(ranks, dtype, tolerance):
    for worst in ranks(4).run(reductions, dtype):
        assert max(worst) < tolerance


def test_other_reductions_are_refused():
    with pytest.raises(mw.StrategyError, match=r"(?s)cannot be reduced.*a sum or a mean.*set_gradient_divide_factor"):
        is_mean(dist.ReduceOp.MAX)
