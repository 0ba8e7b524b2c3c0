"""FSDP2's collectives through memory that ranks share: what they hand on, when it is used again."""

import pytest
import torch
import torch.distributed as dist

import meshwright as mw
from meshwright.nn.fsdp_exchange import _Gather, _Reduce, is_mean
from meshwright.nn.host_exchange import HostGathers, HostReductions
from tests.hosts import host_memory

CPU = torch.device("cpu")


def reductions(dtype, shared):
    with host_memory(shared):
        return reduced(dtype)


def reduced(dtype):
    rank, world = dist.get_rank(), dist.get_world_size()
    through, found = HostReductions(dist.group.WORLD, refuses=True), []
    units = [_Reduce(through, through.units.add(f"block {size}", world * size * 4)) for size in (5, 3, 40)]
    for turn in range(12):
        unit, size = units[turn % 3], (5, 3, 40)[turn % 3]
        seeds = [torch.Generator().manual_seed(100 * turn + each) for each in range(world)]
        every = [torch.randn(world * size, generator=seed).to(dtype) for seed in seeds]
        op = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)[turn % 2]
        packed = unit.allocate((world * size,), dtype=dtype, device=CPU)
        own = unit.allocate((size,), dtype=dtype, device=CPU)
        packed.copy_(every[rank])
        unit(own, packed, dist.group.WORLD, op)
        total = torch.stack(every).double().sum(0)[rank * size : (rank + 1) * size]
        found.append((own.double() - (total / world if op == dist.ReduceOp.AVG else total)).abs().max().item())
    return found, through._memory is not None


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("shared", [True, False])
def test_gradients_are_added_up_and_averaged(ranks, dtype, tolerance, shared):
    for size in (2, 4):
        for worst, in_memory in ranks(size).run(reductions, dtype, shared):
            assert max(worst) < tolerance
            assert in_memory == shared


def gathers(shared, ahead):
    """What comes of gathers of three sizes, of which some are under way at once and some are kept for a while."""
    with host_memory(shared):
        return gathered(ahead)


def gathered(ahead):
    rank, world = dist.get_rank(), dist.get_world_size()
    through = HostGathers(dist.group.WORLD, refuses=True)
    sizes = (700, 30, 30, 200)
    units = [_Gather(through, through.units.add(f"block {size}", world * size * 4)) for size in sizes]
    under_way, kept, wrong, in_memory = [], [], 0, 0

    def finish():
        nonlocal wrong
        turn, output, work = under_way.pop(0)
        work.wait()
        wanted = torch.cat([torch.full((sizes[turn % 4],), turn + each / 10) for each in range(world)])
        wrong += not torch.equal(output, wanted)
        if turn % 15 == 0:
            kept.append((output, wanted))
        elif turn % 15 == 4:
            wrong += not torch.equal(*kept.pop())

    for turn in range(60):
        size = sizes[turn % 4]
        output = units[turn % 4].allocate((world * size,), dtype=torch.float32, device=CPU)
        in_memory += bool(through._places) and through._places[-1].number == through._number
        own = output.narrow(0, rank * size, size)
        own.fill_(turn + rank / 10)
        under_way.append((turn, output, units[turn % 4](output, own, dist.group.WORLD, True)))
        del output, own
        if len(under_way) > ahead:
            finish()
    while under_way:
        finish()
    return wrong, in_memory


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_gathers_bring_every_rank_s_part_however_long_each_is_kept(ranks, shared, ahead):
    for size in (2, 3):
        for wrong, in_memory in ranks(size).run(gathers, shared, ahead):
            assert wrong == 0
            assert in_memory > 20 if shared else in_memory == 0


def of_different_layers(reduces):
    rank, world = dist.get_rank(), dist.get_world_size()
    through = (HostReductions if reduces else HostGathers)(dist.group.WORLD, refuses=True)
    first, second = ((_Reduce if reduces else _Gather)(through, through.units.add(n, 80)) for n in ("blocks.0", "head"))
    unit = first if rank == 0 else second
    packed = unit.allocate((world * 5,), dtype=torch.float32, device=CPU)
    own = unit.allocate((5,), dtype=torch.float32, device=CPU) if reduces else packed.narrow(0, rank * 5, 5)
    try:
        unit(own, packed, dist.group.WORLD, dist.ReduceOp.SUM) if reduces else unit(packed, own, dist.group.WORLD)
    except mw.ModelError as error:
        return str(error)


@pytest.mark.parametrize("reduces", [True, False])
def test_ranks_at_different_layers_are_told(ranks, reduces):
    for told in ranks(2).run(of_different_layers, reduces):
        assert "The ranks have run different layers" in told
        assert "blocks.0 on rank 0 and head on rank 1, in one exchange" in told


def of_different_parameters():
    rank, world = dist.get_rank(), dist.get_world_size()
    through = HostReductions(dist.group.WORLD, refuses=True)
    unit, size = _Reduce(through, through.units.add("blocks.0", 80)), 5 - rank
    packed = unit.allocate((world * size,), dtype=torch.float32, device=CPU)
    try:
        own = unit.allocate((size,), dtype=torch.float32, device=CPU)
        unit(own, packed, dist.group.WORLD, dist.ReduceOp.SUM)
    except mw.ModelError as error:
        return str(error)


def test_ranks_with_gradients_of_different_parameters_are_told(ranks):
    for told in ranks(2).run(of_different_parameters):
        assert "gradients of different parameters of blocks.0" in told
        assert "32 to 40 bytes" in told


def test_other_reductions_are_refused():
    with pytest.raises(mw.StrategyError, match=r"(?s)cannot be reduced.*a sum or a mean.*set_gradient_divide_factor"):
        is_mean(dist.ReduceOp.MAX)
