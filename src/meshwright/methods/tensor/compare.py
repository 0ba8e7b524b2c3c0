"""Whether tensors of a trial are equal, up to rounding."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_TOLERANCE = 1e-3  # of the norm; a wrong split is off by as much as the values themselves
_NOISE = 1e-5  # of the largest gradient: what is zero in exact arithmetic, such as a key bias's


class Refuted(Exception):
    """A split does not compute what the whole block computes; says where."""


def split_dim(output: torch.Tensor, expected: torch.Tensor, rank: int, ranks: int) -> int | None:
    """The dim in which a rank has its part of what is expected; None where it has the whole.

    Raises:
        Refuted: When it has neither.
    """
    if output.shape == expected.shape and close(output, expected, 0.0):
        return None
    for dim, size in enumerate(expected.shape):
        if size == output.shape[dim] * ranks if dim < output.dim() else False:
            part = expected.chunk(ranks, dim)[rank]
            if part.shape == output.shape and close(output, part, 0.0):
                return dim
    raise Refuted("an output of the block is neither the whole nor a part of it")


def total(parts: Iterable[torch.Tensor | None], like: torch.Tensor) -> torch.Tensor:
    """The sum of parts; nan where one has another shape."""
    present = [part for part in parts if part is not None]
    same = [part for part in present if part.shape == like.shape]
    return torch.stack(same).sum(0) if same and len(same) == len(present) else torch.full_like(like, torch.nan)


def close(value: torch.Tensor | None, expected: torch.Tensor, scale: float) -> bool:
    """Whether a value is what is expected; ``scale`` is how large such values are."""
    if value is None or value.shape != expected.shape:
        return False
    if not expected.is_floating_point():
        return torch.equal(value, expected)
    apart = torch.linalg.vector_norm(value.detach() - expected)
    return bool(apart <= _TOLERANCE * torch.linalg.vector_norm(expected) + _NOISE * scale)


def largest(tensors: Iterable[torch.Tensor | None]) -> float:
    """The largest norm."""
    return max((torch.linalg.vector_norm(tensor).item() for tensor in tensors if tensor is not None), default=0.0)
