"""What the blocks of a pipeline record for an inspector, on its way to the ranks whose samples it is of.

A stage records a tensor once for each micro-batch, of samples of all ranks. Joined along dim 0 and divided, every rank
gets what it would have recorded had it run all blocks on its own batch. A loss may be built from it: gradients travel
back. Statistics are taken where the tensor was recorded, for only there all of its gradient arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from meshwright.distributed.members import Members
from meshwright.distributed.routes import Arrival
from meshwright.errors import InspectError
from meshwright.inspect import Record, hand_over
from meshwright.runtime import gather_from


class _Outline(NamedTuple):
    """A record of one micro-batch, as other ranks have to know it."""

    name: str
    group: str | None
    keeps_grad: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, record: Record) -> _Outline:
        tensor = record.tensor
        return cls(
            record.name, record.group, record.keeps_grad, tuple(tensor.shape), tensor.dtype, tensor.requires_grad
        )


class PipelineRecords:
    """The records of one pass.

    Args:
        members: The ranks of the pipeline.
        micros: Number of micro-batches.
    """

    def __init__(self, members: Members, micros: int) -> None:
        self._members, self._micros = members, micros
        self._own: list[Sequence[Record]] = []  # of this stage, by micro-batch
        self._stages: list[list[_Outline]] = []  # of all stages

    def add(self, records: Sequence[Record]) -> None:
        """Takes what this stage recorded in its next micro-batch."""
        self._own.append(records)

    def compare(self, samples: int) -> None:
        """Tells all ranks what each has, when the last micro-batch has passed. Collective over the world.

        Args:
            samples: In a micro-batch.

        Raises:
            InspectError: On every rank, when micro-batches differ in what they record, or in a tensor that is not made
                of rows of samples.
        """
        every = gather_from(lambda: _outlines(self._own, samples))
        group, size = self._members.group, self._members.size
        self._stages = [every[dist.get_global_rank(group, place)] for place in range(size)]

    def joined(self) -> list[torch.Tensor]:
        """This stage's tensors, of all samples of the pipeline, in their order."""
        return [torch.cat([record.tensor for record in micros]) for micros in zip(*self._own, strict=True)]

    def arrivals(self, stage: int) -> list[Arrival]:
        """What a rank gets of a stage's tensors."""
        size = self._members.size
        return [
            Arrival(stage, (one.shape[0] * self._micros // size, *one.shape[1:]), one.dtype)
            for one in self._stages[stage]
        ]

    def hand_over(self, tensors: Sequence[torch.Tensor]) -> None:
        """Passes this rank's part of everything on to the inspector, in the order of stages."""
        places = [(stage, index) for stage, found in enumerate(self._stages) for index in range(len(found))]
        for (stage, index), tensor in zip(places, tensors, strict=True):
            one = self._stages[stage][index]
            # What came over an exchange requires a gradient whether or not it did before.
            part = tensor if one.requires_grad else tensor.detach()
            here = self._own if stage == self._members.rank else []
            sources = tuple(source for records in here for source in records[index].sources)
            record = Record(one.name, one.group, part, sources, one.keeps_grad, float(self._members.size))
            hand_over([record], [part])


def _outlines(own: Sequence[Sequence[Record]], samples: int) -> list[_Outline]:
    first = [_Outline.of(record) for record in own[0]]
    for records in own:
        found = [_Outline.of(record) for record in records]
        if found != first:
            raise InspectError(
                "The micro-batches of a pipeline recorded different tensors",
                expected=f"{[(one.name, one.shape) for one in first]} from each",
                got=str([(one.name, one.shape) for one in found]),
                fix="record the same names and shapes for all samples",
            )
    for record, one in zip(own[0], first, strict=True):
        if isinstance(record.tensor, DTensor) or not one.shape or one.shape[0] % samples or not one.shape[0]:
            raise InspectError(
                f"The tensor recorded as {one.name!r} cannot be divided between the ranks of a pipeline",
                expected=f"a tensor of one rank with rows of its {samples} samples along dim 0, or a multiple of them",
                got=f"a {type(record.tensor).__name__} of shape {one.shape}",
                fix="record it before it is reduced over samples, or inspect with init_distributed(pipe_size=1)",
            )
    return first
