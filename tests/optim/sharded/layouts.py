"""The same parameters under every layout an optimizer must be right on, fed the same gradients."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

SHAPES = {
    "wide": (6, 20),
    "tall": (33, 16),
    "uneven": (7, 5),
    "one_row": (1, 9),  # empty shards on most ranks
    "bias": (16,),
    "short": (3,),
    "experts": (4, 6, 10),
}


def start_values(shapes=None):
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in (shapes or SHAPES).items()}


def gradients(step, shapes=None):
    generator = torch.Generator().manual_seed(100 + step)
    scale = 0.1 + step % 3
    return {name: torch.randn(shape, generator=generator) * scale for name, shape in (shapes or SHAPES).items()}


def placed(whole, mesh, placements):
    """A whole tensor as a DTensor; a strided shard is cut after the axes to its right, as FSDP2 does over TP.

    Every rank has the whole and cuts its own part: nothing is sent, for thousands of gradients.
    """
    if not any(isinstance(placement, _StridedShard) for placement in placements):
        return distribute_tensor(whole.clone(), mesh, placements, src_data_rank=None)
    local = whole
    strided_last = sorted(range(mesh.ndim), key=lambda dim: isinstance(placements[dim], _StridedShard))
    for mesh_dim in strided_last:
        placement = placements[mesh_dim]
        if isinstance(placement, Replicate):
            continue
        chunks = local.chunk(mesh.size(mesh_dim), dim=placement.dim)
        index = mesh.get_local_rank(mesh_dim)
        local = chunks[index] if index < len(chunks) else local.narrow(placement.dim, 0, 0)
    return DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.contiguous().stride()
    )


def plain(name, whole):
    return whole.clone()


def _on(mesh, choose):
    return lambda name, whole: placed(whole, mesh, choose(whole))


_MESHES: dict[str, dict[object, DeviceMesh]] = {}  # made once per world: every mesh makes process groups


def _mesh(ranks, names):
    world = os.environ["MASTER_PORT"]
    if world not in _MESHES:
        _MESHES.clear()
        _MESHES[world] = {}
    meshes = _MESHES[world]
    if (ranks, names) not in meshes:
        meshes[ranks, names] = DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=names)
    return meshes[ranks, names]


def layouts_of(world):
    """Name -> how a parameter is laid out, for a world of 2 or 4 ranks; None: this rank does not hold it."""
    if world == 1:
        return {"plain": plain}
    if world == 2:
        one = _mesh((0, 1), ("zero",))
        return {
            "ddp": plain,
            "fsdp": _on(one, lambda w: [Shard(0)]),
            "tensor, column": _on(one, lambda w: [Shard(0)] if w.ndim != 3 else [Shard(1)]),
            "tensor, row": _on(one, lambda w: [Shard(w.ndim - 1)] if w.ndim > 1 else [Replicate()]),
        }
    flat, grid = _mesh((0, 1, 2, 3), ("zero",)), _mesh(((0, 1), (2, 3)), ("zero", "tensor"))
    stages = [_mesh((0, 1), ("first",)), _mesh((2, 3), ("second",))]
    return {
        "fsdp": _on(flat, lambda w: [Shard(0)]),
        "hsdp": _on(grid, lambda w: [Replicate(), Shard(0)]),
        "tensor column x fsdp": _on(grid, lambda w: [_StridedShard(0, split_factor=2), Shard(0)]),
        "tensor row x fsdp": _on(grid, lambda w: [Shard(0), Shard(w.ndim - 1) if w.ndim > 1 else Replicate()]),
        "experts x fsdp": _on(grid, lambda w: [Shard(1), Shard(0)] if w.ndim == 3 else [Shard(0), Replicate()]),
        "mixed meshes": lambda name, w: placed(
            w, *((grid, [Shard(0), Shard(1)]) if w.ndim > 1 else (flat, [Shard(0)]))
        ),
        "pipeline": lambda name, w: _in_stage(name, w, stages),
    }  # fmt: skip


def _in_stage(name, whole, stages):
    stage = sorted(SHAPES).index(name) % 2 if name in SHAPES else 0
    return placed(whole, stages[stage], [Shard(0)]) if dist.get_rank() // 2 == stage else None


def trained(build, place, *, steps=20, shapes=None, dtype=torch.float32, first_step=1, each_step=None):
    """Trains by given gradients on one layout.

    Args:
        build: ``build(named parameters)`` returns the optimizer.
        place: ``(name, whole tensor) -> parameter`` or None.

    Returns:
        Whole weights and whole states by parameter name, and the optimizer.
    """
    parameters = {}
    for name, whole in start_values(shapes).items():
        local = place(name, whole.to(dtype))
        if local is not None:
            parameters[name] = torch.nn.Parameter(local)
    optimizer = build(parameters)
    for step in range(first_step, first_step + steps):
        for name, whole in gradients(step, shapes).items():
            if name in parameters:
                parameters[name].grad = place(name, whole.to(dtype))
        optimizer.step()
        if each_step is not None:
            each_step(step, parameters, optimizer)
    return whole_result(parameters, optimizer), optimizer


def whole_result(parameters, optimizer):
    result = {name: full(parameter) for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        for key, value in optimizer.state[parameter].items():
            if isinstance(value, torch.Tensor):
                result[f"{name}.{key}"] = full(value)
    return result


def full(tensor):
    """A whole copy."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def relative_differences(result, expected, start):
    """Per tensor: the norm of the difference over the distance moved (weights), or over the norm (states)."""
    differences = {}
    for name, value in result.items():
        wanted = expected[name].double()
        moved = wanted - start[name].double() if name in start else wanted
        scale = max(moved.norm().item(), 1e-30)
        differences[name] = (value.double() - wanted).norm().item() / scale
    return differences
