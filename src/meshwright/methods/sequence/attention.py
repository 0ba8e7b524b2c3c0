"""Attention over all tokens where each rank has a part of them: tokens are exchanged for heads and back.

Ulysses (Jacobs et al. 2023, DeepSpeed-Ulysses): queries, keys and values (batch, heads, tokens / n, features) become
(batch, heads / n, tokens, features) in one all-to-all; attention runs as ever; its output goes back in another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from meshwright.errors import ModelError
from meshwright.methods.tensor.exchange import TensorAxis

Attend = Callable[..., torch.Tensor]


class SequenceRanks:
    """The ranks that hold the parts of one sequence, and what they send each other; gradients pass through it.

    Args:
        axis: The mesh axis.
    """

    def __init__(self, axis: TensorAxis) -> None:
        self._axis = axis
        self.size, self.index = axis.size, axis.index

    def exchange(self, parts: torch.Tensor) -> torch.Tensor:
        """All-to-all of ``parts`` (n, elements): row r goes to rank r, and row r of the result is from rank r."""
        arrived: torch.Tensor = _Exchange.apply(parts, self._axis.group)
        return arrived

    def gather(self, hidden: torch.Tensor) -> torch.Tensor:
        """All tokens of (batch, tokens / n, features); backward sums gradients, and every rank gets its part."""
        return self._axis.gather_tokens(hidden)


class _Exchange(torch.autograd.Function):
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


class AttentionCalls(TorchFunctionMode):
    """While it is entered, ``attend`` answers every call of ``scaled_dot_product_attention``, wherever it is made.

    Attributes:
        count: How many there were.
    """

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self._attend = attend
        self.count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Iterable[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs any other function as it is."""
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.count += 1
        return self._attend(*args, **(kwargs or {}))


def attend_over_heads(
    ranks: SequenceRanks,
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
    """``scaled_dot_product_attention`` of a part of the tokens to all of them.

    Args:
        ranks: Who has the others.
        query: (batch, heads, tokens / n, features).
        key: (batch, heads, tokens / n, features); fewer heads with ``enable_gqa``.
        value: Like ``key``.
        attn_mask: For all tokens, as on one device: (…, tokens or 1, tokens).
        dropout_p: As in torch.
        is_causal: As in torch.
        scale: As in torch.
        enable_gqa: As in torch.

    Returns:
        (batch, heads, tokens / n, features of ``value``).

    Raises:
        ModelError: When shapes are not these, or the axis does not divide the heads.
    """
    _check_shapes(query, key, value, ranks.size)
    if key.shape[1] % ranks.size:  # groups would be torn
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    mask = _own_heads(attn_mask, query, ranks) if attn_mask is not None else None
    q, k, v = _heads_of_tokens((query, key, value), ranks)
    output = scaled_dot_product_attention(
        q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa and k.shape[1] != q.shape[1]
    )
    return _tokens_of_heads(output, ranks)


def _heads_of_tokens(tensors: tuple[torch.Tensor, ...], ranks: SequenceRanks) -> list[torch.Tensor]:
    """Exchanges tokens for heads, all tensors in one message."""
    n = ranks.size
    parts = [t.unflatten(1, (n, -1)).transpose(0, 1) for t in tensors]  # (n, batch, heads / n, tokens / n, features)
    arrived = ranks.exchange(torch.cat([part.flatten(1) for part in parts], 1))
    rows = arrived.split([part[0].numel() for part in parts], 1)
    return [
        row.unflatten(1, part.shape[1:]).permute(1, 2, 0, 3, 4).flatten(2, 3)
        for row, part in zip(rows, parts, strict=True)
    ]


def _tokens_of_heads(output: torch.Tensor, ranks: SequenceRanks) -> torch.Tensor:
    parts = output.unflatten(2, (ranks.size, -1)).permute(2, 0, 1, 3, 4)  # (n, batch, heads / n, tokens / n, features)
    arrived = ranks.exchange(parts.flatten(1))
    return arrived.unflatten(1, parts.shape[1:]).transpose(0, 1).flatten(1, 2)


def _own_heads(mask: torch.Tensor, query: torch.Tensor, ranks: SequenceRanks) -> torch.Tensor:
    tokens, heads = query.shape[2] * ranks.size, query.shape[1]
    if mask.shape[-1] != tokens or (mask.dim() > 1 and mask.shape[-2] not in (1, tokens)):
        raise ModelError(
            "sequence_parallel: an attention mask does not cover all tokens",
            expected=f"a mask (…, {tokens} or 1, {tokens}), made outside the blocks or for all tokens",
            got=str(tuple(mask.shape)),
            fix="make the mask before the first block, or use is_causal=True",
        )
    if mask.dim() < 3 or mask.shape[-3] == 1:
        return mask
    return mask.narrow(-3, heads // ranks.size * ranks.index, heads // ranks.size)


def _check_shapes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ranks: int) -> None:
    """Alike on every rank of the axis: their parts have the same shape."""
    shapes = [tuple(tensor.shape) for tensor in (query, key, value)]
    if any(len(shape) != 4 for shape in shapes) or len({(shape[0], shape[2]) for shape in shapes}) > 1:
        raise ModelError(
            "sequence_parallel: attention is not among the tokens that the ranks have parts of",
            expected="queries, keys and values (batch, heads, tokens, features) of the same tokens",
            got=", ".join(map(str, shapes)),
            fix="use fsdp or tensor_parallel; cross-attention is not covered",
        )
    check_heads(query, ranks)


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
            fix="use a smaller sequence axis in parallel_mode",
        )
