"""Gradients in the space of their leading singular vectors, and steps back out of it."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from meshwright.errors import NonFiniteError
from meshwright.optim.galore.projector import MatrixParts, ProjectorForm, cost_of, leading_vectors
from meshwright.optim.sharded import Chunk, Kept, Layout, Request, Sum, TensorList, Whole

LEFT, RIGHT = -2, -1
_SIDES_OF_TALL = {"std": (RIGHT,), "reverse_std": (LEFT,), "right": (RIGHT,), "left": (LEFT,), "full": (LEFT, RIGHT)}
_SIDES_OF_WIDE = {**_SIDES_OF_TALL, "std": (LEFT,), "reverse_std": (RIGHT,)}
PROJECTION_TYPES = tuple(_SIDES_OF_TALL)


def is_projected(group: Mapping[str, Any]) -> bool:
    """Whether the parameters of a group are projected: its having a rank says so, as in GaLore."""
    return group.get("rank") is not None


def projector_forms(layout: Layout, group: Mapping[str, Any]) -> dict[str, ProjectorForm]:
    """The projectors of a parameter by the names of their states: one, or one for each side.

    ``std`` contracts the shorter of a matrix's dims, so that moments are of the longer dim × rank.
    """
    height, width = layout.shape[-2:]
    sides = (_SIDES_OF_TALL if height >= width else _SIDES_OF_WIDE)[group["proj_type"]]
    names = ("projector", "projector_right")
    return {name: ProjectorForm(group["rank"], side) for name, side in zip(names, sides, strict=False)}


def low_rank_form(layout: Layout, group: Mapping[str, Any]) -> Kept:
    """The form of a projected gradient: rank in place of what is contracted, which no axis splits."""
    shape, dims = list(layout.shape), list[int | None](range(layout.ndim))
    for form in projector_forms(layout, group).values():
        shape[form.dim], dims[form.dim] = form.rank, None
    return Kept(tuple(shape), tuple(dims))


def is_time_to_renew(chunk: Chunk) -> bool:
    """Whether projectors are computed anew in this step: the first, and then every ``update_proj_gap``-th."""
    return bool((chunk.step - 1) % chunk.group["update_proj_gap"] == 0)


def contracts_split_dims(chunk: Chunk) -> bool:
    """Whether projecting needs the other ranks."""
    forms = projector_forms(chunk.layout, chunk.group).values()
    return not chunk.layout.is_whole(*(chunk.layout.ndim + form.dim for form in forms))


def projected(chunk: Chunk, replicas: dist.ProcessGroup | None) -> Generator[list[Request], list[Any], TensorList]:
    """The gradients in the space of the projectors, which are renewed first when it is time.

    Args:
        chunk: Of projected parameters, with projectors among its states.
        replicas: Ranks that hold the same plain parameters, if they are to share the work.

    Raises:
        NonFiniteError: When a parameter's first gradient has no singular vectors.
    """
    forms = projector_forms(chunk.layout, chunk.group)
    is_first = chunk.step == 1
    if is_time_to_renew(chunk):
        yield [_renewal(chunk, name, form, replicas) for name, form in forms.items()]
    sides = tuple(form.dim for form in forms.values())
    low = _contracted(chunk, forms)
    if is_first:
        low, unknown = yield [Sum(low, sides), Sum(_unknown(chunk, forms), sides, largest=True)]
        if chunk.has_gradients and bool(unknown.any()):
            raise _no_vectors(chunk, unknown)
    elif contracts_split_dims(chunk):
        (low,) = yield [Sum(low, sides)]
    return low


def take_projected_step(chunk: Chunk, step: TensorList, remaining: float) -> None:
    """weights = remaining · (weights + scale · step back in the whole space), in as few passes as may be.

    Args:
        chunk: Of projected parameters.
        step: In the space of the projectors.
        remaining: What weight decay leaves.
    """
    forms = projector_forms(chunk.layout, chunk.group)
    scale = float(chunk.group["scale"]) * remaining
    projectors = {form.dim: chunk.states[name].tensors for name, form in forms.items()}
    for index, (weight, low) in enumerate(zip(chunk.weights, step, strict=True)):
        first, second = low, projectors[RIGHT][index].mT if RIGHT in projectors else low
        if LEFT in projectors:
            first, second = projectors[LEFT][index], low @ second if RIGHT in projectors else low
        if weight.ndim == 2:
            weight.addmm_(first, second, beta=remaining, alpha=scale)
        else:
            weight.mul_(remaining).add_(first @ second, alpha=scale)


def _renewal(chunk: Chunk, name: str, form: ProjectorForm, replicas: dist.ProcessGroup | None) -> Whole:
    """Has each gradient decomposed on one rank. A decomposition that fails leaves the old projector."""
    projectors, method, step = chunk.states[name].tensors, chunk.group["svd"], chunk.step

    def decompose(members: list[int], matrices: list[torch.Tensor]) -> list[torch.Tensor]:
        seeds = [chunk.members[member].position * 1_000_003 + step for member in members]
        return [leading_vectors(matrix, form, method, seed) for matrix, seed in zip(matrices, seeds, strict=True)]

    def take(member: int, vectors: torch.Tensor) -> None:
        old, new = projectors[member], vectors.to(projectors[member].device)
        old.copy_(new if step == 1 else torch.where(new.isnan(), old, new))

    return Whole(
        chunk.gradients.tensors.__getitem__, decompose, take, parts=MatrixParts(form), form=form, cost=cost_of(method),
        replicas=replicas,
    )  # fmt: skip


def _contracted(chunk: Chunk, forms: Mapping[str, ProjectorForm]) -> TensorList:
    """This rank's part of the projected gradients."""
    low = chunk.gradients
    for name, form in forms.items():
        if form.dim == RIGHT:
            low = low.map(torch.matmul, chunk.states[name])
        else:
            low = low.map(lambda gradient, vectors: vectors.mT @ gradient, chunk.states[name])
    return low


def _unknown(chunk: Chunk, forms: Mapping[str, ProjectorForm]) -> torch.Tensor:
    """1 for parameters whose projectors could not be computed, else 0; shape (len,)."""
    missing = [torch.stack([vectors.isnan().any() for vectors in chunk.states[name]]).float() for name in forms]
    return torch.stack(missing).amax(0)


def _no_vectors(chunk: Chunk, unknown: torch.Tensor) -> NonFiniteError:
    shapes = [layout.shape for layout, is_bad in zip(chunk.layouts, unknown.tolist(), strict=True) if is_bad]
    return NonFiniteError(
        "The first gradient of a parameter has no singular vectors to project it on",
        expected="finite gradients in the first step",
        got=f"none could be computed for parameters of shape {', '.join(map(str, shapes))}",
        fix="skip steps whose gradients are not finite, as a loss scale does",
    )
