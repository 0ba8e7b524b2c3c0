"""An embedding whose vocabulary is split over a tensor group, and the head that is tied to it. Seed: BMTrain."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.distributed import all_reduce, reduce_scatter
from meshwright.distributed.members import members_of
from meshwright.distributed.transport import gathered
from meshwright.errors import ModelError
from meshwright.nn.linear import tensor_part
from meshwright.nn.module import DistributedModule
from meshwright.nn.parallel_linear import OpParallelLinear
from meshwright.nn.parameter import DistributedParameter, ParameterInitializer
from meshwright.runtime import tensor_mesh, tensor_rank, tensor_size


class VPEmbedding(DistributedModule):
    """An embedding of which every tensor rank holds a part of the words; also the head that predicts them.

    Ids and hidden states travel, never the weight (BMTrain gathers it in every forward). Values are undefined until
    :func:`meshwright.init_parameters` or ``load``.

    Args:
        vocab_size: V, a multiple of ``tp_size``.
        embedding_size: D.
        dtype: Of the weight; half, as in BMTrain, if it is left out.
        init_mean: Mean of the initial values.
        init_std: Their standard deviation.
        gather_input: Ranks hold parts of dim 0 of ids and hidden states; else all hold the same.

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
        """Looks words up, or predicts them.

        Args:
            x: Ids (rows…), of equal shape on all tensor ranks; with ``projection`` hidden states (rows…, D).
            projection: Return logits instead of embeddings.

        Returns:
            Embeddings (rows…, D). With ``projection`` the logits (rows…, V / tp_size) of this rank's words, for all
            rows of the tensor group one rank after the other: what ``FusedCrossEntropy(parallel=True)`` takes.

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
        """Embeddings of this rank's words, zero for those of others."""
        torch._assert_async(((ids >= 0) & (ids < self.vocab_size)).all(), f"ids are not in 0..{self.vocab_size - 1}")  # type: ignore[call-arg]
        elsewhere = (ids < self.start_index) | (ids >= self.end_index)
        local = (ids - self.start_index).masked_fill(elsewhere, 0)
        return F.embedding(local, self.weight).masked_fill(elsewhere.unsqueeze(-1), 0.0)

    def extra_repr(self) -> str:
        """The sizes of the whole embedding."""
        return f"{self.vocab_size}, {self.dim_model}"
