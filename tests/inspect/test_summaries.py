"""Recorded tensors over ranks: statistics of the whole batch, and losses built from tensors inside sharded blocks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from meshwright.errors import InspectError
from meshwright.inspect import captured, hand_over, inspect_model, inspect_tensor, record_tensor

DIM, BATCH = 6, 8


class Layer(nn.Module):
    def __init__(self, records):
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.records = records

    def forward(self, x):
        hidden = self.first(x).tanh()
        if self.records:
            record_tensor(hidden, "hidden")
        return self.second(hidden)


class Model(nn.Module):
    def __init__(self, wrap=lambda layer: layer):
        super().__init__()
        torch.manual_seed(0)
        self.pre, self.post = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList(wrap(Layer(records=k % 2 == 0)) for k in range(4))

    def forward(self, x):
        x = self.pre(x)
        for layer in self.layers:
            x = layer(x)
        return record_tensor(self.post(x), "logits", group="head")


class Inner(nn.Module):
    """What is sharded: its outputs include what its layer records."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        with captured() as records:
            output = self.layer(x)
        return output, records, [record.tensor for record in records]


class Block(nn.Module):
    """The least block that recomputes and shards: gathered in forward, gathered again for the recomputation."""

    def __init__(self, layer, **options):
        super().__init__()
        self.inner = Inner(layer)
        fully_shard(self.inner, **options)

    def forward(self, x):
        output, records, tensors = checkpoint(self.inner, x, use_reentrant=False)
        hand_over(records, tensors)
        return output


def whole_batch():
    return torch.randn(BATCH, 3, DIM, generator=torch.Generator().manual_seed(2))


def my_part(batch):
    share = len(batch) // dist.get_world_size()
    return batch[dist.get_rank() * share :][:share]


def stages(model, inputs):
    """BMTrain's test_inspector_hidden: a loss from recorded tensors only, then one from the output."""
    with inspect_tensor() as inspector:
        model(inputs)
    tables = [inspector.get_summary()]
    loss = sum((line["tensor"] * (k + 1)).pow(3).sum() for k, line in enumerate(inspector.summary[:2]))
    with inspect_tensor() as during_backward:
        loss.backward()
    assert during_backward.get_summary() == []
    tables += [inspector.get_summary(), inspect_model(model)]
    with inspect_tensor() as inspector:
        model(inputs).square().sum().backward()
    return [*tables, inspector.get_summary(), inspect_model(model)]


def assert_same(found, expected, grad_scale=1.0):
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["name"].replace("inner.layer.", "") == theirs["name"]
        assert mine["shape"] == theirs["shape"]
        for key in ("max", "min", "std", "mean"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-6), (mine["name"], key)
        for key in ("grad_std", "grad_mean"):
            wanted = theirs[key] if theirs[key] is None else pytest.approx(theirs[key], rel=1e-4, abs=1e-5)
            assert (mine[key] if mine[key] is None else mine[key] * grad_scale) == wanted, (mine["name"], key)


def sharded_blocks(expected):
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    model = Model(wrap=lambda layer: Block(layer, mesh=mesh))
    fully_shard(model, mesh=mesh)
    found = stages(model, my_part(whole_batch()))
    for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        # FSDP2 averages the gradients of the ranks' losses; each rank's activations have their own.
        assert_same(mine, theirs, grad_scale=world if index in (2, 4) else 1.0)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_sharded_recomputed_blocks_give_the_tables_of_the_plain_model(ranks, world):
    expected = stages(Model(), whole_batch())
    assert [line["name"] for line in expected[0]] == ["0.hidden", "1.hidden", "head.0.logits"]
    assert [line["grad_std"] is None for line in expected[1]] == [False, False, True]
    reached = {line["name"] for line in expected[2] if line["grad_std"] > 0}
    assert {"pre.weight", "layers.1.second.bias", "layers.2.first.weight"} <= reached
    assert reached.isdisjoint({"layers.2.second.weight", "layers.3.first.weight", "post.weight"})
    ranks(world).run(sharded_blocks, expected)


def half_precision_block():
    """The block's outputs are cast on their way out: gradients of the loss still reach what was recorded inside."""
    mesh = init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    block = Block(Layer(records=True), mesh=mesh, mp_policy=policy)
    with inspect_tensor() as inspector:
        block(torch.randn(2, DIM).bfloat16())  # torch 2.11 does not cast what goes into a recomputation
    (hidden,) = (line["tensor"] for line in inspector.summary)
    assert hidden.dtype == torch.float32
    hidden.sum().backward()
    assert inspector.get_summary()[0]["grad_mean"] == 1.0
    assert block.inner.layer.first.weight.grad is not None


