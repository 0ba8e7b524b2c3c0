"""The process grid: which ranks stand together along which named axis.

Axes are listed innermost first, as in ATorch's ``parallel_mode``: ``[("tensor", 4), ("pipeline", 2), ("data", 2)]``
puts ranks 0-3 into one tensor group. The DeviceMesh holds the same grid with its axes in one order, outermost first, so
that any sub-mesh (data, zero) can be sliced from it whatever order the user wrote.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from meshwright.errors import LaunchError, StrategyError, did_you_mean
from meshwright.runtime.processes import (
    connect,
    connecting_on_use,
    limit_as_the_world,
    require_distributed,
    settings,
)

AXES = ("replica", "pipeline", "expert", "data", "context", "sequence", "zero", "tensor")
"""Every axis a mesh can have, outermost first; see :func:`mesh_order`."""

TOKEN_AXES = ("context", "sequence")
"""The axes whose ranks share samples and divide their tokens."""

Axes = tuple[tuple[str, int], ...]


def check_axes(axes: Sequence[tuple[str, int]]) -> None:
    """Refuse unknown or repeated axis names and sizes below one.

    Raises:
        StrategyError: Naming the axis.
    """
    for name, size in axes:
        if name not in AXES:
            raise StrategyError(
                f"Unknown mesh axis {name!r}{did_you_mean(name, AXES)}",
                expected=f"one of {', '.join(AXES)}",
                got=repr(name),
                fix="correct the name in parallel_mode",
            )
        if size < 1:
            raise StrategyError(
                f"Mesh axis {name!r} has an impossible size",
                expected="1 or more",
                got=str(size),
                fix="use 1 for an axis that is not split",
            )
    names = [name for name, _ in axes]
    if len(set(names)) != len(names):
        raise StrategyError(
            "A mesh axis is listed twice",
            expected="every axis once",
            got=", ".join(names),
            fix="multiply the sizes into one axis",
        )


def fit_axes(axes: Sequence[tuple[str, int]], world: int, *, adjustable: bool = True) -> Axes:
    """Fit axis sizes to a world by adjusting the size of ``data`` (ATorch's rule).

    Args:
        axes: ``(name, size)``, innermost first. Empty means data parallelism over the world.
        world: Number of ranks.
        adjustable: False keeps the sizes as they are (a rank order was given for exactly these).

    Raises:
        StrategyError: When no size of ``data`` makes the product equal to ``world``.
    """
    if not axes:
        return (("data", world),)
    check_axes(axes)
    product = math.prod(size for _, size in axes)
    rest = product // dict(axes).get("data", 1)
    if product == world:
        return tuple(axes)
    if "data" in dict(axes) and adjustable and world % rest == 0:
        return tuple((name, world // rest if name == "data" else size) for name, size in axes)
    raise StrategyError(
        "The mesh does not fit the number of ranks",
        expected=f"axis sizes that multiply to {world}",
        got=" x ".join(f"{name} {size}" for name, size in axes) + f" = {product}",
        fix=f"start a multiple of {rest} processes, or change the sizes"
        + ("" if "data" in dict(axes) else "; a 'data' axis is resized automatically when there is one"),
    )


def rank_grid(axes: Sequence[tuple[str, int]], rank_order: Sequence[int] | None = None) -> np.ndarray:
    """Return the grid of ranks, one dimension per axis in the order listed.

    Args:
        axes: ``(name, size)``, innermost first.
        rank_order: Which rank stands at each position of the sequential order; None means rank = position.

    Returns:
        Integer array of shape ``(size_0, size_1, …)``.

    Raises:
        StrategyError: When ``rank_order`` is not a permutation of the ranks.
    """
    world = math.prod(size for _, size in axes)
    order = list(range(world)) if rank_order is None else list(rank_order)
    if sorted(order) != list(range(world)):
        raise StrategyError(
            "The rank order does not name every rank once",
            expected=f"a permutation of 0..{world - 1}",
            got=str(order),
            fix="list each rank once, or pass None for the sequential order",
        )
    return np.asarray(order).reshape([size for _, size in reversed(axes)]).transpose()


def axis_groups(axes: Sequence[tuple[str, int]], rank_order: Sequence[int] | None = None) -> dict[str, list[list[int]]]:
    """Return the groups of ranks along every axis, as ATorch's documentation prints them for its examples."""
    grid = rank_grid(axes, rank_order)
    groups = {}
    for dim, (name, size) in enumerate(axes):
        # Groups in the order of the outer ranks: the other dimensions, innermost varying fastest.
        others = np.moveaxis(grid, dim, 0).reshape(size, -1, order="F")
        groups[name] = [column.tolist() for column in others.T]
    return groups


def ascending_grid(axes: Sequence[tuple[str, int]], rank_order: Sequence[int] | None = None) -> np.ndarray:
    """Return the grid of :func:`rank_grid`, renumbered along each axis so that ranks ascend in every group.

    torch numbers the ranks of a process group in ascending order, and DTensor numbers them by their place on the mesh:
    only where the two agree do shards end up where they belong.

    Raises:
        StrategyError: When no renumbering makes every group ascend.
    """
    grid = rank_grid(axes, rank_order)
    origin = tuple(np.argwhere(grid == 0)[0])
    for dim in range(grid.ndim):
        line = grid[(*origin[:dim], slice(None), *origin[dim + 1 :])]
        grid = np.take(grid, np.argsort(line), axis=dim)
        origin = tuple(np.argwhere(grid == 0)[0])
    if any((np.diff(grid, axis=dim) < 0).any() for dim in range(grid.ndim)):
        raise StrategyError(
            "The rank order crosses groups in a way that process groups cannot follow",
            expected="an order in which the ranks of every group can be numbered upwards along all axes at once",
            got=str(list(rank_order or [])),
            fix="exchange whole groups, not single ranks; None keeps ranks in sequence",
        )
    return grid


def coordinate_of(
    rank: int, axes: Sequence[tuple[str, int]], rank_order: Sequence[int] | None = None
) -> dict[str, int]:
    """Return a rank's place on the mesh: its index along every axis."""
    position = np.argwhere(ascending_grid(axes, rank_order) == rank)[0]
    return {name: int(index) for (name, _), index in zip(axes, position, strict=True)}


# [Note: joint axes] Parameters are sharded over the ranks that take different samples and over those that share one,
# taken as one axis. Its name joins those of its parts as DeviceMesh does, outermost first: ``context_zero``. Such names
# stand wherever an axis does (``axis_parts`` in cost/step.py): sizes of a job's mesh and of a simulated step multiply
# the parts, and links count the ranks along all of them. Process groups number their ranks upwards, and DTensor numbers
# them by the mesh: so parts stand side by side in the DeviceMesh, in the order in which the user nests them.


def joint_axis(axes: Sequence[tuple[str, int]], first: str) -> str:
    """Return the name of an axis joined with those whose ranks share samples; without any, the name itself.

    Args:
        axes: ``(name, size)``, innermost first.
        first: ``zero``, ``data``, or one of the axes whose ranks share samples.
    """
    together = {name for name, size in axes if name in (first, *TOKEN_AXES) and size > 1}
    return "_".join(name for name in mesh_order(axes) if name in together) or first


def mesh_order(axes: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    """Return the names of axes as a DeviceMesh has them, outermost first.

    That is the order of ``AXES``, but for axes that are sharded over together: these are nested as the user has them.
    """
    names = [name for name, _ in reversed(axes)]
    together = [name for name in names if name in (*TOKEN_AXES, "zero" if "zero" in names else "data")]
    nested = iter(together)
    return tuple(next(nested) if name in together else name for name in sorted(names, key=AXES.index))


def build_mesh(axes: Sequence[tuple[str, int]], rank_order: Sequence[int] | None, device_type: str) -> DeviceMesh:
    """Create the DeviceMesh and its process groups; every rank must call it.

    Args:
        axes: ``(name, size)``, innermost first; sizes multiply to the world.
        rank_order: See :func:`rank_grid`.
        device_type: ``"cpu"`` or ``"cuda"``.

    Raises:
        LaunchError: When the sizes do not multiply to the world.
    """
    world = torch.distributed.get_world_size()
    grid = ascending_grid(axes, rank_order)
    if grid.size != world:
        raise LaunchError(
            "The mesh does not cover the world",
            expected=f"{world} ranks",
            got=f"{grid.size} ranks",
            fix="start that many processes, or change the axis sizes",
        )
    names = [name for name, _ in axes]
    outermost_first = [names.index(name) for name in mesh_order(axes)]
    ranks = torch.from_numpy(np.ascontiguousarray(grid.transpose(outermost_first)))
    with connecting_on_use(max(ranks.shape)) as on_use:
        mesh = DeviceMesh(device_type, ranks, mesh_dim_names=tuple(names[dim] for dim in outermost_first))
    _finish_axes(mesh, on_use)
    return mesh


def flat_mesh(mesh: DeviceMesh, axes: Sequence[str]) -> DeviceMesh:
    """Return some axes of a mesh over the world as a mesh of one dim; collective over the world.

    The same axes are made once, by DeviceMesh.

    Args:
        mesh: A mesh from :func:`build_mesh`.
        axes: One or more of its axes, in the order of the mesh.
    """
    from meshwright.runtime.torch_internals.dtensor import flattened  # slow to import

    names = tuple(axes)
    if len(names) == 1:
        return mesh[names[0]]
    with connecting_on_use(math.prod(mesh.size(_dim(mesh, name)) for name in names)) as on_use:
        flat = flattened(mesh[names])
    _finish_axes(flat, on_use)
    return flat


def groups_along(mesh: DeviceMesh, axes: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the ranks of all groups along some axes of a mesh over the world, this rank's and the others'.

    Args:
        mesh: A mesh from :func:`build_mesh`.
        axes: One or more of its axes, in the order of the mesh.
    """
    dims = [_dim(mesh, name) for name in axes]
    others = [dim for dim in range(mesh.ndim) if dim not in dims]
    lines = mesh.mesh.permute(*others, *dims).flatten(len(others))
    return [tuple(ranks) for ranks in lines.view(-1, lines.shape[-1]).tolist()]


def mesh_of_parts(mesh: DeviceMesh, axes: Sequence[str], size: int) -> DeviceMesh:
    """Cut axes of a mesh, taken as one, over the world into parts of neighbouring ranks; collective over the world.

    Args:
        mesh: A mesh from :func:`build_mesh`.
        axes: One or more of its axes, in the order of the mesh.
        size: Ranks of a part; it divides the ranks along these axes.

    Returns:
        A mesh of two dims: ranks at the same place of all parts, and the ranks of a part.
    """
    parts = torch.tensor(groups_along(mesh, axes), dtype=torch.int).view(-1, size)
    with connecting_on_use(max(parts.shape)) as on_use:
        cut = DeviceMesh(mesh.device_type, parts, mesh_dim_names=("apart", "nearby"))
    _finish_axes(cut, on_use)
    return cut


def _dim(mesh: DeviceMesh, name: str) -> int:
    assert mesh.mesh_dim_names is not None
    return mesh.mesh_dim_names.index(name)


def _finish_axes(mesh: DeviceMesh, on_use: bool) -> None:
    for dim in range(mesh.ndim):
        group = mesh.get_group(dim)
        if group is torch.distributed.group.WORLD:
            continue
        limit_as_the_world(group)
        # On GPUs the parts on gloo are made, too, and hardly used.
        if on_use and torch.distributed.get_backend(group) == "gloo":
            connect(group)


_world_mesh: tuple[object, DeviceMesh] | None = None  # the process group it was made for, and the mesh


def world_mesh() -> DeviceMesh:
    """Return the mesh ``("zero",)`` over all ranks, made once per world; the first call is collective.

    Raises:
        LaunchError: Before ``init_distributed``.
    """
    global _world_mesh
    require_distributed("A mesh over all ranks")
    world = torch.distributed.group.WORLD
    if _world_mesh is None or _world_mesh[0] is not world:
        mesh = build_mesh([("zero", torch.distributed.get_world_size())], None, settings().device.type)
        _world_mesh = (world, mesh)
    return _world_mesh[1]
