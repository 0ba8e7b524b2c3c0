"""A context axis in a trace."""

from __future__ import annotations

from typing import Any

import torch

from meshwright.methods.context.attention import METHOD, ContextRanks
from meshwright.methods.context.ring import Arriving, bytes_in_backward
from meshwright.methods.sequence.order import TokenOrder
from meshwright.methods.sequence.trace import Ledger, tensor_bytes, traced_gather


class TracedContext(ContextRanks):
    """The first rank of a context axis.

    Args:
        size: Of the axis.
        balance: See :class:`TokenOrder`.
        within: See :class:`ContextRanks`.
        note: Told what would be sent.
    """

    def __init__(self, size: int, balance: bool, within: int, note: Ledger) -> None:
        self._note = note
        self._travelling: list[torch.Tensor] = []  # keys and values of the attention that runs
        self.order = TokenOrder(METHOD, size, 0, balance, within)

    def gather(self, hidden: torch.Tensor) -> torch.Tensor:
        """See :func:`traced_gather`."""
        return traced_gather(self, hidden, self._note)

    def pass_on(self, tensors: list[torch.Tensor]) -> Arriving:
        """Notes what is sent; what arrives has the same shapes."""
        self._travelling = tensors
        self._note("context", "send", "forward", sum(map(tensor_bytes, tensors)))
        return lambda: [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]

    def attend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Notes what travels in backward too."""
        out = super().attend(*args, **kwargs)
        if out.requires_grad:
            self._note("context", "send", "backward", bytes_in_backward(self._travelling, self.order.size))
        return out