def prepared(strategy, expected):
    world = mw.world_size()
    result = mw.accelerate(
        Model(), torch.optim.SGD, None, lambda inputs, output: output.square().mean(), strategy=strategy,
        sample_batch=whole_batch()[:2], batch_size=BATCH, optim_args={"lr": 0.0},
    )  # fmt: skip
    with inspect_tensor() as inspector:
        result.step(my_part(whole_batch()))
    assert_same(inspector.get_summary(), expected, grad_scale=1 / world)


def every_method(expected):
    half_precision_block()
    for strategy in ([("parallel_mode", ([("data", 2)], None))], ["zero1"], ["zero2"], ["fsdp"]):
        prepared(strategy, expected)
        prepared([*strategy, ("checkpoint", "Layer")], expected)


def test_models_prepared_by_accelerate_record_once_and_alike(ranks):
    with inspect_tensor() as inspector:
        Model()(whole_batch()).square().mean().backward()
    ranks(2).run(every_method, inspector.get_summary())


def own_parts():
    """Batches of different sizes (one of them empty), which differ in their mean."""
    rank, world = dist.get_rank(), dist.get_world_size()
    parts = [torch.randn(k, 3, generator=torch.Generator().manual_seed(k)) * 2 + 5 * k for k in range(world)]
    mine = parts[rank].clone().requires_grad_()
    with inspect_tensor() as inspector:
        record_tensor(mine * 2, "x").pow(2).sum().backward()
        record_tensor(torch.tensor(float(rank)), "scalar")
        record_tensor(mine * 1, "only_here")
    if rank == world - 1:
        inspector.get_tensor("only_here").sum().backward()
    with CommDebugMode() as counted:
        vector, scalar, only_here = inspector.get_summary()
    whole = torch.cat(parts).double() * 2
    assert vector["shape"] == tuple(whole.shape)
    for prefix, values in (("", whole), ("grad_", 2 * whole)):
        assert vector[prefix + "std"] == pytest.approx(values.std().item(), rel=1e-6)
        assert vector[prefix + "mean"] == pytest.approx(values.mean().item(), rel=1e-6)
    assert (vector["max"], vector["min"]) == pytest.approx((whole.max().item(), whole.min().item()))
    assert scalar["shape"] == ()
    assert scalar["std"] == pytest.approx(torch.arange(float(world)).std().item())
    assert (only_here["grad_mean"], only_here["grad_std"]) == (1.0, 0.0)
    assert counted.get_total_counts() == 2


def sharded_activations():
    """Each data rank has its part of the batch, spread over the tensor axis or whole on all of it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    whole = torch.randn(mesh["data"].size() * 2, 5, generator=torch.Generator().manual_seed(4))
    here = whole.chunk(mesh["data"].size())[mesh["data"].get_local_rank()]
    with inspect_tensor() as inspector:
        for placement in (Shard(0), Shard(1), Replicate()):
            record_tensor(distribute_tensor(here, mesh["tensor"], [placement]), "x")
    for line in inspector.get_summary():
        assert line["shape"] == tuple(whole.shape)
        assert line["std"] == pytest.approx(whole.double().std().item(), rel=1e-6)
        assert line["mean"] == pytest.approx(whole.double().mean().item(), rel=1e-6)


def refused():
    mesh, rank = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank()
    with inspect_tensor() as inspector:
        record_tensor(torch.ones(2), "first")
        if rank != 1:
            record_tensor(torch.ones(2), "second")
    with pytest.raises(InspectError, match=r"different tensors.*0.second \(rank 0\).*nothing more \(rank 1\).*What to"):
        inspector.get_summary()
    with inspect_tensor() as inspector:
        record_tensor(torch.ones(2), "x" if rank == 0 else "y")
    with pytest.raises(InspectError, match=r"0.x \(rank 0\).*0.y \(rank 1\)"):
        inspector.get_summary()
    with inspect_tensor() as inspector:
        record_tensor(DTensor.from_local(torch.ones(2), mesh, [Partial()]), "x")
    with pytest.raises(InspectError, match=r"'0.x' is a partial sum.*Expected.*Got.*What to do"):
        inspector.get_summary()


def over_ranks():
    own_parts()
    sharded_activations()
    refused()


@pytest.mark.parametrize("world", [2, 4])
def test_all_ranks_elements_are_taken_together_in_two_collectives(ranks, world):
    ranks(world).run(over_ranks)
