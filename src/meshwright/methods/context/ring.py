"""Attention while keys and values travel around a ring of ranks (Liu et al. 2023, Ring Attention).

Each rank keeps its queries. In each of n steps it attends to the keys and values it holds, while it passes them on to
the next rank and those of the rank before arrive. Partial outputs are merged by their log-sum-exp. In backward keys and
values travel again, and their gradients with them, one step behind, until they are home.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from meshwright.methods.context.kernels import Block
from meshwright.methods.context.visible import Table, View, view_of
from meshwright.methods.sequence.order import TokenOrder
from meshwright.runtime.function import Function

Arriving = Callable[[], list[torch.Tensor]]
"""Waits for what is on its way."""


class Ring(Protocol):
    """The ranks of the ring."""

    order: TokenOrder

    def pass_on(self, tensors: list[torch.Tensor]) -> Arriving:
        """Starts sending tensors to the next rank, and receiving the like from the one before."""


class _Merged:
    """Outputs of some queries over the keys seen so far, and their log-sum-exp, in fp32 (fp64 where the inputs are)."""

    def __init__(self, query: torch.Tensor, features: int) -> None:
        batch, heads, tokens, _ = query.shape
        dtype = _wide(query)
        # Laid out as (batch, tokens, heads, features): what goes on with heads side by side needs no copy.
        self.out = query.new_zeros((batch, tokens, heads, features), dtype=dtype).transpose(1, 2)
        self.lse = query.new_full((batch, heads, tokens), -torch.inf, dtype=dtype)

    def add(self, rows: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merges the outputs of ``rows`` over further keys."""
        so_far, known = self.out[:, :, rows], self.lse[:, :, rows]
        total = torch.logaddexp(known, lse)
        finite = total.masked_fill(total == -torch.inf, 0)  # rows that have seen nothing stay 0
        so_far.mul_((known - finite).exp().unsqueeze(-1)).add_(out * (lse - finite).exp().unsqueeze(-1))
        known.copy_(total)


class RingAttention(Function):
    """Of (batch, heads, tokens / n, features) and keys and values of as many tokens, to all tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        ring: Ring,
        table: Table | None,
        is_causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        """``mask`` is for all tokens; ``table`` tells what can be skipped, None: nothing."""
        ctx.ring, ctx.table, ctx.is_causal, ctx.scale = ring, table, is_causal, scale
        merged, held, order = _Merged(query, value.shape[-1]), [key, value], ring.order
        for step in range(order.size):
            arriving = ring.pass_on(held) if step < order.size - 1 else None
            source = (order.index - step) % order.size
            view = _view(ctx, source, query.shape[2])
            if view is not None:
                merged.add(view.rows, *_block(ctx, view, query, held, mask, source).forward())
            if arriving is not None:
                held = arriving()
        out = merged.out.to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, out, merged.lse)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Gradients of query, key and value."""
        query, key, value, mask, out, lse = ctx.saved_tensors
        gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
        lse = lse.masked_fill(lse == -torch.inf, 0)  # kernels compute with it, also in rows that see nothing
        wide, order = _wide(query), ctx.ring.order
        own, held, returning = torch.zeros_like(query, dtype=wide), [key, value], None
        for step in range(order.size):
            arriving = ctx.ring.pass_on(held) if step < order.size - 1 else None
            source = (order.index - step) % order.size
            view, parts = _view(ctx, source, query.shape[2]), None
            if view is not None:
                rows = [tensor[:, :, view.rows] for tensor in (gradient, out, lse)]
                parts = _block(ctx, view, query, held, mask, source).backward(*rows)
            # Those of this source's keys and values, from the ranks that held them before.
            grads = returning() if returning else [t.new_zeros(t.shape, dtype=wide) for t in held]
            if view is not None and parts is not None:
                own[:, :, view.rows] += parts[0]
                grads[0][:, :, view.columns] += parts[1]
                grads[1][:, :, view.columns] += parts[2]
            returning = ctx.ring.pass_on(grads)
            held = arriving() if arriving is not None else held
        assert returning is not None
        key_gradient, value_gradient = returning()
        return own.to(query.dtype), key_gradient.to(key.dtype), value_gradient.to(value.dtype), *(None,) * 5


def bytes_in_backward(held: list[torch.Tensor], size: int) -> int:
    """What a rank of a ring of ``size`` sends in backward: keys and values once more, and their gradients."""
    elements = sum(tensor.numel() for tensor in held)
    return (size - 1) * elements * held[0].element_size() + size * elements * _wide(held[0]).itemsize


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _view(ctx: Any, source: int, tokens: int) -> View | None:
    if ctx.table is None:
        return View(slice(0, tokens), slice(0, tokens))
    return view_of(ctx.table, ctx.ring.order, source, tokens, is_causal=ctx.is_causal)


def _block(
    ctx: Any, view: View, query: torch.Tensor, held: list[torch.Tensor], mask: torch.Tensor | None, source: int
) -> Block:
    key, value = (tensor[:, :, view.columns] for tensor in held)
    cut = view.additive(mask, ctx.ring.order, source, query.dtype)
    return Block(query[:, :, view.rows], key, value, cut, view.is_causal, ctx.scale)
