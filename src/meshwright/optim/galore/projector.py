"""Singular vectors of gradients, on which GaLore projects them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from meshwright.optim.sharded import Kept, Layout, Parts
from meshwright.optim.sharded.regions import Region

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
        """Shape (…, size of the dim, rank), for each matrix of a stack."""
        stacks = tuple(range(layout.ndim - 2))
        size = layout.shape[self.dim]
        return Kept((*layout.shape[:-2], size, self.rank), (*stacks, layout.ndim + self.dim, None))


@dataclass(frozen=True)
class MatrixParts:
    """Every matrix of a stack apart, with its projector.

    Args:
        form: Of the projectors.
    """

    form: ProjectorForm

    def __call__(self, layout: Layout) -> Parts:
        """The block of each matrix, and of its projector."""
        stack, result = layout.shape[:-2], self.form(layout).shape[-2:]
        ones = (1,) * len(stack)
        parts = []
        for number in range(math.prod(stack)):
            at = tuple(int(index) for index in torch.unravel_index(torch.tensor(number), stack)) if stack else ()
            parts.append((Region((*at, 0, 0), (*ones, *layout.shape[-2:])), Region((*at, 0, 0), (*ones, *result))))
        return tuple(parts)


def svd_cost(shape: tuple[int, ...]) -> float:
    """Of an exact decomposition, in multiply-adds up to a factor."""
    return math.prod(shape) * float(min(shape[-2:]))


def cost_of(method: str) -> Callable[[tuple[int, ...]], float]:
    """How the work of a method grows with the matrix."""
    return svd_cost if method == "exact" else math.prod


def leading_vectors(matrix: torch.Tensor, form: ProjectorForm, method: str, seed: int) -> torch.Tensor:
    """The first singular vectors of a matrix, by descending singular values.

    Args:
        matrix: fp32, shape (H, W), or (1, …, H, W).
        form: Number and side.
        method: ``"exact"``, or ``"randomised"``: a range finder with two power iterations (Halko, Martinsson and Tropp
            2011, Algorithm 4.4), which costs O(H · W · rank).
        seed: Of the random start; equal seeds give equal vectors.

    Returns:
        Shape (…, size of the dim, rank); NaN when they cannot be computed, as of a gradient that is not finite.
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
