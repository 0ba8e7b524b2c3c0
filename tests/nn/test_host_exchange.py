"""FSDP2's collectives through memory that ranks share: what they hand on, when it is used again."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

import meshwright as mw
from meshwright.nn.host_exchange import HostExchange, HostGathers, HostReductions, _Gather, _Reduce, is_mean
from tests.hosts import host_memory

CPU = torch.device("cpu")


def reductions(dtype, shared):
    with host_memory(shared):
        return reduced(dtype)


def reduced(dtype):
    rank, world = dist.get_rank(), dist.get_world_size()
    through, found = HostReductions(dist.group.WORLD), []
    units = [_Reduce(through) for _ in range(3)]
    through.expect(world * 40 * 4)
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
    through = HostGathers(dist.group.WORLD)
    sizes = (700, 30, 30, 200)
    units = [_Gather(through) for _ in sizes]
    for size in sizes:
        through.expect(world * size * 4)
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


def after_other_sizes():
    """Gathers behind one of which ranks had different sizes, for which they found other places."""
    rank, world = dist.get_rank(), dist.get_world_size()
    through, right = HostGathers(dist.group.WORLD), []
    for _ in range(3):  # a ring of several places: what lies apart in it stays apart
        through.expect(world * 50 * 4)
    for turn in range(12):
        size = 50 - 20 * rank if turn == 4 else 50
        output = through.allocate(world * size, torch.float32)
        own = output.narrow(0, rank * size, size).fill_(turn + rank / 10)
        through.gather(output, own, async_op=False)
        right.append(output.equal(torch.cat([torch.full((size,), turn + each / 10) for each in range(world)])))
        del output, own
    return right, through._memory is not None


def test_gathers_of_different_sizes_do_not_spoil_later_ones(ranks):
    for right, in_memory in ranks(2).run(after_other_sizes):
        assert all(right[:4])
        assert all(right[7:])
        assert in_memory


def after_its_group():
    group = dist.new_group(list(range(dist.get_world_size())))
    known = weakref.WeakKeyDictionary({group: HostExchange(group)})
    dist.barrier()  # one rank's group may not end while another still connects to it
    dist.destroy_process_group(group)
    del group
    gc.collect()
    return len(known)


def test_what_is_remembered_by_ranks_ends_with_them(ranks):
    assert ranks(2).run(after_its_group) == [0, 0]


def test_other_reductions_are_refused():
    with pytest.raises(mw.StrategyError, match=r"(?s)cannot be reduced.*a sum or a mean.*set_gradient_divide_factor"):
        is_mean(dist.ReduceOp.MAX)
