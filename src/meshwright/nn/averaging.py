"""Averaged gradients of parameters that every rank holds whole, where no wrapper averages them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed.tensor import DTensor, Replicate

from meshwright.distributed.members import members_of
from meshwright.distributed.transport import reduced
from meshwright.optim import local_tensor
from meshwright.optim.layouts import by_kind
from meshwright.runtime import tensor_mesh

_AVERAGED = "_meshwright_averaged"


class _TensorAverager:
    """Averages over the tensor group what a backward pass has reduced over the other axis: all of it at its end.

    These are the many small parameters, norms and biases, that a collective each would hardly be worth.
    """

    def __init__(self) -> None:
        self._backward = -1  # the pass that the parameters below belong to: one that failed leaves some behind
        self._waiting: dict[int, torch.Tensor] = {}  # parameters by identity

    def take(self, parameter: torch.Tensor) -> None:
        """Notes a parameter whose gradient is there; a hook after accumulation."""
        backward = torch._C._current_graph_task_id()
        if self._backward != backward:
            self._backward, self._waiting = backward, {}
            # Behind FSDP2's own callback, which waits for its streams.
            Variable._execution_engine.queue_callback(self._average)
        self._waiting[id(parameter)] = parameter

    @torch.no_grad()
    def _average(self) -> None:
        waiting, self._waiting, self._backward = list(self._waiting.values()), {}, -1
        for gradients in by_kind(local_tensor(each.grad) for each in waiting if each.grad is not None):
            flat = reduced(torch.cat([gradient.flatten() for gradient in gradients]), "avg", members_of(tensor_mesh()))
            for gradient, average in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
                gradient.copy_(average.view_as(gradient))


_at_end_of_backward = _TensorAverager()


def average_gradients(
    parameters: Iterable[nn.Parameter], num_ranks: int, group: dist.ProcessGroup | None = None
) -> list[nn.Parameter]:
    """Averages gradients over ranks as backward accumulates them, from now on; twice for none.

    Args:
        parameters: Equal on all ranks, and used by all of them: plain, or sharded and alike on all tensor ranks, over
            which they are averaged then.
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
            alike = is_alike_on_tensor_ranks(parameter)
            parameter.register_post_accumulate_grad_hook(_at_end_of_backward.take if alike else average)
            setattr(parameter, _AVERAGED, True)
    return frozen


def is_alike_on_tensor_ranks(parameter: torch.Tensor) -> bool:
    """Whether a sharded parameter exists once per tensor rank: FSDP2 reduces its gradient along the other axis only."""
    return isinstance(parameter, DTensor) and parameter.placements[1:] == (Replicate(),)
