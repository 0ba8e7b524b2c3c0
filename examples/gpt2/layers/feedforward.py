"""The feed-forward part of a transformer block."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import meshwright as bmt
from layers.linear import Linear


class FeedForward(bmt.DistributedModule):
    """Two projections with GELU (its tanh form, as in GPT-2) between them."""

    def __init__(
        self,
        dim_model: int,
        dim_ff: int,
        bias: bool = True,
        dtype: torch.dtype = torch.float32,
        std_out: float = 0.02,
    ) -> None:
        super().__init__()
        self.up = Linear(dim_model, dim_ff, bias, dtype)
        self.down = Linear(dim_ff, dim_model, bias, dtype, std_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))
