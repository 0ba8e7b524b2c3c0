"""GaLore's projections: gradients onto their leading singular vectors, and steps back to the parameters' space."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from meshwright.errors import ModelError, NonFiniteError
from meshwright.optim.sharded import (
    Chunk,
    Kept,
    Layout,
    Parts,
    Request,
    Sum,
    TensorList,
    Whole,
    bad_value,
    check_at_least_zero,
)
from meshwright.optim.sharded.tensor_layout import Region

LEFT, RIGHT = -2, -1
_SIDES_OF_TALL = {"std": (RIGHT,), "reverse_std": (LEFT,), "right": (RIGHT,), "left": (LEFT,), "full": (LEFT, RIGHT)}
_SIDES_OF_WIDE = {**_SIDES_OF_TALL, "std": (LEFT,), "reverse_std": (RIGHT,)}
PROJECTION_TYPES = tuple(_SIDES_OF_TALL)


def is_projected(group: Mapping[str, Any]) -> bool:
    """Return whether the parameters of a group are projected, that is, whether it has a rank."""
    return group.get("rank") is not None


def projector_forms(layout: Layout, group: Mapping[str, Any]) -> dict[str, ProjectorForm]:
    """Return the form of each projector of a parameter, by state name: one, or one for each side.

    ``std`` contracts the shorter dim of a matrix, so that moments have the shape longer dim × rank.
    """
    height, width = layout.shape[-2:]
    sides = (_SIDES_OF_TALL if height >= width else _SIDES_OF_WIDE)[group["proj_type"]]
    names = ("projector", "projector_right")
    return {name: ProjectorForm(group["rank"], side) for name, side in zip(names, sides, strict=False)}


def low_rank_form(layout: Layout, group: Mapping[str, Any]) -> Kept:
    """Return the form of a projected gradient: contracted dims become the rank, which no axis splits."""
    shape, dims = list(layout.shape), list[int | None](range(layout.ndim))
    for form in projector_forms(layout, group).values():
        shape[form.dim], dims[form.dim] = form.rank, None
    return Kept(tuple(shape), tuple(dims))


def is_time_to_renew(chunk: Chunk) -> bool:
    """Return whether projectors are computed anew in this step: the first, and then every ``update_proj_gap``-th."""
    return bool((chunk.step - 1) % chunk.group["update_proj_gap"] == 0)


def contracts_split_dims(chunk: Chunk) -> bool:
    """Return whether projecting needs sums over other ranks."""
    forms = projector_forms(chunk.layout, chunk.group).values()
    return not chunk.layout.is_whole(*(chunk.layout.ndim + form.dim for form in forms))


def projected(chunk: Chunk, replicas: dist.ProcessGroup | None) -> Generator[list[Request], list[Any], TensorList]:
    """Return the projected gradients, after renewing the projectors when that is due.

    Args:
        chunk: Projected parameters, with projectors among the states.
        replicas: Ranks that hold the same plain parameters and share the work on them; None: nobody does.

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
    """Compute weights = remaining · (weights + scale · unprojected step), in as few passes as possible.

    Args:
        chunk: Projected parameters.
        step: The step in the projectors' space.
        remaining: The factor that weight decay leaves.
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
    """Request the decomposition of each gradient on one rank. If it fails, the old projector stays."""
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
    low = chunk.gradients
    for name, form in forms.items():
        if form.dim == RIGHT:
            low = low.map(torch.matmul, chunk.states[name])
        else:
            low = low.map(lambda gradient, vectors: vectors.mT @ gradient, chunk.states[name])
    return low


def _unknown(chunk: Chunk, forms: Mapping[str, ProjectorForm]) -> torch.Tensor:
    """Return 1 for parameters whose projectors could not be computed, else 0; shape (len,)."""
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


# --- Singular vectors of gradients

METHODS = ("exact", "randomised")
_OVERSAMPLING = 8
_POWER_ITERATIONS = 2


@dataclass(frozen=True)
class ProjectorForm:
    """The form of a projector: singular vectors as columns, along one of a matrix's two dims.

    Args:
        rank: Number of vectors.
        dim: The dim that projecting contracts: −1 (right singular vectors) or −2 (left ones).
    """

    rank: int
    dim: int

    def __call__(self, layout: Layout) -> Kept:
        """Return the form of the projectors, (…, size of the dim, rank), of each matrix of a stack."""
        stacks = tuple(range(layout.ndim - 2))
        size = layout.shape[self.dim]
        return Kept((*layout.shape[:-2], size, self.rank), (*stacks, layout.ndim + self.dim, None))


@dataclass(frozen=True)
class MatrixParts:
    """The matrices of a stack, each with its projector.

    Args:
        form: The form of the projectors.
    """

    form: ProjectorForm

    def __call__(self, layout: Layout) -> Parts:
        """Return the region of each matrix, and of its projector."""
        stack, result = layout.shape[:-2], self.form(layout).shape[-2:]
        ones = (1,) * len(stack)
        parts = []
        for number in range(math.prod(stack)):
            at = tuple(int(index) for index in torch.unravel_index(torch.tensor(number), stack)) if stack else ()
            parts.append((Region((*at, 0, 0), (*ones, *layout.shape[-2:])), Region((*at, 0, 0), (*ones, *result))))
        return tuple(parts)


def svd_cost(shape: tuple[int, ...]) -> float:
    """Return the cost of an exact decomposition, in multiply-adds up to a factor."""
    return math.prod(shape) * float(min(shape[-2:]))


def cost_of(method: str) -> Callable[[tuple[int, ...]], float]:
    """Return the function from a matrix's shape to a method's cost."""
    return svd_cost if method == "exact" else math.prod


def leading_vectors(matrix: torch.Tensor, form: ProjectorForm, method: str, seed: int) -> torch.Tensor:
    """Return the first singular vectors of a matrix, by descending singular values.

    Args:
        matrix: fp32, shape (H, W), or (1, …, H, W).
        form: Number of vectors, and side.
        method: ``"exact"``, or ``"randomised"``: a range finder with two power iterations (Halko, Martinsson and Tropp
            2011, Algorithm 4.4), which costs O(H · W · rank).
        seed: Seed of the random start; equal seeds give equal vectors.

    Returns:
        Shape (…, size of the dim, rank); NaN when they cannot be computed, as for a gradient that is not finite.
    """
    flat = matrix.reshape(matrix.shape[-2:])
    try:
        left, right = _exact(flat) if method == "exact" else _randomised(flat, form.rank, seed)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return flat.new_full((*matrix.shape[:-2], flat.shape[form.dim], form.rank), torch.nan)
    vectors = (right if form.dim == -1 else left)[:, : form.rank]
    return vectors.reshape(*matrix.shape[:-2], flat.shape[form.dim], form.rank)


def _exact(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    return left, right.mH


def _randomised(matrix: torch.Tensor, rank: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(matrix.device)
    generator.manual_seed(seed)
    columns = min(rank + _OVERSAMPLING, *matrix.shape)
    start = torch.randn(matrix.shape[1], columns, generator=generator, device=matrix.device)
    basis = torch.linalg.qr(start).Q
    for _ in range(_POWER_ITERATIONS + 1):
        basis = torch.linalg.qr(matrix.mT @ torch.linalg.qr(matrix @ basis).Q).Q
    left, _, right = torch.linalg.svd(matrix @ basis, full_matrices=False)
    return left, basis @ right.mH


# --- Checks of hyperparameters and of shapes


def check_projection(group: dict[str, Any]) -> None:
    """Refuse numbers out of range, and parameters that cannot be projected.

    Raises:
        ConfigError: Naming the hyperparameter.
        ModelError: Naming the parameter.
    """
    for name in ("rank", "update_proj_gap"):
        if not isinstance(group[name], int) or group[name] < 1:
            raise bad_value(name, group[name], "a whole number from 1")
    check_at_least_zero(group, "scale")
    if group["proj_type"] not in PROJECTION_TYPES:
        raise bad_value("proj_type", group["proj_type"], ", ".join(map(repr, PROJECTION_TYPES)))
    if group["svd"] not in METHODS:
        raise bad_value("svd", group["svd"], ", ".join(map(repr, METHODS)))
    for index, parameter in enumerate(group["params"]):
        _check_shape(parameter, _name(group, index), group["rank"])


def _name(group: dict[str, Any], index: int) -> str:
    names = group.get("param_names")
    return repr(names[index]) if names else f"number {index} of its group"


def _check_shape(parameter: torch.Tensor, name: str, rank: int) -> None:
    if parameter.ndim < 2:
        raise ModelError(
            f"The parameter {name} is no matrix and cannot be projected",
            expected="parameters of 2 or more dims in groups with a rank",
            got=f"shape {tuple(parameter.shape)}",
            fix="put it into a group without rank, as get_galore_param_groups does",
        )
    if min(parameter.shape[-2:]) < rank:
        raise ModelError(
            f"The parameter {name} is smaller than the rank, and has no more singular vectors than its shorter side",
            expected=f"matrices of at least {rank} × {rank}",
            got=f"shape {tuple(parameter.shape)} with rank={rank}",
            fix="choose a smaller rank, or put it into a group without rank",
        )
