"""The stages one after the other, connected by autograd: what a plain call of a pipelined model does.

Evaluation and hand-written loops run so: in GPipe order, with a loss that every rank can call backward on. What goes
from stage to stage describes itself, so nothing need be known before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from meshwright.errors import ModelError, join_names
from meshwright.methods.pipeline.splice import Form, Handed, Splice
from meshwright.runtime.torch_internals.pytree import tree_map_only


@dataclass(frozen=True)
class Line:
    """A rank's place in its pipeline: whom it receives from and sends to."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]  # the pipeline rank of every stage
    rank: int
    device: torch.device

    @property
    def stages(self) -> list[int]:
        """This rank's stages, ascending."""
        return [stage for stage, owner in enumerate(self.ranks) if owner == self.rank]

    @property
    def last(self) -> int:
        """Return the last stage."""
        return len(self.ranks) - 1

    def is_here(self, stage: int) -> bool:
        """Return whether a stage is this rank's."""
        return self.ranks[stage] == self.rank

    def peer(self, stage: int) -> int:
        """Return the global rank that holds a stage."""
        return dist.get_global_rank(self.group, self.ranks[stage])


@dataclass(frozen=True)
class StageOutput:
    """What a model returns on a rank that does not hold its last stage; the loss function makes a loss of it."""

    token: torch.Tensor  # 0-dim; its backward waits for the gradient of what this rank has sent

    def __getattr__(self, name: str) -> Any:
        raise ModelError(
            f"pipeline_parallel: the model's output is not on this rank, and {name!r} of it is asked for",
            expected="use of the output by the loss_func that accelerate returned, or on the last pipeline rank",
            got=f"output.{name}",
            fix="compute the loss with result.loss_func; on other ranks only the loss is known",
        )


@dataclass(frozen=True)
class Boundary:
    """What goes over one boundary in one micro-batch."""

    form: Form
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, handed: Handed) -> Boundary:
        """Describe what a stage hands on."""
        return cls(handed.form, tuple(tuple(t.shape) for t in handed.tensors), tuple(t.dtype for t in handed.tensors))

    def check(self, handed: Handed) -> None:
        """Refuse what is not as described: the next stage has made room for that.

        Raises:
            ModelError: Saying what it is instead.
        """
        now = Boundary.of(handed)
        if (now.shapes, now.dtypes) != (self.shapes, self.dtypes):
            raise ModelError(
                "pipeline_parallel: a stage hands on other tensors than for the batch's first micro-batch",
                expected=f"{join_names(map(str, zip(self.shapes, self.dtypes, strict=True)))}",
                got=f"{join_names(map(str, zip(now.shapes, now.dtypes, strict=True)))}",
                fix="let hidden states have shapes that follow from those of the input",
            )

    def empty(self, device: torch.device) -> list[torch.Tensor]:
        """Room for it."""
        return [
            torch.empty(shape, dtype=dtype, device=device)
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        ]


def run_chain(line: Line, splice: Splice, forward: Callable[[], Any], seed: int) -> tuple[Any, dict[int, Boundary]]:
    """Run this rank's stages of one forward pass, between the other ranks'.

    Args:
        line: The pipeline.
        splice: Runs a stage.
        forward: Calls the model.
        seed: Of random draws, the same on all ranks.

    Returns:
        The model's output where the last stage is, else a :class:`StageOutput`; and what came and went, by the number
        of the stage that sent it.
    """
    token = torch.zeros((), device=line.device, requires_grad=torch.is_grad_enabled())
    boundaries: dict[int, Boundary] = {}
    handed: Any = None
    failure: Exception | None = None
    for stage in line.stages:
        if stage > 0 and not line.is_here(stage - 1):
            told: list[Any] = [None]
            dist.recv_object_list(told, src=line.peer(stage - 1), group=line.group, device=line.device)
            failure = failure or (_Elsewhere() if told[0] is None else None)
            if told[0] is not None:
                boundaries[stage - 1] = told[0]
                handed = _receive(line, stage, token, told[0])
        if failure is None:
            try:
                handed = splice.run(stage, handed if stage else None, forward, seed)
                boundaries |= {stage: Boundary.of(handed)} if stage != line.last else {}
            except Exception as error:
                failure = error
        if stage != line.last and not line.is_here(stage + 1):
            token = _send(line, stage, token, handed, boundaries.get(stage) if failure is None else None)
    _raise_together(line, failure)
    return (handed if line.is_here(line.last) else StageOutput(token)), boundaries


