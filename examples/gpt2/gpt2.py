"""GPT-2 in plain torch.nn: a model like any user's, which knows nothing of how it will be trained.

Shape suffixes: B batch · T time (positions) · D model dim · H heads · E dim of one head (D / H) · F inner dim of the
MLP (4 D) · V vocabulary. ``x_BTD`` is a tensor of shape (B, T, D).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal self-attention with one fused projection for queries, keys and values."""

    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"dim {dim} does not divide into {num_heads} heads")
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        # The head dim E stays fixed and the number of heads is read off, so that a split of the heads needs no change.
        head_dim = x_BTD.shape[-1] // self.num_heads
        q_BHTE, k_BHTE, v_BHTE = (
            each_BTD.unflatten(-1, (-1, head_dim)).transpose(1, 2) for each_BTD in self.qkv(x_BTD).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        mixed_BHTE = F.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, dropout_p=dropout, is_causal=True)
        return self.out(mixed_BHTE.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """Two projections with GELU (its tanh form, as in GPT-2) between them."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        hidden_BTF = F.gelu(self.up(x_BTD), approximate="tanh")
        return self.down(hidden_BTF)


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, num_heads, dropout)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = MLP(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD)))
        return x_BTD + self.dropout(self.mlp(self.mlp_norm(x_BTD)))


class GPT2(nn.Module):
    """Decoder-only transformer of Radford et al., "Language Models are Unsupervised Multitask Learners" (2019)."""

    def __init__(
        self,
        vocab_size: int = 257,
        seq_len: int = 256,
        dim: int = 128,
        num_layers: int = 4,
        num_heads: int = 4,
        dropout: float = 0.0,
        tie_weights: bool = True,
    ) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocab_size, dim)
        self.position_embedding = nn.Embedding(seq_len, dim)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dim, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        if tie_weights:
            self.head.weight = self.token_embedding.weight
        self.apply(_initialise)
        # Each block adds to the residual stream twice; this keeps the sum's variance independent of depth.
        for block in self.blocks:
            for projection in (block.attention.out, block.mlp.down):
                nn.init.normal_(projection.weight, std=0.02 / math.sqrt(2 * num_layers))

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Logits_BTV: at position t, those of token t + 1."""
        positions_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        x_BTD = self.dropout(self.token_embedding(ids_BT) + self.position_embedding(positions_T))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def gpt2(**sizes: Any) -> GPT2:
    """Makes a GPT-2; takes the arguments of :class:`GPT2`."""
    return GPT2(**sizes)


def next_token_loss(ids_BT: Tensor, logits_BTV: Tensor) -> Tensor:
    """Mean cross-entropy, in nats, of predicting token t + 1 from the tokens up to t; the last predicts nothing."""
    return F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten())
