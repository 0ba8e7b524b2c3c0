"""torch 2.11's pipeline stage, mended. Importing this imports ``torch.distributed.pipelining``, which takes long."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import (
    stage_backward_input as stage_backward_input,
    stage_backward_weight as stage_backward_weight,
)

ATTRIBUTES_OF = ("torch.distributed.pipelining.stage", "torch.distributed.pipelining._backward")


class EarlierStage(PipelineStage):
    """torch 2.11's stage, which copes with hidden states without gradients, and with two neighbours on one rank."""

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Run backward as torch does, and send zeros to the stage before where there is no gradient."""
        infos = () if self.is_first else self.args_recv_info[bwd_chunk_id]
        received: list[torch.Tensor] = [info.buffer for info in infos]  # type: ignore[union-attr,misc]
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if received and self.has_backward:
            self.bwd_cache[bwd_chunk_id] = tuple(
                (torch.zeros_like(tensor) if gradient is None else gradient).contiguous()
                for tensor, gradient in zip(received, self.bwd_cache[bwd_chunk_id], strict=False)
            )

    def _validate_fwd_outputs(self, outputs: tuple[torch.Tensor, ...]) -> None:
        """Accept any output: hidden states are checked before they get here, and a loss may be of any type."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Return torch's first messages but those of a rank to itself, where a V turns: gloo cannot send them."""
        own = dist.get_rank(self.group)
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != own]


# What :class:`EarlierStage` lacks came together with stages that know which tensors have gradients, in torch 2.12.
_KNOWS_GRADIENTS = "_get_grad_send_meta"
AnyStage: type[PipelineStage] = PipelineStage if hasattr(PipelineStage, _KNOWS_GRADIENTS) else EarlierStage
