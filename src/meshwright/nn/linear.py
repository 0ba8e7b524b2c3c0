"""Linear layers: whole, and split over a tensor group by output or by input features. Seed: BMTrain.

Pairs of them keep what lies in between split (Shoeybi et al. 2019): ``row(gelu(column(x)))``. Between pairs every rank
holds its own part of dim 0 (BMTrain's layout; sequence parallelism), or, with ``gather_input=False`` in the first and
``all_reduce_output=True`` in the second, all ranks hold the same. Gradients are right in both, and in any mixture.

Values are undefined until :func:`meshwright.init_parameters` or ``load``, as in BMTrain.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.errors import ModelError
from meshwright.nn.module import DistributedModule
from meshwright.nn.parallel_linear import OpParallelLinear, ReduceType
from meshwright.nn.parameter import DistributedParameter, InitMethod
from meshwright.runtime import tensor_size


class _LinearLayer(DistributedModule):
    """What the layers have in common: the sizes of the whole layer, its weight and perhaps a bias."""

    bias: Tensor | None

    def __init__(self, in_features: int, out_features: int, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = weight
        self.register_parameter("bias", bias)

    def extra_repr(self) -> str:
        """The sizes of the whole layer."""
        bias = self._parameters["bias"] is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}"


class Linear(_LinearLayer):
    """``torch.nn.Linear`` with distributed parameters: Xavier-normal weight (Glorot & Bengio 2010), zero bias.

    Args:
        in_features: I.
        out_features: O.
        bias: Whether to add one.
        dtype: Of the parameters; None for torch's default.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, dtype: torch.dtype | None = None
    ) -> None:
        weight = _weight((out_features, in_features), dtype)
        super().__init__(in_features, out_features, weight, _bias(out_features, dtype) if bias else None)

    def forward(self, input: Tensor) -> Tensor:
        """(…, I) to (…, O)."""
        return F.linear(input, self.weight, self.bias)


class ColumnParallelLinear(_LinearLayer):
    """A linear layer of which every tensor rank computes a part of the output features.

    Args:
        in_features: I, of the whole layer as are the others.
        out_features: O, a multiple of ``tp_size``.
        bias: Whether to add one.
        dtype: Of the parameters; None for torch's default.
        gather_output: Give every rank all output features instead of its part.
        gather_input: Ranks hold parts of dim 0, and compute with all of it; else all hold the same input.
        async_gather_chunks: Parts in which the input is gathered, each behind the product of the one before.

    Raises:
        ModelError: When ``tp_size`` does not divide ``out_features``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        gather_output: bool = False,
        gather_input: bool = True,
        async_gather_chunks: int = 2,
    ) -> None:
        part = tensor_part("out_features", out_features)
        weight = _weight((part, in_features), dtype, split_dim=0)
        super().__init__(in_features, out_features, weight, _bias(part, dtype, split_dim=0) if bias else None)
        self.gather_output, self.gather_input = gather_output, gather_input
        self.async_gather_chunks = async_gather_chunks

    def forward(self, input: Tensor) -> Tensor:
        """(rows…, I) to (rows…, O / tp_size), or (rows…, O) with ``gather_output``; gathered rows are rows of all."""
        return OpParallelLinear.apply(
            input,
            self.weight,
            self.bias,
            gather_input=self.gather_input,
            gather_output=self.gather_output,
            async_gather_chunks=self.async_gather_chunks,
        )


class RowParallelLinear(_LinearLayer):
    """A linear layer of which every tensor rank computes with a part of the input features; the products are summed.

    Args:
        in_features: I, of the whole layer as are the others; a multiple of ``tp_size``.
        out_features: O.
        bias: Whether to add one, to the sum.
        dtype: Of the parameters; None for torch's default.
        split_input: The input is not split by features yet: ranks hold parts of dim 0 with all features.
        all_reduce_output: Give every rank all rows instead of its part of dim 0.
        async_chunks: Parts in which the output is reduced, each behind the product of the next.

    Raises:
        ModelError: When ``tp_size`` does not divide ``in_features``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        split_input: bool = False,
        all_reduce_output: bool = False,
        async_chunks: int = 2,
    ) -> None:
        weight = _weight((out_features, tensor_part("in_features", in_features)), dtype, split_dim=1)
        super().__init__(in_features, out_features, weight, _bias(out_features, dtype) if bias else None)
        self.split_input, self.all_reduce_output = split_input, all_reduce_output
        self.async_chunks = async_chunks

    def forward(self, input: Tensor) -> Tensor:
        """(rows…, I / tp_size), or (rows…, I) with ``split_input``, to (rows…, O); dim 0 is divided by ``tp_size``
        where the output is scattered and the input was not a part of it.
        """
        return OpParallelLinear.apply(
            input,
            self.weight,
            self.bias,
            gather_input=self.split_input,
            split_input=self.split_input,
            reduce_output_type=ReduceType.ALL_REDUCE if self.all_reduce_output else ReduceType.REDUCE_SCATTER,
            async_gather_chunks=self.async_chunks,
        )


def tensor_part(name: str, size: int) -> int:
    """What each tensor rank has of ``size``.

    Raises:
        ModelError: When it is not the same number for all.
    """
    if size % tensor_size():
        raise ModelError(
            f"tp_size does not divide {name}",
            expected=f"a multiple of {tensor_size()}",
            got=repr(size),
            fix=f"choose another tp_size, or pad {name}",
        )
    return size // tensor_size()


def _weight(shape: tuple[int, int], dtype: torch.dtype | None, split_dim: int = -1) -> nn.Parameter:
    return _parameter(torch.empty(shape, dtype=dtype, device="meta"), nn.init.xavier_normal_, split_dim)


def _bias(size: int, dtype: torch.dtype | None, split_dim: int = -1) -> nn.Parameter:
    return _parameter(torch.empty(size, dtype=dtype, device="meta"), nn.init.zeros_, split_dim)


def _parameter(data: Tensor, init_method: InitMethod, split_dim: int) -> nn.Parameter:
    return DistributedParameter(data, init_method=init_method, tp_mode=split_dim >= 0, tp_split_dim=split_dim)
