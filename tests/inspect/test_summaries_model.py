"""inspect_model over every way to shard, against the statistics of the whole tensors."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import meshwright as mw
from meshwright.errors import InspectError
from meshwright.inspect import format_summary, inspect_model
from tests import tiny

KEYS = ["name", "shape", "max", "min", "std", "mean", "grad_std", "grad_mean"]
SHAPES = {"even": (8, 4), "uneven": (7, 5), "narrow": (1, 3), "vector": (16,), "three": (3,), "one": (1,)}


def whole(name, value, grad):
    """The line of a whole tensor, by torch in fp64."""
    value = value.double()
    deviation = [0.0 if each is None or each.numel() == 1 else each.double().std().item() for each in (value, grad)]
    mean = 0.0 if grad is None else grad.double().mean().item()
    return dict(
        zip(
            KEYS,
            [name, tuple(value.shape), value.max().item(), value.min().item(), deviation[0], value.mean().item(),
             deviation[1], mean],
            strict=True,
        )
    )  # fmt: skip


def assert_same(found, expected):
    assert [line["name"] for line in found] == [line["name"] for line in expected]
    for mine, theirs in zip(found, expected, strict=True):
        assert list(mine) == KEYS
        assert mine["shape"] == theirs["shape"]
        for key in KEYS[2:]:
            assert mine[key] == pytest.approx(theirs[key], rel=1e-6, abs=1e-7), (mine["name"], key)


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Bag(nn.Module):
    """Parameters without a forward."""

    def __init__(self, parameters):
        super().__init__()
        self.parts = nn.Module()
        for name, parameter in parameters.items():
            self.parts.register_parameter(name, parameter)


def layouts(world):
    line = init_device_mesh("cpu", (world,), mesh_dim_names=("zero",))
    yield "line", line, [Shard(0)]
    yield "column", line, [Shard(1)]
    yield "replicated", line, [Replicate()]
    if world == 4:
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "zero"))
        yield "hybrid", grid, [Replicate(), Shard(0)]
        yield "outer", grid, [Shard(0), Replicate()]
        yield "both", grid, [Shard(1), Shard(0)]
        yield "twice", grid, [Shard(0), Shard(0)]
        yield "replicas", grid["zero"], [Shard(0)]  # the other half of the world holds the same


def every_layout():
    """A model whose parameters lie on all meshes at once; some gradients exist, on a layout of their own."""
    generator = torch.Generator().manual_seed(3)
    parameters, expected = {}, []
    for layout, mesh, placements in layouts(dist.get_world_size()):
        for kind, shape in SHAPES.items():
            if any(isinstance(placement, Shard) and placement.dim >= len(shape) for placement in placements):
                continue
            value, grad = (torch.randn(shape, generator=generator) * 2 + 1 for _ in range(2))
            parameter = nn.Parameter(distribute_tensor(value, mesh, placements))
            if kind != "even":
                parameter.grad = distribute_tensor(grad, mesh, placements)
            parameters[f"{layout}_{kind}"] = parameter
            expected.append(whole(f"parts.{layout}_{kind}", value, grad if kind != "even" else None))
    plain = torch.randn(5, 3, generator=generator).bfloat16()
    parameters["plain"] = nn.Parameter(plain)
    expected.append(whole("parts.plain", plain, None))
    model = Bag(parameters)
    model.parts.register_parameter("tied", parameters["plain"])
    expected.append(whole("parts.tied", plain, None))
    assert_same(inspect_model(model), expected)
    assert_same(
        inspect_model(model, "root.*uneven", prefix="root."),
        [{**line, "name": "root." + line["name"]} for line in expected if line["name"].endswith("uneven")],
    )
    assert inspect_model(model, "parts") == []


def tensor_and_data_parallel():
    """FSDP2 over tensor parallelism: the placements are _StridedShard and Shard of the same dim."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 6))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    assert "Strided" in str(model[0].weight.placements)
    model(torch.randn(3, 6)).square().sum().backward()
    assert_same(inspect_model(model), [whole(n, full(p), full(p.grad)) for n, p in model.named_parameters()])


