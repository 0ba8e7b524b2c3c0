"""This rank's part of a parameter's gradient, laid out like the parameter."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from meshwright.errors import ModelError


def local_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """The shard of the gradient that belongs to the shard of the parameter; None without a gradient.

    Raises:
        ModelError: When the gradient is sparse, or plain where the parameter is sharded.
    """
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.layout is not torch.strided:
        raise ModelError(
            "A gradient is sparse",
            expected="dense gradients: statistics are of all elements",
            got=f"{gradient.layout} for a parameter of shape {tuple(parameter.shape)}",
            fix="build the embedding with sparse=False, or give these parameters to torch.optim.SparseAdam",
        )
    if not isinstance(parameter, DTensor):
        return gradient
    if not isinstance(gradient, DTensor):
        raise ModelError(
            "A sharded parameter has a plain gradient",
            expected=f"a DTensor placed as {parameter.placements}",
            got=f"a tensor of shape {tuple(gradient.shape)}",
            fix="let backward make the gradients, or distribute them like their parameters",
        )
    if gradient._spec is not parameter._spec and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    return gradient.to_local()
