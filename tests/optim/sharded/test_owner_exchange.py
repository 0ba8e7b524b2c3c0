import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import meshwright.optim.sharded.whole_tensors as whole_module
from meshwright.errors import ModelError
from meshwright.optim.sharded import Kept, Layout, Region, ShardedOptimizer, Whole
from meshwright.optim.sharded.owner_exchange import OwnerExchange, OwnerWork
from meshwright.optim.sharded.tensor_layout import ShardGroup, _made_group, regions_by_rank
from tests.optim.sharded.collectives import Collectives
from tests.optim.sharded.layouts import SHAPES, layouts_of, placed, plain, relative_differences, start_values, trained


def matrices(layout):
    """One part for every matrix of a stack."""
    if layout.ndim < 3:
        return ((Region.of(layout.shape), Region.of(layout.shape)),)
    blocks = [Region((index, 0, 0), (1, *layout.shape[1:])) for index in range(layout.shape[0])]
    return tuple((block, block) for block in blocks)


def two_columns(layout):
    return Kept((layout.shape[-1], 2), (layout.ndim - 1, None))


class Cumulative(ShardedOptimizer):
    """Every element of its update depends on all elements before it, and on a state of another shape."""

    replicas = None

    def __init__(self, params, **options):
        super().__init__(params, {"lr": 0.1, **options})

    def kept_states(self, layout, group):
        return {"columns": two_columns(layout)}

    def update(self, chunk):
        gradients, weights, columns = chunk.gradients.tensors, chunk.weights.tensors, chunk.states["columns"].tensors

        def summed(members, wholes):
            return [whole.flatten().cumsum(0).view(whole.shape) / whole.numel() for whole in wholes]

        def columns_of(members, wholes):
            assert all(
                whole.shape == chunk.layouts[member].shape for member, whole in zip(members, wholes, strict=True)
            )
            rows = [whole.reshape(-1, whole.shape[-1]) for whole in wholes]
            return [torch.stack([w.sum(0), w.square().sum(0)], 1) for w in rows]

        answer = yield [
            Whole(
                lambda i: gradients[i],
                summed,
                lambda i, result: weights[i].sub_(result, alpha=chunk.group["lr"]),
                parts=matrices,
                replicas=self.replicas,
            ),
            Whole(
                lambda i: gradients[i],
                columns_of,
                lambda i, result: columns[i].copy_(result),
                form=two_columns,
                replicas=self.replicas,
            ),
        ]
        assert answer == [None, None]
        (sums,) = yield [Whole(lambda i: columns[i].new_ones(weights[i].shape), summed, lambda i, result: None)]
        assert sums is None


def build(parameters):
    return Cumulative(list(parameters.values()))


def blocks_are_right():
    for layout, place in layouts_of(dist.get_world_size()).items():
        for name, shape in SHAPES.items():
            whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
            tensor = place(name, whole)
            if isinstance(tensor, DTensor):
                assert torch.equal(tensor.full_tensor(), whole), (layout, name)
                check_blocks(tensor)
    if dist.get_world_size() == 4:
        grid = layouts_of_grid()
        for mesh in (grid, DeviceMesh("cpu", [[0], [1], [2], [3]], mesh_dim_names=("zero", "tensor"))):
            linear = nn.Sequential(nn.Linear(3, 9, bias=False))
            parallelize_module(linear, mesh["tensor"], {"0": ColwiseParallel()})
            fully_shard(linear, mesh=mesh["zero"])
            check_blocks(linear[0].weight)


def layouts_of_grid():
    return DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("zero", "tensor"))


def check_blocks(tensor):
    tensor = tensor.detach()
    held = regions_by_rank(Layout.of(tensor))
    whole = tensor.full_tensor()
    here = held[dist.get_rank()]
    everything = Region.of(whole.shape)
    assert torch.equal(tensor.to_local(), whole[here.inside(everything)]), (whole.shape, tensor.placements, held)
    covered = torch.zeros(whole.shape)
    for block in set(held.values()):
        covered[block.inside(everything)] += 1
    assert (covered == 1).all()


def same_on_every_layout():
    """Every layout as one process; with buckets of one matrix as well."""
    start = start_values()
    expected, _ = trained(build, plain, steps=2)
    worst = {}
    for limit in (whole_module._BUCKET_BYTES, 1):
        whole_module._BUCKET_BYTES, before = limit, whole_module._BUCKET_BYTES
        try:
            for layout, place in layouts_of(dist.get_world_size()).items():
                result, _ = trained(build, place, steps=2)
                worst[layout, limit] = max(relative_differences(result, expected, start).values())
        finally:
            whole_module._BUCKET_BYTES = before
    return worst


def two_ranks():
    blocks_are_right()
    worst = same_on_every_layout()
    exchange_by_hand()
    groups_are_made_once()
    return worst, replicas_share(), missing_gradients(), traffic()


def four_ranks():
    blocks_are_right()
    replicas_own_as_well()
    return same_on_every_layout()


def groups_are_made_once():
    """The group of a mesh of several axes that is not the whole world."""
    ranks = (0, 1)
    group = _made_group(ranks)
    value = torch.ones(1)
    dist.all_reduce(value, group=group)
    assert value == 2
    assert _made_group(ranks) is group


