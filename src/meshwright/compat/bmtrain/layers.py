"""BMTrain's linear layers and embedding: whole, or split over a tensor group."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.comm import all_reduce, reduce_scatter
from meshwright.comm.transport import gathered, members_of
from meshwright.compat.bmtrain.distributed_module import DistributedModule
from meshwright.compat.bmtrain.parallel_linear import OpParallelLinear, ReduceType
from meshwright.compat.bmtrain.parameter import DistributedParameter, InitMethod, ParameterInitializer
from meshwright.errors import ModelError
from meshwright.runtime import tensor_mesh, tensor_rank, tensor_size
from meshwright.runtime.torch_internals.tensors import assert_async


class _LinearLayer(DistributedModule):
    """Base of the linear layers: the sizes of the whole layer, its weight, and a bias or None."""

    bias: Tensor | None

    def __init__(self, in_features: int, out_features: int, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = weight
        self.register_parameter("bias", bias)

    def extra_repr(self) -> str:
        """Return the sizes of the whole layer."""
        bias = self._parameters["bias"] is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}"


class Linear(_LinearLayer):
    """``torch.nn.Linear`` with distributed parameters: Xavier-normal weight (Glorot & Bengio 2010), zero bias.

    Args:
        in_features: I.
        out_features: O.
        bias: Whether to add one.
        dtype: Type of the parameters; None for torch's default.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, dtype: torch.dtype | None = None
    ) -> None:
        weight = _weight((out_features, in_features), dtype)
        super().__init__(in_features, out_features, weight, _bias(out_features, dtype) if bias else None)

    def forward(self, input: Tensor) -> Tensor:
        """Map (…, I) to (…, O)."""
        return F.linear(input, self.weight, self.bias)


class ColumnParallelLinear(_LinearLayer):
    """A linear layer of which every tensor rank computes a part of the output features.

    Args:
        in_features: I of the whole layer.
        out_features: O of the whole layer, a multiple of ``tp_size``.
        bias: Whether to add one.
        dtype: Type of the parameters; None for torch's default.
        gather_output: Give every rank all output features instead of its part.
        gather_input: Whether ranks hold parts of dim 0, to be gathered; else all hold the same input.
        async_gather_chunks: Parts in which the input is gathered, each during the product of the one before.

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
        """Map (rows…, I) to (rows…, O / tp_size), or to (rows…, O) with ``gather_output``.

        With ``gather_input`` the output's dim 0 is that of all ranks.
        """
        return OpParallelLinear.apply(
            input,
            self.weight,
            self.bias,
            gather_input=self.gather_input,
            gather_output=self.gather_output,
            async_gather_chunks=self.async_gather_chunks,
        )


class RowParallelLinear(_LinearLayer):
    """A linear layer of which every tensor rank multiplies a part of the input features; the products are summed.

    Args:
        in_features: I of the whole layer, a multiple of ``tp_size``.
        out_features: O.
        bias: Whether to add one, to the sum.
        dtype: Type of the parameters; None for torch's default.
        split_input: Whether the input is not split by features yet: ranks hold parts of dim 0 with all features.
        all_reduce_output: Give every rank all rows instead of its part of dim 0.
        async_chunks: Parts in which the output is reduced, each during the product of the next.

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
        """Map (rows…, I / tp_size), or (rows…, I) with ``split_input``, to (rows…, O).

        Dim 0 is divided by ``tp_size`` if the output is scattered and the input had all rows.
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
    """Return ``size / tp_size``, each tensor rank's part.

    Raises:
        ModelError: When ``tp_size`` does not divide ``size``.
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


class VPEmbedding(DistributedModule):
    """An embedding whose vocabulary is split over a tensor group, and the head that is tied to it.

    Ids and hidden states are communicated, never the weight (BMTrain gathers it in every forward). Values are undefined
    until :func:`meshwright.init_parameters` or ``load``.

    Args:
        vocab_size: V, a multiple of ``tp_size``.
        embedding_size: D.
        dtype: Type of the weight; half by default, as in BMTrain.
        init_mean: Mean of the initial values.
        init_std: Their standard deviation.
        gather_input: Whether ranks hold parts of dim 0 of ids and hidden states; else all hold the same.

    Raises:
        ModelError: When ``tp_size`` does not divide ``vocab_size``.
    """

    def __init__(
        self,
        vocab_size: int,
        embedding_size: int,
        dtype: torch.dtype = torch.half,
        init_mean: float = 0.0,
        init_std: float = 1.0,
        gather_input: bool = True,
    ) -> None:
        super().__init__()
        self.vocab_size, self.dim_model, self.gather_input = vocab_size, embedding_size, gather_input
        self.vocab_size_per_partition = tensor_part("vocab_size", vocab_size)
        self.start_index = tensor_rank() * self.vocab_size_per_partition
        self.end_index = self.start_index + self.vocab_size_per_partition
        self.weight = DistributedParameter(
            torch.empty(self.vocab_size_per_partition, embedding_size, dtype=dtype, device="meta"),
            init_method=ParameterInitializer(nn.init.normal_, mean=init_mean, std=init_std),
            tp_mode=True,
            tp_split_dim=0,
        )

    def forward(self, x: Tensor, projection: bool = False) -> Tensor:
        """Look up embeddings of ids, or compute logits of hidden states.

        Args:
            x: Ids (rows…), of equal shape on all tensor ranks; with ``projection`` hidden states (rows…, D).
            projection: Whether to return logits instead of embeddings.

        Returns:
            Embeddings (rows…, D). With ``projection`` the logits (rows…, V / tp_size) of this rank's words, for all
            rows of the tensor group in rank order: the input of ``FusedCrossEntropy(parallel=True)``.

        Raises:
            ModelError: On all tensor ranks, when ids are no integers; torch's RuntimeError (an assertion on the device)
                for an id that is no word.
        """
        if projection:
            return OpParallelLinear.apply(x, self.weight, gather_input=self.gather_input)
        if x.is_floating_point():
            raise ModelError(
                "An embedding looks up ids",
                expected="integers",
                got=str(x.dtype),
                fix="pass projection=True for logits",
            )
        if tensor_size() == 1:
            return F.embedding(x, self.weight)
        members = members_of(tensor_mesh())
        ids = gathered(x, members) if self.gather_input else x
        found = self._found(ids.flatten())
        if not self.gather_input:
            return all_reduce(found, group=members.group, grad="partial").view(*x.shape, -1)
        return reduce_scatter(found, group=members.group).view(*x.shape, -1)

    def _found(self, ids: Tensor) -> Tensor:
        """Return embeddings of this rank's words, zeros for those of others."""
        assert_async(((ids >= 0) & (ids < self.vocab_size)).all(), f"ids are not in 0..{self.vocab_size - 1}")  # type: ignore[call-arg]
        elsewhere = (ids < self.start_index) | (ids >= self.end_index)
        local = (ids - self.start_index).masked_fill(elsewhere, 0)
        return F.embedding(local, self.weight).masked_fill(elsewhere.unsqueeze(-1), 0.0)

    def extra_repr(self) -> str:
        """Return the sizes of the whole embedding."""
        return f"{self.vocab_size}, {self.dim_model}"
