"""Compute attention while keys and values travel around a ring of ranks.

Two parts: torch's attention kernels that return the log-sum-exp, so that outputs over several blocks of keys can be
merged; the ring itself. Which chunks of keys a rank's queries see is in ``token_order.py``.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention, cudnn_sdp_enabled

from meshwright.methods.planner_hooks import attending_by
from meshwright.methods.tensor.axis_exchange import as_products
from meshwright.methods.tokens.token_order import (
    Table,
    TokenOrder,
    View,
    causal_table,
    mask_table,
    view_of,
    with_four_dims,
)
from meshwright.runtime.torch_internals.autograd import Function
from meshwright.runtime.torch_internals.fake_tensors import FakeTensor
from meshwright.runtime.torch_internals.operators import (
    cudnn_attention,
    cudnn_attention_backward,
    efficient_attention,
    efficient_attention_backward,
    flash_attention,
    flash_attention_backward,
    flash_attention_on_cpu,
    flash_attention_on_cpu_backward,
)

# --- Attention over one block of keys, by torch's kernels that return the log-sum-exp
#
# Backward of one block takes the output and the log-sum-exp of whole rows, over all keys (Dao et al. 2022, §3.1, and
# Liu et al. 2023, Ring Attention): then the gradients of all blocks add up to those of the whole.

_aten: Any = torch.ops.aten
_FEATURES = 8  # CUDA kernels take multiples of this
_KEYS = 16  # alignment of a mask's rows in the memory-efficient kernel
_QUERIES = 32  # padding of its log-sum-exp
_CUDNN_SINCE = 9  # compute capability from which on cuDNN's kernels are much the fastest: Hopper

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Block:
    """Attention of some queries (batch, heads, queries, features) over some keys and values (batch, groups, keys, …).

    There is no dropout. ``groups`` divides ``heads``. ``mask``, of four dims, is added to the scores; it broadcasts to
    (batch, heads, queries, keys).
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    is_causal: bool
    scale: float | None

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output (batch, heads, queries, features of values) and the log-sum-exp (batch, heads, queries).

        Rows that see no key have the output 0 and the log-sum-exp minus infinity.
        """
        with attending_by("masked" if self.mask is not None else ""):
            out, lse = self._padded()._forward()
        out = out[..., : self.value.shape[-1]]
        if self.mask is None:
            return out, lse
        blind = (self.mask == -torch.inf).all(-1)  # kernels differ in what they return for these rows
        return out.masked_fill(blind.unsqueeze(-1), 0), lse.masked_fill(blind, -torch.inf)

    def _forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.query.device.type == "cpu":
            out, lse = flash_attention_on_cpu(*self.tensors, 0.0, self.is_causal, attn_mask=self.mask, scale=self.scale)
        elif self._takes_cudnn():
            out, lse = self._cudnn_forward()
        elif self._takes_flash():
            out, lse = self._flash_forward()
        else:
            out, lse, *_ = efficient_attention(
                *self._ungrouped(), self._expanded_mask(), True, 0.0, self.is_causal, scale=self.scale
            )
            lse = lse[..., : self.query.shape[2]]
        return out, lse

    def backward(self, gradient: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Gradients:
        """Return the gradients of query, key and value.

        Args:
            gradient: Gradient of the output over all keys.
            out: The output over all keys.
            lse: Its log-sum-exp, finite in every row.
        """
        padded = self._padded()
        gradient, out = (_with_features(tensor, padded.value.shape[-1]) for tensor in (gradient, out))
        with attending_by("masked" if self.mask is not None else ""):
            grads = padded._backward(gradient, out, lse.contiguous())
        return tuple(g[..., : t.shape[-1]] for g, t in zip(grads, self.tensors, strict=True))  # type: ignore[return-value]

    def _backward(self, gradient: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Gradients:
        if self.query.device.type == "cpu":
            grads: Gradients = flash_attention_on_cpu_backward(
                gradient, *self.tensors, out, lse, 0.0, self.is_causal, attn_mask=self.mask, scale=self.scale
            )
            return grads
        if self._takes_cudnn():
            return self._cudnn_backward(gradient, out, lse)
        return (self._flash_backward if self._takes_flash() else self._efficient_backward)(gradient, out, lse)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    def _padded(self) -> Block:
        """Pad features with zeros, which add nothing, to one number that the kernels take."""
        features = max(self.query.shape[-1], self.value.shape[-1])
        if self.query.device.type != "cpu":
            features = -(-features // _FEATURES) * _FEATURES
        scale = self.query.shape[-1] ** -0.5 if self.scale is None else self.scale
        query, key, value = (_with_features(tensor, features) for tensor in self.tensors)
        return Block(query, key, value, self.mask, self.is_causal, scale)

    @property
    def _is_grouped(self) -> bool:
        return self.query.shape[1] != self.key.shape[1]

    def _takes_flash(self) -> bool:
        if self.mask is not None:
            return False
        return can_use_flash_attention(SDPAParams(*self.tensors, None, 0.0, self.is_causal, self._is_grouped))

    def _takes_cudnn(self) -> bool:
        """Return whether cuDNN computes it, as torch's own attention does on the same devices."""
        query, kind = self.query, (self._is_grouped, self.is_causal)
        if self.mask is not None or query.dtype == torch.float32 or not (cudnn_sdp_enabled() and self._takes_flash()):
            return False
        if not can_use_cudnn_attention(SDPAParams(*self.tensors, None, 0.0, self.is_causal, self._is_grouped)):
            return False
        if torch.cuda.get_device_capability(query.device)[0] < _CUDNN_SINCE:
            return False
        return isinstance(query, FakeTensor) or _cudnn_agrees(query.device, query.dtype, query.shape[-1], *kind)

    def _cudnn_forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = cudnn_attention(*self.tensors, None, True, 0.0, self.is_causal, scale=self.scale)
        return out, lse.view(out.shape[:3])

    def _cudnn_backward(self, gradient: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Gradients:
        unused = torch.zeros((), dtype=torch.int64)  # random state of dropout
        grads: Gradients = cudnn_attention_backward(
            gradient, *self.tensors, out, lse.unsqueeze(-1), unused, unused, None, None, None, self.query.shape[2],
            self.key.shape[2], 0.0, self.is_causal, scale=self.scale,
        )  # fmt: skip
        return grads

    def _flash_forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = flash_attention(*self.tensors, 0.0, self.is_causal, False, scale=self.scale)
        return out, lse

    def _flash_backward(self, gradient: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Gradients:
        unused = torch.empty(2, dtype=torch.uint64, device=self.query.device)  # random state of dropout
        grads: Gradients = flash_attention_backward(
            gradient, *self.tensors, out, lse, None, None, self.query.shape[2], self.key.shape[2], 0.0, self.is_causal,
            unused, unused, scale=self.scale,
        )  # fmt: skip
        return grads

    def _efficient_backward(self, gradient: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Gradients:
        unused = torch.zeros((), dtype=torch.int64)  # random state of dropout, on the host for this kernel
        lse = F.pad(lse, (0, -lse.shape[-1] % _QUERIES), value=torch.inf)
        query, key, value, _ = efficient_attention_backward(
            gradient, *self._ungrouped(), self._expanded_mask(), out, lse, unused, unused, 0.0,
            [True, True, True, False], self.is_causal, scale=self.scale,
        )  # fmt: skip
        groups = self.key.shape[1]
        return query, *(t.unflatten(1, (groups, -1)).sum(2, dtype=torch.float32) for t in (key, value))

    def _ungrouped(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        times = self.query.shape[1] // self.key.shape[1]
        if times == 1:
            return self.tensors
        return self.query, self.key.repeat_interleave(times, 1), self.value.repeat_interleave(times, 1)

    def _expanded_mask(self) -> torch.Tensor | None:
        if self.mask is None:
            return None
        keys = self.key.shape[2]
        aligned = F.pad(self.mask.contiguous(), (0, -keys % _KEYS))[..., :keys]
        return aligned.expand(*self.query.shape[:3], keys)


@functools.cache
def _cudnn_agrees(device: torch.device, dtype: torch.dtype, features: int, grouped: bool, is_causal: bool) -> bool:
    """Return whether cuDNN's kernels say what FlashAttention's do of a few random tokens; asked once for each kind.

    Its results and its log-sum-exp are no public function of torch's. Where they are others than what is needed here,
    or cannot be had, FlashAttention computes attention, and a warning says so: plans count on cuDNN's speed.
    """
    generator, tokens, heads = torch.Generator().manual_seed(0), 128, 4
    shapes = [(1, tokens, count, features) for count in (heads, *[heads // 2 if grouped else heads] * 2, heads)]
    with torch.no_grad():
        drawn = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
        query, key, value, gradient = (each.transpose(1, 2) for each in drawn)  # as models lay them out
        key, value = key.contiguous(), value.contiguous()  # as they travel
        block = Block(query, key, value, None, is_causal, features**-0.5)
        out, lse = block._flash_forward()
        more = lse + 0.5  # of more keys, as in a ring
        try:
            found = *block._cudnn_forward(), *block._cudnn_backward(gradient, out, more)
        except RuntimeError as error:
            return _not_cudnn(str(error).partition("\n")[0])
        expected = out, lse, *block._flash_backward(gradient, out, more)
    agrees = all(_close(mine, other) for mine, other in zip(found, expected, strict=True))
    return agrees or _not_cudnn("its results are others")


def _not_cudnn(reason: str) -> bool:
    warnings.warn(
        f"FlashAttention computes ring attention in place of cuDNN, about half as fast as plans say: {reason}",
        stacklevel=2,
    )
    return False


def _close(mine: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((mine - other).float().abs().max() <= 2e-2 * other.float().abs().max())


def _with_features(tensor: torch.Tensor, features: int) -> torch.Tensor:
    return F.pad(tensor, (0, features - tensor.shape[-1])) if tensor.shape[-1] < features else tensor


# --- The ring (Liu et al. 2023, Ring Attention)
#
# Each rank keeps its queries. In each of n steps it attends to the keys and values it has, while it sends them to the
# next rank and receives those of the rank before. Partial outputs are merged by their log-sum-exp. In backward keys and
# values travel once more, and their gradients follow one step behind, until they arrive at their own rank.

Arriving = Callable[[], list[torch.Tensor]]
"""Waits for the tensors that are on their way and returns them."""


class Ring(Protocol):
    """The ranks of the ring."""

    order: TokenOrder

    def pass_on(self, tensors: list[torch.Tensor]) -> Arriving:
        """Start sending tensors to the next rank and receiving tensors of the same shapes from the one before."""


def outputs_of(query: torch.Tensor, features: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for an output over all keys, of so many features, and its log-sum-exp.

    Laid out as (batch, tokens, heads, features): concatenating the heads afterwards needs no copy.
    """
    batch, heads, tokens, _ = query.shape
    out = query.new_empty((batch, tokens, heads, features), dtype=_wide(query)).transpose(1, 2)
    return out, query.new_empty((batch, heads, tokens), dtype=_wide(query))


class _Merged:
    """Outputs over the keys seen so far, and their log-sum-exp, in fp32 (fp64 for fp64 inputs)."""

    def __init__(self, query: torch.Tensor, features: int) -> None:
        self.out, self.lse = outputs_of(query, features)
        self._is_empty = True

    def add(self, rows: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge the outputs of ``rows`` over further keys."""
        if self._is_empty and rows == slice(0, self.out.shape[2]):
            self.out.copy_(out)
            self.lse.copy_(lse)
            self._is_empty = False
            return
        self.fill()
        so_far, known = self.out[:, :, rows], self.lse[:, :, rows]
        total = torch.logaddexp(known, lse)
        finite = total.masked_fill(total == -torch.inf, 0)  # rows that have seen nothing stay 0
        so_far.mul_((known - finite).exp().unsqueeze(-1)).addcmul_(out, (lse - finite).exp().unsqueeze(-1))
        known.copy_(total)

    def fill(self) -> None:
        """Let rows that have seen nothing be 0, if none has seen anything."""
        if self._is_empty:
            self.out.zero_()
            self.lse.fill_(-torch.inf)
        self._is_empty = False

    def add_sinks(self, sinks: torch.Tensor) -> None:
        """Merge one more key for every head, whose score is the head's sink and whose value is zero."""
        self.fill()
        total = torch.logaddexp(self.lse, sinks.to(self.lse.dtype)[:, None])
        finite = total.masked_fill(total == -torch.inf, 0)  # rows that have seen nothing stay 0
        self.out.mul_((self.lse - finite).exp().unsqueeze(-1))
        self.lse.copy_(total)


class _Sum:
    """A sum of gradients in fp32 (fp64 for fp64) of a tensor (batch, heads, tokens, features).

    Args:
        like: The tensor.
        known: The sum so far, which is added to in place; None: nothing yet.
        travels: Whether it will be sent, as contiguous tensors are.
    """

    def __init__(self, like: torch.Tensor, known: torch.Tensor | None = None, *, travels: bool = False) -> None:
        self._like, self._known = like, known
        self._layout = torch.contiguous_format if travels else torch.preserve_format

    def add(self, rows: slice, part: torch.Tensor) -> None:
        """Add gradients of some rows."""
        if self._known is None and rows == slice(0, self._like.shape[2]):
            self._known = part.to(_wide(part), memory_format=self._layout)
        else:
            # Not ``+=``, which would copy the rows to where they are.
            self.value()[:, :, rows].add_(part)

    def value(self) -> torch.Tensor:
        """Return the sum."""
        if self._known is None:
            self._known = torch.zeros_like(self._like, dtype=_wide(self._like), memory_format=self._layout)
        return self._known


@dataclass(frozen=True)
class AttentionOver:
    """Compute attention of a rank's queries over the keys and values of a ring.

    ``mask`` is for all ``tokens``, and ``sinks`` (heads) are scores that join each softmax and bring no value (Xiao et
    al. 2023; GPT-OSS).
    """

    ring: Ring
    table: Table | None  # what can be skipped; None: nothing
    is_causal: bool
    scale: float | None
    tokens: int

    @classmethod
    def of(
        cls,
        ring: Ring,
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None,
        is_causal: bool,
        scale: float | None,
        tokens: int,
    ) -> AttentionOver:
        """Return what is computed under a mask (…, tokens or 1, tokens)."""
        if ring.order.size == 1:  # nothing to skip: no need to read the mask, for which a host waits
            return cls(ring, None, is_causal, scale, tokens)
        table = causal_table(ring.order) if is_causal else None
        if mask is not None:
            # Beside sinks a query that sees nothing gets zeros, whether it was the lowest number that hid it, or
            # infinity.
            lowest = mask.is_floating_point() and sinks is not None
            table = mask_table(mask, ring.order, torch.finfo(mask.dtype).min if lowest else -torch.inf)
        return cls(ring, table, is_causal, scale, tokens)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output and the log-sum-exp."""
        merged, pair, order = _Merged(query, value.shape[-1]), [key, value], self.ring.order
        for step in range(order.size):
            arriving = self.ring.pass_on(pair) if step < order.size - 1 else None
            source = (order.index - step) % order.size
            view = self._view(source, query, key)
            if view is not None:
                merged.add(view.rows, *self._block(view, query, pair, mask, source).forward())
            if arriving is not None:
                pair = arriving()
        if sinks is not None:
            merged.add_sinks(sinks)
        merged.fill()
        return merged.out.to(query.dtype), merged.lse

    def backward(
        self,
        gradient: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
        *,
        trains_sinks: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the gradients of query, key, value and, if it is trained, sinks."""
        gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
        lse = lse.masked_fill(lse == -torch.inf, 0)  # kernels compute with it even in rows that see no key
        order = self.ring.order
        own, pair, returning = _Sum(query), [key, value], None
        for step in range(order.size):
            arriving = self.ring.pass_on(pair) if step < order.size - 1 else None
            source = (order.index - step) % order.size
            view, parts = self._view(source, query, key), None
            if view is not None:
                rows = [tensor[:, :, view.rows] for tensor in (gradient, out, lse)]
                parts = self._block(view, query, pair, mask, source).backward(*rows)
            # Gradients of this source's keys and values, summed by the ranks that had them before.
            before = returning() if returning else [None, None]
            sums = [_Sum(tensor, known, travels=True) for tensor, known in zip(pair, before, strict=True)]
            if view is not None and parts is not None:
                own.add(view.rows, parts[0])
                for each, part in zip(sums, parts[1:], strict=True):
                    each.add(view.columns, part)
            del parts
            returning = self.ring.pass_on([each.value() for each in sums])
            pair = arriving() if arriving is not None else pair
        assert returning is not None
        key_gradient, value_gradient = returning()
        # Laid out as the tensors are, so that turning the heads back needs no copy.
        of_key, of_value = torch.empty_like(key).copy_(key_gradient), torch.empty_like(value).copy_(value_gradient)
        of_sinks = _sinks_gradient(sinks, gradient, out, lse) if sinks is not None and trains_sinks else None
        return own.value().to(query.dtype), of_key, of_value, of_sinks

    def _view(self, source: int, query: torch.Tensor, key: torch.Tensor) -> View | None:
        """Return the view of the keys of rank ``source``; each rank has as many tokens, some of them padding."""
        order, part = self.ring.order, query.shape[2]
        if order.size == 1:  # whose queries may be others than its keys, as beside a cache
            return View(slice(0, part), slice(0, key.shape[2]), self.is_causal)
        view: View | None = View(slice(0, part), slice(0, part))
        if self.table is not None:
            view = view_of(self.table, order, source, part, is_causal=self.is_causal)
        return view and view.without_padding(order.real(self.tokens), order.at(source).real(self.tokens))

    def _block(
        self, view: View, query: torch.Tensor, pair: list[torch.Tensor], mask: torch.Tensor | None, source: int
    ) -> Block:
        key, value = (tensor[:, :, view.columns] for tensor in pair)
        cut = view.additive(mask, self.ring.order, source, query.dtype)
        return Block(query[:, :, view.rows], key, value, cut, view.is_causal, self.scale)


def _sinks_gradient(sinks: torch.Tensor, gradient: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Return the gradient of sinks, each a key whose value is zero: what it takes from the others' weights."""
    wide = lse.dtype
    share = (sinks.to(wide)[:, None] - lse).exp()  # (batch, heads, queries)
    taken: torch.Tensor = -(share * (gradient.to(wide) * out).sum(-1)).sum((0, 2))
    return taken.to(sinks.dtype)


def attend_in_ring(
    ring: Ring,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    tokens: int,
    *,
    is_causal: bool,
    scale: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend to the keys and values of all ranks, in autocast's precision; ``mask`` is for all ``tokens``."""
    attention = AttentionOver.of(ring, mask, sinks, is_causal, scale, tokens)
    mask = with_four_dims(mask) if mask is not None else None
    query, key, value = map(as_products, (query, key, value))
    out: torch.Tensor = RingAttention.apply(query, key, value, mask, sinks, attention)
    return out


class RingAttention(Function):
    """Attention of queries (batch, heads, tokens / n, features) over the keys and values of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None,
        attention: AttentionOver,
    ) -> torch.Tensor:
        """Return the output; ``mask`` has four dims."""
        ctx.attention = attention
        out, lse = attention.forward(query, key, value, mask, sinks)
        ctx.save_for_backward(query, key, value, mask, sinks, out, lse)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradients of query, key, value and sinks."""
        trained = ctx.needs_input_grad[4]
        query, key, value, of_sinks = ctx.attention.backward(gradient, *ctx.saved_tensors, trains_sinks=trained)
        return query, key, value, None, of_sinks, None


class Alone:
    """A ring of one rank."""

    order = TokenOrder("", 1, 0)

    def pass_on(self, tensors: list[torch.Tensor]) -> Arriving:
        """Return the tensors."""
        return lambda: tensors


def bytes_in_backward(pair: list[torch.Tensor], size: int) -> int:
    """Return the bytes that a rank of a ring sends in backward: keys and values once more, and their gradients."""
    elements = sum(tensor.numel() for tensor in pair)
    return (size - 1) * elements * pair[0].element_size() + size * elements * _wide(pair[0]).itemsize


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
