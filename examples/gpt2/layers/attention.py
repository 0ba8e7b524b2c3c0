"""Multi-head self-attention. B batch · T time · H heads · E dim of one head · D model dim."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import meshwright as bmt
from layers.linear import Linear


class Attention(bmt.DistributedModule):
    """Self-attention with one fused projection for queries, keys and values; the heads' dims need not add up to D."""

    def __init__(
        self,
        dim_model: int,
        dim_head: int,
        num_heads: int,
        bias: bool = True,
        dtype: torch.dtype = torch.float32,
        std_out: float = 0.02,
    ) -> None:
        super().__init__()
        self.dim_head = dim_head
        self.qkv = Linear(dim_model, 3 * num_heads * dim_head, bias, dtype)
        self.out = Linear(num_heads * dim_head, dim_model, bias, dtype, std_out)

    def forward(self, x_BTD: Tensor, mask_B1TT: Tensor | None) -> Tensor:
        """Mixes positions: those where the mask is True, or without a mask all up to the own one."""
        q_BHTE, k_BHTE, v_BHTE = (
            each.unflatten(-1, (-1, self.dim_head)).transpose(1, 2) for each in self.qkv(x_BTD).chunk(3, dim=-1)
        )
        mixed_BHTE = F.scaled_dot_product_attention(
            q_BHTE, k_BHTE, v_BHTE, attn_mask=mask_B1TT, is_causal=mask_B1TT is None
        )
        return self.out(mixed_BHTE.transpose(1, 2).flatten(-2))


def causal_padding_mask(mask_BT: Tensor) -> Tensor:
    """What each position sees, (B, 1, T, T): itself, and the real tokens before it.

    Padding sees itself, too: attention kernels differ in what they make of a row with nothing to see.
    """
    num_positions = mask_BT.shape[1]
    itself_TT = torch.eye(num_positions, dtype=torch.bool, device=mask_BT.device)
    before_TT = torch.ones_like(itself_TT).tril()
    return itself_TT | (before_TT & mask_BT[:, None, None, :])
