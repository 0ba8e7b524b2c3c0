"""A linear layer whose weight and bias are shared out over all ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import meshwright as bmt


class Linear(bmt.DistributedModule):
    """``x W^T + b``. ``std`` is that of the initial weight; the bias begins at 0."""

    def __init__(
        self, dim_in: int, dim_out: int, bias: bool = True, dtype: torch.dtype = torch.float32, std: float = 0.02
    ) -> None:
        super().__init__()
        # On meta the full tensor takes no memory on any rank, however large it is: only the rank's part is allocated.
        self.weight = bmt.DistributedParameter(
            torch.empty(dim_out, dim_in, dtype=dtype, device="meta"),
            init_method=bmt.ParameterInitializer(torch.nn.init.normal_, std=std),
        )
        self.bias = None
        if bias:
            self.bias = bmt.DistributedParameter(
                torch.empty(dim_out, dtype=dtype, device="meta"),
                init_method=bmt.ParameterInitializer(torch.nn.init.zeros_),
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)
