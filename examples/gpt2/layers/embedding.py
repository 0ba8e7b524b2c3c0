"""An embedding that is also the projection back onto its vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import meshwright as bmt


class Embedding(bmt.DistributedModule):
    """One vector per id. Its ``projection`` ties the output layer to it (Press and Wolf 2017), as in GPT-2."""

    def __init__(self, num_ids: int, dim: int, dtype: torch.dtype = torch.float32, std: float = 0.02) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(
            torch.empty(num_ids, dim, dtype=dtype, device="meta"),
            init_method=bmt.ParameterInitializer(torch.nn.init.normal_, std=std),
        )

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)

    def projection(self, x: Tensor) -> Tensor:
        """Logits (…, num_ids) of hidden states (…, dim). The weight is gathered again: nobody holds it in between."""
        return F.linear(x, self.weight)
