"""Run pipeline stages one after the other, connected by autograd: what a plain call of a pipelined model does.

Evaluation and hand-written training loops take this path: GPipe's order for one micro-batch, with a loss that every
rank can call ``backward`` on. Hidden states travel with a description of their shapes, so no shapes need be known
beforehand. How one rank runs a single stage: [Note: splicing] in ``splice.py``.

[Note: tokens of a chain]
Each rank threads a 0-dim tensor, the token, through everything it sends and receives. ``_Sent`` returns the next token
and ``_Received`` takes the current one, so that on every rank autograd visits them in reverse order: the gradient that
the next stage sends arrives before this stage's backward, and goes on to the stage before. A rank without the last
stage starts backward from its last token, since it has no loss of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from meshwright.errors import ModelError, join_names
from meshwright.methods.pipeline.splice import Form, HiddenState, Splice
from meshwright.runtime.torch_internals.pytree import tree_map_only


@dataclass(frozen=True)
class PipelineRank:
    """One rank of a pipeline: its stages, and the ranks that hold the others."""

    group: dist.ProcessGroup
    stage_ranks: tuple[int, ...]  # the pipeline rank of every stage
    index: int
    device: torch.device

    @property
    def stages(self) -> list[int]:
        """This rank's stages, ascending."""
        return [stage for stage, owner in enumerate(self.stage_ranks) if owner == self.index]

    @property
    def last_stage(self) -> int:
        """Number of the pipeline's last stage."""
        return len(self.stage_ranks) - 1

    def holds(self, stage: int) -> bool:
        """Return whether this rank runs a stage."""
        return self.stage_ranks[stage] == self.index

    def peer(self, stage: int) -> int:
        """Return the global rank that holds a stage."""
        return dist.get_global_rank(self.group, self.stage_ranks[stage])


@dataclass(frozen=True)
class StageOutput:
    """The model's output on ranks without the last stage; the loss function turns it into the loss."""

    token: torch.Tensor  # 0-dim; its backward waits for the gradient of what this rank has sent
    pipeline: int  # id of the PipelineRank whose output it is; precisions rebuild the output around its values

    def __getattr__(self, name: str) -> Any:
        raise ModelError(
            f"pipeline_parallel: the model's output is not on this rank, and {name!r} of it is asked for",
            expected="use of the output by the loss_func that accelerate returned, or on the last pipeline rank",
            got=f"output.{name}",
            fix="compute the loss with result.loss_func; on other ranks only the loss is known",
        )


@dataclass(frozen=True)
class Boundary:
    """The hidden state that one stage sends to the next, described."""

    form: Form
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, hidden: HiddenState) -> Boundary:
        """Describe a hidden state."""
        return cls(hidden.form, tuple(tuple(t.shape) for t in hidden.tensors), tuple(t.dtype for t in hidden.tensors))

    def check(self, hidden: HiddenState) -> None:
        """Refuse tensors that differ from the description: the next stage has allocated buffers for it.

        Raises:
            ModelError: With the shapes and dtypes found.
        """
        now = Boundary.of(hidden)
        if (now.shapes, now.dtypes) != (self.shapes, self.dtypes):
            raise ModelError(
                "pipeline_parallel: a stage sends other tensors than for the batch's first micro-batch",
                expected=f"{join_names(map(str, zip(self.shapes, self.dtypes, strict=True)))}",
                got=f"{join_names(map(str, zip(now.shapes, now.dtypes, strict=True)))}",
                fix="let hidden states have shapes that follow from those of the input",
            )

    def empty(self, device: torch.device) -> list[torch.Tensor]:
        """Allocate buffers to receive it."""
        return [
            torch.empty(shape, dtype=dtype, device=device)
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        ]


