"""torch's attention kernels that return the log-sum-exp, so that attention can be put together block by block.

Backward of one block takes the output and the log-sum-exp of the whole row (Dao et al. 2022, §3.1, and Liu et al. 2023,
Ring Attention): then the gradients of all blocks add up to those of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.backends.cuda import SDPAParams, can_use_flash_attention

_aten: Any = torch.ops.aten
_FEATURES = 8  # CUDA kernels take multiples of it
_KEYS = 16  # the memory-efficient kernel wants rows of masks aligned so
_QUERIES = 32  # it pads the log-sum-exp so

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Block:
    """Some queries (batch, heads, queries, features) and some keys and values (batch, groups, keys, features).

    Without dropout. ``groups`` divides ``heads``. ``mask``, of four dims, is added; it broadcasts to (batch, heads,
    queries, keys).
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    is_causal: bool
    scale: float | None

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The output (as queries, features of values), and the log-sum-exp (batch, heads, queries) of its scores.

        Rows that see no key have the output 0 and the log-sum-exp minus infinity.
        """
        padded = self._padded()
        if self.query.device.type == "cpu":
            out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
                *padded.tensors, 0.0, self.is_causal, attn_mask=self.mask, scale=padded.scale
            )
        elif padded._takes_flash():
            out, lse, *_ = _aten._scaled_dot_product_flash_attention(
                *padded.tensors, 0.0, self.is_causal, False, scale=padded.scale
            )
        else:
            out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
                *padded._ungrouped(), padded._expanded_mask(), True, 0.0, self.is_causal, scale=padded.scale
            )
            lse = lse[..., : self.query.shape[2]]
        out = out[..., : self.value.shape[-1]]
        if self.mask is None:
            return out, lse
        blind = (self.mask == -torch.inf).all(-1)  # kernels do not agree on what these rows are
        return out.masked_fill(blind.unsqueeze(-1), 0), lse.masked_fill(blind, -torch.inf)

    def backward(self, gradient: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Gradients:
        """Gradients of query, key and value.

        Args:
            gradient: Of the output of whole rows.
            out: This output.
            lse: Its log-sum-exp, finite in every row.
        """
        padded = self._padded()
        gradient, out = (_with_features(tensor, padded.value.shape[-1]) for tensor in (gradient, out))
        lse = lse.contiguous()
        if self.query.device.type == "cpu":
            grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient, *padded.tensors, out, lse, 0.0, self.is_causal, attn_mask=self.mask, scale=padded.scale
            )
        elif padded._takes_flash():
            grads = padded._flash_backward(gradient, out, lse)
        else:
            grads = padded._efficient_backward(gradient, out, lse)
        return tuple(g[..., : t.shape[-1]] for g, t in zip(grads, self.tensors, strict=True))  # type: ignore[return-value]

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    def _padded(self) -> Block:
        """The same with features of one number that the kernels take; zeros add nothing."""
        features = max(self.query.shape[-1], self.value.shape[-1])
        if self.query.device.type != "cpu":
            features = -(-features // _FEATURES) * _FEATURES
        scale = self.query.shape[-1] ** -0.5 if self.scale is None else self.scale
        query, key, value = (_with_features(tensor, features) for tensor in self.tensors)
        return Block(query, key, value, self.mask, self.is_causal, scale)

    def _takes_flash(self) -> bool:
        if self.mask is not None:
            return False
        grouped = self.query.shape[1] != self.key.shape[1]
        return can_use_flash_attention(SDPAParams(*self.tensors, None, 0.0, self.is_causal, grouped))

    def _flash_backward(self, gradient: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Gradients:
        unused = torch.empty(2, dtype=torch.uint64, device=self.query.device)  # the state of a dropout
        grads: Gradients = _aten._scaled_dot_product_flash_attention_backward(
            gradient, *self.tensors, out, lse, None, None, self.query.shape[2], self.key.shape[2], 0.0, self.is_causal,
            unused, unused, scale=self.scale,
        )  # fmt: skip
        return grads

    def _efficient_backward(self, gradient: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Gradients:
        unused = torch.zeros((), dtype=torch.int64)  # the state of a dropout, which lies on the host
        lse = F.pad(lse, (0, -lse.shape[-1] % _QUERIES), value=torch.inf)
        query, key, value, _ = _aten._scaled_dot_product_efficient_attention_backward(
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


def _with_features(tensor: torch.Tensor, features: int) -> torch.Tensor:
    return F.pad(tensor, (0, features - tensor.shape[-1])) if tensor.shape[-1] < features else tensor
