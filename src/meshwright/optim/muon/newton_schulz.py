"""Orthogonalising matrices by Newton–Schulz iteration, many of one shape at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

# Matrices of one shape are multiplied together up to so many elements: small ones cost their calls, large ones gain
# nothing (CPU: 32 of 16 x 16 in fp32 28 times faster together, of 64 x 64 twice, of 256 x 1024 not).
_TOGETHER = {"cpu": 1 << 18, "other": 1 << 24}


def orthogonalised(
    matrices: Sequence[torch.Tensor], coefficients: tuple[float, float, float], steps: int, eps: float
) -> list[torch.Tensor]:
    """U·S'·Vᵀ for every U·S·Vᵀ, with all of S' between 0.5 and 1.5 or so (Jordan et al. 2024, "Muon").

    The quintic iteration X ← aX + (bA + cA²)X with A = XXᵀ, begun at X / ‖X‖. As in torch.optim.Muon: on the wide side
    of the matrix, with the norm taken in its own type.

    Args:
        matrices: Of shape (..., H, W) with one matrix in each, in fp32 or half precision; only read.
        coefficients: a, b and c.
        steps: Number of iterations.
        eps: Least norm divided by.

    Returns:
        One for each, of its shape and type.
    """
    by_shape: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, matrix in enumerate(matrices):
        by_shape[matrix.shape[-2], matrix.shape[-1]].append(index)
    results = list(matrices)
    for (height, width), indices in by_shape.items():
        size = _TOGETHER["cpu" if matrices[0].device.type == "cpu" else "other"] // max(height * width, 1)
        for start in range(0, len(indices), max(size, 1)):
            part = indices[start : start + max(size, 1)]
            made = _of_one_shape([matrices[index].reshape(height, width) for index in part], coefficients, steps, eps)
            for index, result in zip(part, made, strict=True):
                results[index] = result.reshape(matrices[index].shape)
    return results


def _of_one_shape(
    matrices: Sequence[torch.Tensor], coefficients: tuple[float, float, float], steps: int, eps: float
) -> Sequence[torch.Tensor]:
    """Matrices (H, W) iterated together, one alone without a copy into a stack."""
    norms = [torch.linalg.vector_norm(matrix).clamp_(min=eps) for matrix in matrices]
    is_tall = matrices[0].shape[0] > matrices[0].shape[1]
    wide = [matrix.mT / norm if is_tall else matrix / norm for matrix, norm in zip(matrices, norms, strict=True)]
    x, multiply_add = (wide[0], torch.addmm) if len(wide) == 1 else (torch.stack(wide), torch.baddbmm)
    a, b, c = coefficients
    for _ in range(steps):
        gram = x @ x.mT
        x = multiply_add(x, multiply_add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    results = [x] if len(wide) == 1 else x.unbind()
    return [result.mT for result in results] if is_tall else results


def cost(shape: tuple[int, ...]) -> float:
    """Multiplications of one step for a matrix (..., H, W): XXᵀ and (…)X cost H·W·min each, A² min³."""
    height, width = shape[-2:]
    least = min(height, width)
    return float(2 * height * width * least + least**3)
