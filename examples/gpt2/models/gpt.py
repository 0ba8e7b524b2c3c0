"""GPT-2 the way BMTrain's README writes it. B batch · T time (positions) · D model dim · V vocabulary."""

from __future__ import annotations

import math

import torch
from layers import Attention, Embedding, FeedForward, LayerNorm, causal_padding_mask
from torch import Tensor

import meshwright as bmt


class TransformerBlock(bmt.DistributedModule):
    """Pre-norm transformer block."""

    def __init__(
        self,
        dim_model: int,
        dim_head: int,
        num_heads: int,
        dim_ff: int,
        bias: bool = True,
        dtype: torch.dtype = torch.float32,
        std_out: float = 0.02,
    ) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(dim_model, bias, dtype)
        self.attention = Attention(dim_model, dim_head, num_heads, bias, dtype, std_out)
        self.feedforward_norm = LayerNorm(dim_model, bias, dtype)
        self.feedforward = FeedForward(dim_model, dim_ff, bias, dtype, std_out)

    def forward(self, x_BTD: Tensor, mask_B1TT: Tensor | None) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), mask_B1TT)
        return x_BTD + self.feedforward(self.feedforward_norm(x_BTD))


class GPT(bmt.DistributedModule):
    """Decoder-only transformer of Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).

    The output layer is the word embedding. ``bmt.init_parameters`` fills the weights, or ``bmt.load``.
    """

    def __init__(
        self,
        num_layers: int,
        vocab_size: int,
        dim_model: int,
        dim_head: int,
        num_heads: int,
        dim_ff: int,
        max_distance: int,
        bias: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        # Each block adds to the residual stream twice; this keeps the sum's variance independent of depth.
        std_out = 0.02 / math.sqrt(2 * num_layers)
        self.word_embedding = Embedding(vocab_size, dim_model, dtype)
        self.position_embedding = Embedding(max_distance, dim_model, dtype)
        self.blocks = bmt.TransformerBlockList(
            [
                bmt.Block(TransformerBlock(dim_model, dim_head, num_heads, dim_ff, bias, dtype, std_out))
                for _ in range(num_layers)
            ]
        )
        self.norm = LayerNorm(dim_model, bias, dtype)

    def forward(self, input: Tensor, pos: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits (B, T, V): at position t, those of token t + 1.

        Args:
            input: Token ids (B, T).
            pos: Positions (B, T), below ``max_distance``.
            mask: (B, T), True at real tokens and False at padding, whose logits mean nothing. None when there is no
                padding: attention then needs no mask and takes torch's fastest kernel.
        """
        x_BTD = self.word_embedding(input) + self.position_embedding(pos)
        x_BTD = self.blocks(x_BTD, None if mask is None else causal_padding_mask(mask))
        return self.word_embedding.projection(self.norm(x_BTD))
