"""torch's pipeline stage and schedules, mended, with memory for what is received and sent while that is used.

Importing this imports ``torch.distributed.pipelining``, which takes long.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import (
    stage_backward_input as stage_backward_input,
    stage_backward_weight as stage_backward_weight,
)
from torch.distributed.pipelining.schedules import SEND_B, SEND_F, _batch_p2p, _PipelineScheduleRuntime, _wait_batch_p2p

ATTRIBUTES_OF = (
    "torch.distributed.pipelining.stage",
    "torch.distributed.pipelining._backward",
    "torch.distributed.pipelining.schedules",
)

Message = tuple[str, int, int]
"""What passes between two stages: ``F`` or ``B`` (hidden states or gradients), a stage, and a micro-batch."""


class EarlierStage(PipelineStage):
    """torch 2.11's stage, which copes with hidden states without gradients, and with two neighbours on one rank."""

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Run backward as torch does, and send zeros to the stage before where there is no gradient."""
        infos = () if self.is_first else self.args_recv_info[bwd_chunk_id]
        received: list[torch.Tensor] = [info.buffer for info in infos]  # type: ignore[union-attr,misc]
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if received and self.has_backward:
            self.bwd_cache[bwd_chunk_id] = tuple(
                (torch.zeros_like(tensor, device=self.device) if gradient is None else gradient).contiguous()
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


class SentMessages:
    """Keeps what a rank sends in a step until a message of the rank that it goes to shows that it has arrived.

    Args:
        answered: Messages that are known to have arrived once another one, by which the stage that takes it, is here.

    [Note: messages that have arrived]
    torch's schedules of several stages keep every message of a step: whoever holds the work of a send holds what it
    sends. But a rank that answers has taken all that it needed before. What it took lets go of memory here and waits
    for nothing: a work that is over is waited for at once, and on a GPU the stream has waited for a later message.
    """

    def __init__(self, answered: Mapping[Message, Sequence[Message]]) -> None:
        self.answered = answered
        self.works: dict[Message, list[dist.Work]] = {}

    def send(self, message: Message, operations: list[dist.P2POp]) -> None:
        """Send as torch does."""
        self.works[message] = _batch_p2p(operations)

    def take(self, message: Message) -> None:
        """Let go of what has arrived, given a message that is here."""
        for each in self.answered.get(message, ()):
            _wait_batch_p2p(self.works.pop(each, []))

    def finish(self) -> None:
        """Wait for the messages that nothing answered, as torch does for all."""
        while self.works:
            _wait_batch_p2p(self.works.popitem()[1])

    def forget(self) -> None:
        """Drop what is left of a step that failed."""
        self.works.clear()


class _LettingGo(_PipelineScheduleRuntime):
    """A schedule that keeps messages until they have arrived, see [Note: messages that have arrived]."""

    sent: SentMessages

    def let_go(self, answered: Mapping[Message, Sequence[Message]]) -> None:
        """Send through :class:`SentMessages` from now on."""
        self.sent = SentMessages(answered)
        stages: dict[int, Any] = {stage.stage_index: stage for stage in self._stages}
        for stage in stages.values():
            stage.sent = self.sent

        def forward(action: Any, context: Any) -> None:
            stage, number = action.stage_index, action.microbatch_index
            self.sent.send(("F", stage, number), stages[stage].get_fwd_send_ops(number))

        def backward(action: Any, context: Any) -> None:
            stage, number = action.stage_index, action.microbatch_index
            self.sent.send(("B", stage, number), stages[stage].get_bwd_send_ops(number))

        # torch's own registration takes no sends.
        self._comp_type_to_function_map.update({SEND_F: forward, SEND_B: backward})

    def _step_microbatches(self, *args: Any, **kwargs: Any) -> Any:
        try:
            result = super()._step_microbatches(*args, **kwargs)
            self.sent.finish()
            return result
        finally:
            self.sent.forget()


def letting_go(kind: type[Any]) -> type[_LettingGo]:
    """Return a schedule of several stages a rank with ``let_go``, to be called before its first step."""
    return type(kind.__name__, (_LettingGo, kind), {})


class ReceivingStage(AnyStage):  # type: ignore[misc,valid-type]
    """A stage with memory to receive in from the call that receives until forward or backward has it.

    torch makes it at the start, for hidden states and gradients of every micro-batch, and keeps it: of a model with
    hidden states of 128 MiB and 32 micro-batches, 8 GiB on every rank. Here outlines stand for it until they receive.
    """

    sent: SentMessages | None = None

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with _outlines_alone(self):
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with _outlines_alone(self):
            return super()._prepare_backward_infra(*args, **kwargs)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return torch's calls that receive hidden states, into memory made for them."""
        _make_memory(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return torch's calls that receive gradients, into memory made for them."""
        _make_memory(self.grad_recv_info.get(bwd_chunk_id, ()), self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Take the gradients of a stage on this rank; zeros where it has none."""
        if any(gradient is None for gradient in next_stage_bwd_outputs):
            _make_memory(self.grad_recv_info[mb_index], self.device)
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        received = super()._retrieve_recv_activations(fwd_chunk_id)
        _let_go(self.args_recv_info[fwd_chunk_id])
        self.let_go_behind("F", fwd_chunk_id)
        return received

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        received = super()._retrieve_recv_grads(bwd_chunk_id)
        _let_go(self.grad_recv_info[bwd_chunk_id])
        self.let_go_behind("B", bwd_chunk_id)
        return received

    def let_go_behind(self, kind: str, number: int) -> None:
        """Let go of what has arrived, given hidden states or gradients of a micro-batch that are here."""
        if self.sent is not None:
            self.sent.take((kind, self.stage_index, number))


@contextlib.contextmanager
def _outlines_alone(stage: Any) -> Iterator[None]:
    """Let torch make outlines of what a stage receives."""
    device, stage.device = stage.device, torch.device("meta")
    try:
        yield
    finally:
        stage.device = device


def _make_memory(infos: Iterable[Any], device: torch.device) -> None:
    """Make the memory that these outlines stand for."""
    for info in infos:
        if (outline := getattr(info, "buffer", None)) is not None:
            info.buffer = torch.empty_like(outline, device=device, requires_grad=outline.requires_grad)


def _let_go(infos: Iterable[Any]) -> None:
    """Leave outlines in place of what has been received: who has it keeps it."""
    for info in infos:
        if (received := getattr(info, "buffer", None)) is not None:
            info.buffer = torch.empty_like(received, device="meta", requires_grad=received.requires_grad)
