"""Layer norm whose gain and bias are shared out over all ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import meshwright as bmt


class LayerNorm(bmt.DistributedModule):
    """Layer norm over the last dim; torch's kernels take mean and variance in fp32 whatever the input's type is."""

    def __init__(self, dim: int, bias: bool = True, dtype: torch.dtype = torch.float32, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = bmt.DistributedParameter(
            torch.empty(dim, dtype=dtype, device="meta"), init_method=bmt.ParameterInitializer(torch.nn.init.ones_)
        )
        self.bias = None
        if bias:
            self.bias = bmt.DistributedParameter(
                torch.empty(dim, dtype=dtype, device="meta"), init_method=bmt.ParameterInitializer(torch.nn.init.zeros_)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