def shared_output(line: Line, output: Any) -> Any:
    """Return what the last stage returned, on every rank of the pipeline; without gradients.

    Args:
        line: The pipeline.
        output: What :func:`run_chain` returned here.
    """
    source = line.peer(line.last)
    is_here = line.is_here(line.last)
    told = [tree_map_only(torch.Tensor, _without_data, output) if is_here else None]
    dist.broadcast_object_list(told, src=source, group=line.group, device=line.device)

    def shared(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.contiguous() if is_here else torch.empty_like(tensor, device=line.device)
        dist.broadcast(tensor, src=source, group=line.group)
        return tensor

    return tree_map_only(torch.Tensor, shared, output if is_here else told[0])


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


class _Elsewhere(Exception):
    """Another rank's stage failed."""


def _raise_together(line: Line, failure: Exception | None) -> None:
    """A stage that failed is an error on all ranks of its pipeline."""
    failed = torch.tensor(float(failure is not None), device=flag_device(line))
    dist.all_reduce(failed, dist.ReduceOp.MAX, group=line.group)
    if not failed.item():
        return
    here = failure if not isinstance(failure, _Elsewhere) else None
    told: list[str | None] = [None] * line.group.size()
    dist.all_gather_object(told, f"{type(here).__name__}: {here}" if here is not None else None, group=line.group)
    if here is not None:
        raise here
    rank, error = next((rank, error) for rank, error in enumerate(told) if error is not None)
    raise _failed_elsewhere("a stage", f"{error} (pipeline rank {rank})")


def _failed_elsewhere(what: str, got: str) -> ModelError:
    return ModelError(
        f"pipeline_parallel: {what} failed on another rank",
        expected="a forward pass that ends on every stage",
        got=got,
        fix="correct the model or its input",
    )


def flag_device(line: Line) -> torch.device:
    """Return where a flag is reduced: on the host where that is possible, which does not wait for the device."""
    return torch.device("cpu") if "cpu" in dist.get_backend_config(line.group) else line.device


def _receive(line: Line, stage: int, token: torch.Tensor, boundary: Boundary) -> Handed:
    tensors = boundary.empty(line.device)
    for tensor in tensors:
        dist.recv(tensor, src=line.peer(stage - 1), group=line.group)
    return Handed(list(_Received.apply(token, line, stage, *tensors)), boundary.form)


def _send(line: Line, stage: int, token: torch.Tensor, handed: Handed, boundary: Boundary | None) -> torch.Tensor:
    """Send the description, then the tensors; None tells that a stage failed."""
    dist.send_object_list([boundary], dst=line.peer(stage + 1), group=line.group, device=line.device)
    if boundary is None:
        return token
    for tensor in handed.tensors:
        dist.send(tensor.detach().contiguous(), dst=line.peer(stage + 1), group=line.group)
    sent: torch.Tensor = _Sent.apply(token, line, stage, *handed.tensors)
    return sent


class _Received(torch.autograd.Function):
    """What was received; backward sends its gradients to where it came from."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, line: Line, stage: int, *tensors: torch.Tensor) -> Any:
        ctx.line, ctx.stage, ctx.like = line, stage, tensors
        received = tuple(tensor.view_as(tensor) for tensor in tensors)
        ctx.mark_non_differentiable(*(tensor for tensor in received if not tensor.is_floating_point()))
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        for tensor, gradient in zip(ctx.like, gradients, strict=True):
            if tensor.is_floating_point():
                sent = torch.zeros_like(tensor) if gradient is None else gradient.to(tensor.dtype).contiguous()
                dist.send(sent, dst=ctx.line.peer(ctx.stage - 1), group=ctx.line.group)
        # The token leads to what this rank has sent in an earlier stage: its gradients come next.
        return torch.zeros((), device=ctx.line.device), None, None, *[None] * len(gradients)


class _Sent(torch.autograd.Function):
    """A token for what was sent; backward receives its gradients."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, line: Line, stage: int, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.line, ctx.stage = line, stage
        ctx.kinds = [(tensor.shape, tensor.dtype) for tensor in tensors]
        return torch.zeros((), device=line.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        received: list[torch.Tensor | None] = []
        for shape, dtype in ctx.kinds:
            if not dtype.is_floating_point:
                received.append(None)
                continue
            buffer = torch.empty(shape, dtype=dtype, device=ctx.line.device)
            dist.recv(buffer, src=ctx.line.peer(ctx.stage + 1), group=ctx.line.group)
            received.append(buffer)
        # The token: what this rank received for an earlier stage goes back next.
        return torch.zeros((), device=ctx.line.device), None, None, *received


class _Known(torch.autograd.Function):
    """A loss whose value another rank computed; backward goes on with the token."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return torch.zeros_like(gradient, dtype=torch.float32), None


def shared_loss(line: Line, token: torch.Tensor | None, loss: torch.Tensor | None) -> torch.Tensor:
    """Return the last stage's loss on every rank of the pipeline; fp32 where it came from another.

    Args:
        line: The pipeline.
        token: What the model returned on other ranks; None where the last stage is.
        loss: Where the last stage is; None there tells the others that it failed.

    Raises:
        ModelError: Where the last stage is not, when the loss failed.
    """
    told = torch.zeros(2, device=line.device)  # the loss, and whether it failed
    if loss is not None:
        told[0] = loss.detach()
    elif token is None:
        told[1] = 1
    dist.all_reduce(told, group=line.group)
    if token is None:
        return loss if loss is not None else told[0]
    if told[1].item():
        raise _failed_elsewhere("the loss function", "an error on the rank of the last stage")
    known: torch.Tensor = _Known.apply(token, told[0])
    return known