def run_chain(
    rank: PipelineRank, splice: Splice, forward: Callable[[], Any], seed: int
) -> tuple[Any, dict[int, Boundary]]:
    """Run this rank's stages of one forward pass, exchanging hidden states with the other ranks.

    Args:
        rank: This rank.
        splice: Runs a stage.
        forward: Calls the model.
        seed: Random seed of the pass, the same on all ranks.

    Returns:
        The model's output on the rank of the last stage, else a :class:`StageOutput`; and the boundaries that this rank
        has seen, by the number of the sending stage.
    """
    token = torch.zeros((), device=rank.device, requires_grad=torch.is_grad_enabled())
    boundaries: dict[int, Boundary] = {}
    result: Any = None
    failure: Exception | None = None
    for stage in rank.stages:
        if stage > 0 and not rank.holds(stage - 1):
            message: list[Boundary | None] = [None]
            dist.recv_object_list(message, src=rank.peer(stage - 1), group=rank.group, device=rank.device)
            if (boundary := message[0]) is None:
                failure = failure or _Elsewhere()
            else:
                boundaries[stage - 1] = boundary
                result = _receive(rank, stage, token, boundary)
        if failure is None:
            try:
                result = splice.run(stage, result if stage else None, forward, seed)
                boundaries |= {stage: Boundary.of(result)} if stage != rank.last_stage else {}
            except Exception as error:
                failure = error
        if stage != rank.last_stage and not rank.holds(stage + 1):
            token = _send(rank, stage, token, result, boundaries.get(stage) if failure is None else None)
    _raise_together(rank, failure)
    return (result if rank.holds(rank.last_stage) else StageOutput(token, id(rank))), boundaries


