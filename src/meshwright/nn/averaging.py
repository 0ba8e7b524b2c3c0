"""Averaged gradients of parameters that every rank holds whole, where no wrapper averages them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

_AVERAGED = "_meshwright_averaged"


def average_gradients(
    parameters: Iterable[nn.Parameter], num_ranks: int, group: dist.ProcessGroup | None = None
) -> list[nn.Parameter]:
    """Averages gradients over ranks as backward accumulates them, from now on; twice for none.

    Args:
        parameters: Equal on all ranks, and used by all of them.
        num_ranks: Ranks in the group; 1 averages nothing.
        group: None for the world.

    Returns:
        The frozen ones among them: a hook needs a parameter that trains.
    """

    def average(parameter: torch.Tensor) -> None:
        # Averaging what is already an average changes nothing, so accumulated gradients stay right.
        assert parameter.grad is not None
        parameter.grad /= num_ranks
        dist.all_reduce(parameter.grad, group=group)

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