def gathered_in_half_precision():
    """After a forward the root holds gathered bf16 weights; inspected are the fp32 shards and their gradients."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = fully_shard(nn.Linear(6, 5), mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model(torch.randn(3, 6)).square().sum().backward()
    expected = [whole(n, full(p), full(p.grad)) for n, p in model.named_parameters()]
    model(torch.randn(3, 6))
    assert model.weight.dtype == torch.bfloat16
    assert_same(inspect_model(model), expected)


def pipeline_stages():
    """Each half of the ranks holds other parameters, sharded within the half."""
    world, rank = dist.get_world_size(), dist.get_rank()
    stages = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pipeline", "zero"))
    values = [torch.arange(7.0), torch.arange(7.0) * 3]
    stage = rank // (world // 2)
    sharded = distribute_tensor(values[stage], stages["zero"], [Shard(0)])
    model = Bag({f"stage{stage}": nn.Parameter(sharded), f"own{stage}": nn.Parameter(values[stage] + 1)})
    expected = [
        whole(name, value, None)
        for k, first in enumerate(values)
        for name, value in ((f"parts.stage{k}", first), (f"parts.own{k}", first + 1))
    ]
    found = inspect_model(model)
    assert_same(found, expected)


def refused():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    summed = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    summed.grad = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    with pytest.raises(InspectError, match=r"gradient of parts.a.*partial sum.*Expected.*Got.*What to do"):
        inspect_model(Bag({"a": summed}))
    device = "meta" if dist.get_rank() == 1 else "cpu"
    with pytest.raises(InspectError, match=r"'parts.b' has no statistics.*meta"):
        inspect_model(Bag({"b": nn.Parameter(torch.ones(2, device=device))}))
    with pytest.raises(InspectError, match="complex64"):
        inspect_model(Bag({"c": nn.Parameter(torch.ones(2, dtype=torch.complex64))}))


def collectives(num_blocks):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    blocks = {
        f"block{k}_{part}": nn.Parameter(DTensor.from_local(torch.randn(3, 2), mesh, [Shard(0)], run_check=False))
        for k in range(num_blocks)
        for part in range(2)
    }
    with CommDebugMode() as counted:
        assert len(inspect_model(Bag(blocks))) == 2 * num_blocks
    return counted.get_total_counts()


def everything(world):
    every_layout()
    if world == 4:
        tensor_and_data_parallel()
    if world > 1:
        gathered_in_half_precision()
        pipeline_stages()
        refused()
    return collectives(1), collectives(100)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_layout_is_as_the_whole_tensor_in_two_collectives(ranks, world):
    counts = ranks(world).run(everything, world)
    assert counts == [(2, 2) if world > 1 else (0, 0)] * world


def prepared(strategy):
    """The accelerated model's table, the plain model's, and whether looking at it changed the gradients."""
    batch = torch.randn(8, 7, generator=torch.Generator().manual_seed(5))
    torch.manual_seed(1)
    plain = tiny.Mlp()
    torch.manual_seed(1)
    result = mw.accelerate(
        tiny.Mlp(), torch.optim.SGD, None, lambda inputs, output: output.square().mean(), strategy=strategy,
        sample_batch=batch[:2], batch_size=8,
    )  # fmt: skip
    share = 8 // mw.world_size()
    mine = batch[mw.rank() * share : (mw.rank() + 1) * share]
    loss = result.model(mine).square().mean()
    without = inspect_model(result.model)  # some methods hold gathered weights now
    loss.backward()
    plain(batch).square().mean().backward()
    assert_same(without, [whole(n, p.data, None) for n, p in plain.named_parameters()])
    assert_same(inspect_model(result.model), [whole(n, p.data, p.grad) for n, p in plain.named_parameters()])


def every_method():
    for strategy in ([("parallel_mode", ([("data", mw.world_size())], None))], ["zero1"], ["zero2"], ["fsdp"]):
        prepared(strategy)
        prepared([*strategy, ("checkpoint", "Sequential")])


def test_models_prepared_by_accelerate_have_the_plain_names_and_values(ranks):
    ranks(2).run(every_method)


class Compiled(nn.Module):
    """As torch.compile wraps a module."""

    def __init__(self, module):
        super().__init__()
        self._orig_mod = module


def test_wrappers_are_left_out_of_names_and_parts_of_a_name_stay():
    inner = nn.ModuleDict({"module": nn.Linear(2, 2), "compiled": Compiled(checkpoint_wrapper(nn.Linear(2, 2)))})
    names = [line["name"] for line in inspect_model(Compiled(inner))]
    assert names == ["module.weight", "module.bias", "compiled.weight", "compiled.bias"]


def test_an_empty_parameter_and_a_sparse_gradient():
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1, 1, 3])).sum().backward()
    embedding.extra = nn.Parameter(torch.empty(0, 3))
    found = inspect_model(embedding)
    assert found[0]["grad_mean"] == pytest.approx(6 / 10)
    assert found[1]["shape"] == (0, 3)
    assert inspect_model(embedding, param_name="ext*") == found[1:]  # BMTrain's name
    with pytest.raises(InspectError, match=r"two patterns.*leave param_name out"):
        inspect_model(embedding, "ext*", param_name="ext*")
    assert all(math.isnan(found[1][key]) for key in ("max", "min", "std", "mean"))


LONG = """\
name             shape                            max           min         std        mean    grad_std   grad_mean
a                (2, 3)                        1.0000  -123456.7800      0.0000      0.5000        None        None
layers.0.weight  (123456, 123456, 123456)      1.0000  -123456.7800     12.0000      0.5000      0.1000      2.0000
"""
SHORT = """\
name  shape                      max         min         std        mean    grad_std   grad_mean
a     (2, 3)                  1.0000      0.0000      0.0000      0.5000        None        None
"""


def test_columns_have_a_fixed_width_and_nothing_is_cut_off():
    line = {"name": "a", "shape": (2, 3), "max": 1.0, "min": -123456.78, "std": 0.00004, "mean": 0.5}
    long = {**line, "name": "layers.0.weight", "shape": (123456, 123456, 123456), "std": 12.0}
    text = format_summary([{**line, "grad_std": None, "grad_mean": None}, {**long, "grad_std": 0.1, "grad_mean": 2.0}])
    assert text.splitlines() == LONG.splitlines()
    short = format_summary([{**line, "min": 0.0, "grad_std": None, "grad_mean": None}])
    assert short.splitlines() == SHORT.splitlines()


def test_nothing_and_joined_summaries():
    assert format_summary([]).split() == ["name", "shape", "max", "min", "std", "mean", "grad_std", "grad_mean"]
    model = tiny.Mlp()
    text = format_summary(inspect_model(model, "first.*") + inspect_model(model, "*last.bias"))
    assert [line.split()[0] for line in text.splitlines()] == ["name", "first.weight", "first.bias", "last.bias"]
