"""Clipping each gradient by a percentile of its own last norms."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch

from meshwright.optim.sharded import Chunk, Kept, Sum, TensorList

NORMS = "gnorm_vec"
HISTORY = 100
"""Norms that are remembered."""


def kept_norms() -> Kept:
    """The form of a parameter's last squared norms."""
    return Kept((HISTORY,), (None,))


def clipped(
    chunk: Chunk, gradients: TensorList, over: tuple[int, ...] | None
) -> Generator[list[Sum], list[Any], TensorList]:
    """Gradients scaled down to the norm below which ``percentile_clipping`` percent of the last 100 were.

    Bitsandbytes' percentile clipping (until 0.49), with the norm of the whole gradient and with the norms that there
    have been: its buffer begins with zeros, which low percentiles clip the first steps to.

    Args:
        chunk: With the norms among its states.
        gradients: What the moments are of.
        over: The parameter's dims that they share.
    """
    (squares,) = yield [Sum(gradients.squares(), over)]
    histories, known = chunk.states[NORMS].tensors, min(chunk.step, HISTORY)
    place = (chunk.step - 1) % HISTORY
    torch._foreach_copy_([history[place] for history in histories], list(squares.unbind()))
    ranked = torch.stack(histories)[:, :known].sort(1).values
    limit = ranked[:, chunk.group["percentile_clipping"] * known // HISTORY]
    return gradients * torch.where(squares > limit, (limit / squares).sqrt(), 1.0)