def shared_output(rank: PipelineRank, output: Any) -> Any:
    """Broadcast the model's output from the last stage to every rank of the pipeline, without gradients.

    Args:
        rank: This rank.
        output: The output of :func:`run_chain` on this rank.
    """
    source = rank.peer(rank.last_stage)
    is_here = rank.holds(rank.last_stage)

    def without_data(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    outline = [tree_map_only(torch.Tensor, without_data, output) if is_here else None]
    dist.broadcast_object_list(outline, src=source, group=rank.group, device=rank.device)

    def shared(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.contiguous() if is_here else torch.empty_like(tensor, device=rank.device)
        dist.broadcast(tensor, src=source, group=rank.group)
        return tensor

    return tree_map_only(torch.Tensor, shared, output if is_here else outline[0])


class _Elsewhere(Exception):
    """A stage failed on another rank."""


def _raise_together(rank: PipelineRank, failure: Exception | None) -> None:
    """Raise an error on all ranks of the pipeline if a stage failed on any of them."""
    failed = torch.tensor(float(failure is not None), device=flag_device(rank))
    dist.all_reduce(failed, dist.ReduceOp.MAX, group=rank.group)
    if not failed.item():
        return
    here = failure if not isinstance(failure, _Elsewhere) else None
    errors: list[str | None] = [None] * rank.group.size()
    dist.all_gather_object(errors, f"{type(here).__name__}: {here}" if here is not None else None, group=rank.group)
    if here is not None:
        raise here
    index, error = next((index, error) for index, error in enumerate(errors) if error is not None)
    raise _failed_elsewhere("a stage", f"{error} (pipeline rank {index})")


def _failed_elsewhere(what: str, got: str) -> ModelError:
    return ModelError(
        f"pipeline_parallel: {what} failed on another rank",
        expected="a forward pass that ends on every stage",
        got=got,
        fix="correct the model or its input",
    )


def flag_device(rank: PipelineRank) -> torch.device:
    """Return the device to reduce a flag on: the host if the backend can, so that nothing waits for the GPU."""
    return torch.device("cpu") if "cpu" in dist.get_backend_config(rank.group) else rank.device


def _receive(rank: PipelineRank, stage: int, token: torch.Tensor, boundary: Boundary) -> HiddenState:
    tensors = boundary.empty(rank.device)
    for tensor in tensors:
        dist.recv(tensor, src=rank.peer(stage - 1), group=rank.group)
    return HiddenState(list(_Received.apply(token, rank, stage, *tensors)), boundary.form)


def _send(
    rank: PipelineRank, stage: int, token: torch.Tensor, hidden: HiddenState, boundary: Boundary | None
) -> torch.Tensor:
    """Send a hidden state: its description, then its tensors. Without a description the peer learns of a failure."""
    dist.send_object_list([boundary], dst=rank.peer(stage + 1), group=rank.group, device=rank.device)
    if boundary is None:
        return token
    for tensor in hidden.tensors:
        dist.send(tensor.detach().contiguous(), dst=rank.peer(stage + 1), group=rank.group)
    sent: torch.Tensor = _Sent.apply(token, rank, stage, *hidden.tensors)
    return sent


class _Received(torch.autograd.Function):
    """Identity on received tensors; backward sends their gradients to the stage before."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, rank: PipelineRank, stage: int, *tensors: torch.Tensor) -> Any:
        ctx.rank, ctx.stage, ctx.like = rank, stage, tensors
        received = tuple(tensor.view_as(tensor) for tensor in tensors)
        ctx.mark_non_differentiable(*(tensor for tensor in received if not tensor.is_floating_point()))
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        for tensor, gradient in zip(ctx.like, gradients, strict=True):
            if tensor.is_floating_point():
                sent = torch.zeros_like(tensor) if gradient is None else gradient.to(tensor.dtype).contiguous()
                dist.send(sent, dst=ctx.rank.peer(ctx.stage - 1), group=ctx.rank.group)
        # The token leads to what this rank sent from an earlier stage: those gradients come next.
        return torch.zeros((), device=ctx.rank.device), None, None, *[None] * len(gradients)


class _Sent(torch.autograd.Function):
    """The next token after sending tensors; backward receives their gradients from the next stage."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, rank: PipelineRank, stage: int, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.rank, ctx.stage = rank, stage
        ctx.kinds = [(tensor.shape, tensor.dtype) for tensor in tensors]
        return torch.zeros((), device=rank.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        received: list[torch.Tensor | None] = []
        for shape, dtype in ctx.kinds:
            if not dtype.is_floating_point:
                received.append(None)
                continue
            buffer = torch.empty(shape, dtype=dtype, device=ctx.rank.device)
            dist.recv(buffer, src=ctx.rank.peer(ctx.stage + 1), group=ctx.rank.group)
            received.append(buffer)
        # The token leads to what this rank received for an earlier stage: its gradients are sent next.
        return torch.zeros((), device=ctx.rank.device), None, None, *received


class _Known(torch.autograd.Function):
    """A loss that another rank computed; backward continues with the token."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return torch.zeros_like(gradient, dtype=torch.float32), None


def shared_loss(rank: PipelineRank, output: StageOutput | None, loss: torch.Tensor | None) -> torch.Tensor:
    """Return the last stage's loss on every rank of the pipeline; in fp32 on the other ranks.

    Args:
        rank: This rank.
        output: This rank's output; None on the rank of the last stage.
        loss: The loss on the rank of the last stage; None there reports to the others that it failed.

    Raises:
        ModelError: On every rank, when the output is that of another pipeline; on the other ranks, when the loss
            failed.
    """
    message = torch.zeros(3, device=rank.device)  # the loss, whether it failed, whose output is another pipeline's
    if loss is not None:
        message[0] = loss.detach()
    message[1] = float(loss is None and output is None)
    message[2] = float(output is not None and output.pipeline != id(rank))
    dist.all_reduce(message, group=rank.group)
    _, failed, is_strange = message.tolist()
    if is_strange:
        raise ModelError(
            "pipeline_parallel: this loss is of another model's output, whose gradients it would not finish",
            expected="the output of the model that was accelerated with this loss function",
            got="the output of another pipeline",
            fix="compute the loss with the function that accelerating that model returned",
        )
    if output is None:
        return loss if loss is not None else message[0]
    if failed:
        raise _failed_elsewhere("the loss function", "an error on the rank of the last stage")
    known: torch.Tensor = _Known.apply(output.token, message[0])
    return known