def replicas_own_as_well():
    """Under HSDP both replicas share the work, and shards come from the nearer one."""
    place = layouts_of(4)["hsdp"]
    shards = [place("w", torch.full((4, 3), float(number))) for number in range(4)]
    works = [OwnerWork(at, at, ((Region.of(at.shape),) * 2,), (1.0,)) for at in map(Layout.of, shards)]
    exchange = OwnerExchange(works, ShardGroup.of_mesh(shards[0].device_mesh))
    assert sorted(exchange.owners) == [0, 1, 2, 3]
    ((number, whole),) = exchange.gather([shard.to_local() for shard in shards])().items()
    assert torch.equal(whole, torch.full((4, 3), float(number)))
    assert {move.sender // 2 for moves in exchange._out._received for move in moves} == {dist.get_rank() // 2}


def exchange_by_hand():
    """Owners are balanced, experts stay where they are, and half precision travels as such."""
    mesh = layouts_of_two()
    wholes = [torch.randn(shape) for shape in ((4, 6), (4, 6), (8, 6), (5, 2))]
    shards = [placed(whole, mesh, [Shard(0)]) for whole in wholes]
    layouts = [Layout.of(shard) for shard in shards]
    works = [OwnerWork(at, at, ((Region.of(at.shape),) * 2,), (float(at.numel),)) for at in layouts]
    exchange = OwnerExchange(works, ShardGroup.of_mesh(mesh), torch.bfloat16)
    assert exchange.owners == [1, 1, 0, 0]
    owned = exchange.gather([shard.to_local() for shard in shards])()
    assert list(owned) == [part for part, owner in enumerate(exchange.owners) if owner == dist.get_rank()]
    assert all(torch.equal(whole, wholes[part].bfloat16()) for part, whole in owned.items())
    back = exchange.scatter({part: whole * 2 for part, whole in owned.items()})()
    for shard, result in zip(shards, back, strict=True):
        assert torch.equal(result, shard.to_local().bfloat16() * 2)
    stack = placed(torch.randn(4, 3, 3), mesh, [Shard(0)])
    owner_work = OwnerWork(Layout.of(stack), Layout.of(stack), matrices(Layout.of(stack)), (1.0,) * 4)
    with Collectives() as calls:
        exchange = OwnerExchange([owner_work], ShardGroup.of_mesh(mesh))
        experts = exchange.gather([stack.to_local()])()
        (back,) = exchange.scatter(experts)()
    assert exchange.owners == [0, 0, 1, 1]
    assert calls.counts["all_to_all_single"] == 0
    assert torch.equal(back, stack.to_local())


def layouts_of_two():
    return DeviceMesh("cpu", [0, 1], mesh_dim_names=("zero",))


def replicas_share():
    """Plain parameters: ranks that were told of each other divide the work and get the same numbers."""
    worked = []

    class Counting(Cumulative):
        replicas = dist.group.WORLD

        def update(self, chunk):
            update = super().update(chunk)
            requests = next(update)
            work = requests[1].work
            requests[1].work = lambda members, wholes: worked.extend(members) or work(members, wholes)
            yield requests
            yield from (asked for asked in [update.send([None, None])])

    start = start_values()
    expected, _ = trained(build, plain, steps=1)
    result, _ = trained(lambda parameters: Counting(list(parameters.values())), plain, steps=1)
    assert max(relative_differences(result, expected, start).values()) == 0
    return len(worked)


def missing_gradients():
    """On one rank: an error on both, with nothing moved. On both: nothing happens to that parameter."""
    mesh = layouts_of_two()
    whole = torch.randn(6, 4)
    parameters = [nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])) for _ in range(3)]
    optimizer = Cumulative(parameters)
    for index, parameter in enumerate(parameters):
        if not (index == 1 and dist.get_rank() == 1):
            parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ModelError):
        optimizer.step()
    assert all(torch.equal(parameter.full_tensor(), whole) for parameter in parameters)
    parameters[1].grad = None
    optimizer.step()
    return [torch.equal(parameter.full_tensor(), whole) for parameter in parameters]


def traffic():
    """Collectives of a step, with 10 and with 100 matrices."""
    counted = []
    for number in (10, 100):
        parameters = [
            nn.Parameter(distribute_tensor(torch.ones(4, 3), layouts_of_two(), [Shard(0)])) for _ in range(number)
        ]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer = Cumulative(parameters)
        with Collectives() as calls:
            optimizer.step()
        counted.append(calls.counts)
    return counted


def test_two_ranks(ranks):
    for worst, num_worked, moved, counted in ranks(2).run(two_ranks):
        assert all(value < 1e-6 for value in worst.values()), worst
        assert 0 < num_worked < len(SHAPES)
        assert moved == [False, True, False]
        # three requests in two rounds: there and back for those of each owner_work's kind
        assert counted[0] == counted[1] == {"all_to_all_single": 4, "all_reduce": 1}


@pytest.mark.long
def test_four_ranks(ranks):
    for worst in ranks(4).run(four_ranks):
        assert all(value < 1e-6 for value in worst.values()), worst
