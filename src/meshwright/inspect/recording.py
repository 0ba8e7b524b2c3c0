"""``record_tensor``, and the seam through which recorded tensors leave a recomputed or sharded block.

A block that recomputes or shards hooks into autograd at its outputs. A tensor recorded inside it can carry a loss only
if it is one of these outputs. So the block captures what its forward records, returns the tensors beside its own
outputs, and hands them over on the outside::

    def inner(*args):                                   # under checkpoint, under FSDP2's hooks
        with captured() as records:
            output = forward(*args)
        return output, records, [record.tensor for record in records]

    output, records, tensors = checkpoint(inner, *args, use_reentrant=False)
    hand_over(records, tensors)

Nothing is recorded during a recomputation, and what its capture returns is dropped with its outputs. While nobody
inspects, captures are empty and the block runs as it would without them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.errors import InspectError


@dataclasses.dataclass(frozen=True)
class Record:
    """One call of :func:`record_tensor`."""

    name: str
    group: str | None
    tensor: torch.Tensor
    """What a loss may be built from: the recorded tensor, or what a block returned in its place."""
    sources: tuple[torch.Tensor, ...]
    """What the model's code recorded and went on with: their gradients are the whole ones. One; in a pipeline one for
    each micro-batch on the stage that recorded them, and none on the others."""
    keeps_grad: bool
    gradient_factor: float = 1.0
    """What gradients of ``sources`` are multiplied by: those inside a pipeline have been divided by its ranks."""

    @property
    def source(self) -> torch.Tensor:
        """What this rank recorded, joined along dim 0."""
        if len(self.sources) == 1:
            return self.sources[0]
        return torch.cat([each.detach() for each in self.sources]) if self.sources else self.tensor.detach()[:0]

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient that backward left in ``source``, if it was asked for and has arrived."""
        if not self.keeps_grad or not self.sources:
            return None
        grads = [each.grad if each.requires_grad else None for each in self.sources]
        if len(grads) == 1 and grads[0] is None and self.tensor.requires_grad:
            grads = [self.tensor.grad]
        found = [each for each in grads if each is not None]
        if len(found) < len(grads):
            return None
        whole = found[0] if len(found) == 1 else torch.cat(found)
        return whole if self.gradient_factor == 1.0 else whole * self.gradient_factor


@dataclasses.dataclass(frozen=True)
class StagePass:
    """What one pass of a model through the stages of a pipeline has recorded on this rank."""

    stages: dict[int, list[Record]]
    """By the number of every stage that this rank has run, also where it recorded nothing."""


# Innermost last: an inspector's list, then those of the captures inside it. Not a context variable: blocks run their
# forward where they were called, and the threads of backward must see that recording is on to keep out of it.
_sinks: list[list[Any]] = []


def recording_active() -> bool:
    """Whether :func:`record_tensor` records now: someone inspects, and this is no recomputation.

    Recomputations are known by running inside a backward pass.
    """
    return bool(_sinks) and torch._C._current_graph_task_id() == -1


def record_tensor(x: torch.Tensor, name: str, group: str | None = None, requires_grad: bool = True) -> torch.Tensor:
    """Records a tensor of the model's forward for the surrounding :func:`inspect_tensor`; without one, does nothing.

    In code that torch recomputes (``use_reentrant=False``) the tensor is recorded once. With torch's reentrant
    checkpoint the recorded tensor has no gradient, since its forward runs without autograd.

    Args:
        x: Any tensor but a parameter; each rank its own part of the batch. A DTensor is taken as the whole tensor.
        name: Its name; may repeat, as in a stack of layers.
        group: Optional name of a group, put before the name.
        requires_grad: Whether backward keeps its gradient for the statistics.

    Returns:
        ``x`` itself. Seed: BMTrain, which returns nothing.

    Raises:
        InspectError: When ``x`` is a parameter (use :func:`inspect_model`) or no tensor.
    """
    if isinstance(x, nn.Parameter) or not isinstance(x, torch.Tensor):
        raise InspectError(
            f"record_tensor cannot record {name!r}",
            expected="a tensor computed in the model's forward",
            got="a parameter" if isinstance(x, nn.Parameter) else type(x).__name__,
            fix="use inspect_model for parameters" if isinstance(x, nn.Parameter) else "record the tensors in it",
        )
    if recording_active():
        _append(Record(name, group, tensor=x, sources=(x,), keeps_grad=requires_grad))
    return x


def _append(record: Record) -> None:
    if record.keeps_grad and record.tensor.requires_grad:
        record.tensor.retain_grad()
    _sinks[-1].append(record)


@contextlib.contextmanager
def recording_into(records: list[Any]) -> Iterator[None]:
    """Sends what is recorded inside to ``records``; the sinks are as before whatever happens inside."""
    depth = len(_sinks)
    _sinks.append(records)
    try:
        yield
    finally:
        del _sinks[depth:]


@contextlib.contextmanager
def captured() -> Iterator[list[Record]]:
    """Collects what is recorded inside instead of passing it on; empty when nothing is recorded now."""
    records: list[Record] = []
    with recording_into(records) if recording_active() else contextlib.nullcontext():
        yield records


def hand_over(records: Sequence[Record], tensors: Sequence[torch.Tensor]) -> None:
    """Passes captured records on to the inspector or the capture around this point.

    Args:
        records: As :func:`captured` collected them.
        tensors: One per record, of the same values: the record's own tensor, or what stands for it outside the block
            and carries gradients back into it.
    """
    for record, tensor in zip(records, tensors, strict=True):
        if recording_active():
            _append(dataclasses.replace(record, tensor=tensor))


def hand_over_stages(stages: dict[int, list[Record]]) -> None:
    """Passes on what this rank's stages have recorded in one pass of a pipeline; on all ranks of it.

    Args:
        stages: By number; {} on a rank that has run none.
    """
    if recording_active():
        _sinks[-1].append(StagePass(stages))


def refuse_nesting() -> None:
    """Refuses a second inspector inside the first.

    Raises:
        InspectError: When someone records already.
    """
    if _sinks:
        raise InspectError(
            "inspect_tensor() is already active",
            expected="one inspector at a time",
            got="a second one inside the first",
            fix="leave the first `with` block before the second, or read both from the first",
        )
