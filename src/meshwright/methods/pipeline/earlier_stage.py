"""What the pipeline stages of torch 2.11 lack beside later ones; goes when torch 2.11 is no longer supported."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage


class EarlierStage(PipelineStage):
    """torch 2.11's stage, which copes with hidden states without gradients, and with two neighbours on one rank.

    Of a schedule that splits backward, every hidden state must still be used by the stage that gets it.
    """

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[torch.Tensor | None, ...], list[dict[str, Any]] | None]:
        """torch's; the gradient of inputs alone is taken through those outputs that have one."""
        if backward_type == "input" and bwd_kwargs["output_grads"] is not None:
            pairs = zip(bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], strict=True)
            through = [(output, gradient) for output, gradient in pairs if output.requires_grad]
            bwd_kwargs["stage_output"] = tuple(output for output, _ in through)
            bwd_kwargs["output_grads"] = tuple(gradient for _, gradient in through)
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """torch's; the stage before gets a gradient of all that it sent, zeros where there is none."""
        infos = () if self.is_first else self.args_recv_info[bwd_chunk_id]
        received: list[torch.Tensor] = [info.buffer for info in infos]  # type: ignore[union-attr,misc]
        tracked = [tensor.requires_grad for tensor in received]
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if not received or not self.has_backward:
            return
        gradients = self.bwd_cache[bwd_chunk_id]
        if len(gradients) < len(received):  # a split backward tells those alone that may have one
            found = iter(gradients)
            gradients = tuple(next(found) if each else None for each in tracked)
        self.bwd_cache[bwd_chunk_id] = tuple(
            (torch.zeros_like(tensor) if gradient is None else gradient).contiguous()
            for tensor, gradient in zip(received, gradients, strict=False)
        )
        for tensor, each in zip(received, tracked, strict=True):
            tensor.requires_grad_(each)  # a split backward detaches outputs in place, and some are what was received

    def _validate_fwd_outputs(self, outputs: tuple[torch.Tensor, ...]) -> None:
        """Nothing: what goes on is checked before it gets here, and a loss may be of any type."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """torch's greetings but those of a rank to itself, where a V turns: gloo cannot send them."""
        own = dist.get_rank(self.group)
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != own]


# What :class:`EarlierStage` lacks came together with stages that know which tensors have gradients.
AnyStage: type[PipelineStage] = PipelineStage if hasattr(PipelineStage, "_get_grad_send_meta") else EarlierStage
