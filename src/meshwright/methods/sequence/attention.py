"""Attention over all tokens where each rank has a part of them: tokens are exchanged for heads and back.

Ulysses (Jacobs et al. 2023, DeepSpeed-Ulysses): queries, keys and values (batch, heads, tokens / n, features) become
(batch, heads / n, tokens, features) in one all-to-all; attention runs as ever; its output goes back in another.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from meshwright.errors import ModelError
from meshwright.methods.sequence.calls import TokenRanks, check_among_parts, check_mask
from meshwright.methods.sequence.order import TokenOrder
from meshwright.methods.tensor.exchange import TensorAxis
from meshwright.runtime.function import Function

METHOD = "sequence_parallel"


class SequenceRanks(TokenRanks):
    """Ranks that exchange tokens for heads; gradients pass through it.

    Args:
        axis: The mesh axis.
        ring: Ranks of the context axis, whose ring goes around these: together they have all tokens.
    """

    axis: ClassVar[str] = "sequence"

    def __init__(self, axis: TensorAxis, ring: int = 1) -> None:
        self._axis, self._ring = axis, ring
        self.order = TokenOrder(METHOD, axis.size, axis.index)

    def exchange(self, parts: torch.Tensor) -> torch.Tensor:
        """All-to-all of ``parts`` (n, elements): row r goes to rank r, and row r of the result is from rank r."""
        arrived: torch.Tensor = _Exchange.apply(parts, self._axis.group)
        return arrived

    def gather(self, hidden: torch.Tensor) -> torch.Tensor:
        """One all-gather; a reduce-scatter in backward."""
        return self._axis.gather_tokens(hidden)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """See :meth:`TokenRanks.attend`; the axis must divide the heads."""
        n = self.order.size
        check_among_parts(query, key, value, METHOD)
        check_heads(query, n)
        if attn_mask is not None:
            check_mask(attn_mask, query.shape[2] * n * self._ring, METHOD)
            attn_mask = self._own_heads(attn_mask, query.shape[1])
        if key.shape[1] % n:  # groups would be torn
            key, value = _ungrouped(query, key, value)
        q, k, v = self._heads_of_tokens((query, key, value))
        if attn_mask is not None and k.shape[1] != q.shape[1] and self._ring == 1:
            k, v = _ungrouped(q, k, v)  # torch has no fast kernel for both groups and masks on CUDA
        output = scaled_dot_product_attention(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa and k.shape[1] != q.shape[1]
        )
        return self._tokens_of_heads(output)

    def _heads_of_tokens(self, tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """Exchanges tokens for heads, all tensors in one message."""
        n = self.order.size
        # (n, batch, heads / n, tokens / n, features)
        parts = [tensor.unflatten(1, (n, -1)).transpose(0, 1) for tensor in tensors]
        arrived = self.exchange(torch.cat([part.flatten(1) for part in parts], 1))
        rows = arrived.split([part[0].numel() for part in parts], 1)
        return [
            row.unflatten(1, part.shape[1:]).permute(1, 2, 0, 3, 4).flatten(2, 3)
            for row, part in zip(rows, parts, strict=True)
        ]

    def _tokens_of_heads(self, output: torch.Tensor) -> torch.Tensor:
        # (n, batch, heads / n, tokens / n, features)
        parts = output.unflatten(2, (self.order.size, -1)).permute(2, 0, 1, 3, 4)
        arrived = self.exchange(parts.flatten(1))
        return arrived.unflatten(1, parts.shape[1:]).transpose(0, 1).flatten(1, 2)

    def _own_heads(self, mask: torch.Tensor, heads: int) -> torch.Tensor:
        if mask.dim() < 3 or mask.shape[-3] == 1:
            return mask
        own = heads // self.order.size
        return mask.narrow(-3, own * self.order.index, own)


class _Exchange(Function):
    """Its own backward: what row r became of came from rank r."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return _all_to_all(gradient, ctx.group), None


def _all_to_all(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    arrived = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(arrived, parts.contiguous(), group=group)
    return arrived


def _ungrouped(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values with one head for each of the query's."""
    return (
        key.repeat_interleave(query.shape[1] // key.shape[1], 1),
        value.repeat_interleave(query.shape[1] // value.shape[1], 1),
    )


def check_heads(query: torch.Tensor, ranks: int) -> None:
    """Refuses queries (batch, heads, …) whose heads the axis does not divide.

    Raises:
        ModelError: Alike on every rank of the axis.
    """
    if query.shape[1] % ranks:
        raise ModelError(
            "sequence_parallel: the axis does not divide the attention heads, which it exchanges for tokens",
            expected=f"a multiple of {ranks} heads",
            got=str(query.shape[1]),
            fix="use a smaller sequence axis in parallel_mode, or context_parallel, which divides no heads",
        )
