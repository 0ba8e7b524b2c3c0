"""Averaged gradients of parameters that every rank holds whole, where no wrapper averages them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from meshwright.distributed.members import members_of
from meshwright.distributed.transport import reduced
from meshwright.runtime import tensor_mesh

_AVERAGED = "_meshwright_averaged"


def average_gradients(parameters: Iterable[nn.Parameter], num_ranks: int) -> list[nn.Parameter]:
    """Averages gradients over all ranks as backward accumulates them, from now on; twice for none.

    Args:
        parameters: Equal on all ranks, and used by all of them: plain, or sharded and alike on all tensor ranks, over
            which they are averaged then.
        num_ranks: Ranks in the world; 1 averages nothing.

    Returns:
        The frozen ones among them: a hook needs a parameter that trains.
    """

    def average(parameter: torch.Tensor) -> None:
        # Averaging what is already an average changes nothing, so accumulated gradients stay right.
        assert parameter.grad is not None
        if is_alike_on_tensor_ranks(parameter):
            assert isinstance(parameter.grad, DTensor)
            local = parameter.grad.to_local()
            local.copy_(reduced(local, "avg", members_of(tensor_mesh())))
            return
        parameter.grad /= num_ranks
        dist.all_reduce(parameter.grad)

    if num_ranks == 1:
        return []
    frozen = []
    for parameter in parameters:
        if not parameter.requires_grad:
            frozen.append(parameter)
        elif not hasattr(parameter, _AVERAGED):
            parameter.register_post_accumulate_grad_hook(average)
            setattr(parameter, _AVERAGED, True)
    return frozen


def is_alike_on_tensor_ranks(parameter: torch.Tensor) -> bool:
    """Whether a sharded parameter exists once per tensor rank: FSDP2 reduces its gradient along the other axis only."""
    return isinstance(parameter, DTensor) and parameter.placements[1:] == (Replicate(),)
