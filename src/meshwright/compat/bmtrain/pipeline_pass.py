"""Run one pass of micro-batches through pipeline stages in lock-step, inspector records included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from meshwright.comm.point_to_point import Arrival, exchange_activations
from meshwright.comm.transport import Members
from meshwright.errors import InspectError, ModelError
from meshwright.inspect import Record, captured, hand_over
from meshwright.runtime import gather_from, same_on_every_rank

States = tuple[torch.Tensor, ...]
RunBlocks = Callable[[States, Any], tuple[States, list[States]]]
"""Hidden states and arguments of a micro-batch to the hidden states after this stage and before each of its blocks."""


class PipelineRun:
    """Takes a rank's batch through all stages and brings back its result.

    Args:
        blocks: What this stage does.
        members: The ranks of the pipeline; a rank's place is its stage.
        micros: Number of micro-batches, which divides the samples of all ranks.
        lengths: Number of blocks of each stage.
        recording: Whether to bring back what blocks record, too; the same on all ranks of the world.
    """

    def __init__(
        self, blocks: RunBlocks, members: Members, micros: int, lengths: Sequence[int], *, recording: bool = False
    ) -> None:
        self._blocks, self._members, self._micros, self._lengths = blocks, members, micros, lengths
        self._records = PipelineRecords(members, micros) if recording else None
        self._stage, self._last = members.rank, members.size - 1
        self._finished: list[States] = []  # what came out of this stage's blocks, by micro-batch
        self._entered: list[list[States]] = []  # and what went into each of them
        self._error: Exception | None = None

    def __call__(
        self, chain: torch.Tensor, hidden: Sequence[torch.Tensor], arguments: Sequence[Any], with_inputs: bool
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """Run the pass.

        Args:
            chain: See :func:`meshwright.comm.point_to_point.exchange_activations`.
            hidden: This rank's, (B, …).
            arguments: Of each micro-batch.
            with_inputs: Bring back the inputs of blocks, too.

        Returns:
            The chain; this rank's last hidden states, with ``with_inputs`` followed by as many (L, B, …); and this
            rank's part of what all blocks recorded, for :meth:`hand_over`.

        Raises:
            ModelError: When a block changes the shape or dtype of a hidden state. On CPU, this and whatever else blocks
                raise is raised on every rank; on CUDA, where the host would have to wait for that, at once.
            InspectError: On every rank, for a recorded tensor that cannot be divided between them.
        """
        chain, parts = self._to_first(chain, hidden)
        like = [self._micro_like(each, self._stage - 1) for each in hidden]
        arrived: list[torch.Tensor] = []
        for tick in range(self._micros + self._last):
            made: States = ()
            if self._is_active(self._stage, tick):
                micro = tick - self._stage
                inputs = tuple(part[micro] for part in parts) if self._stage == 0 else tuple(arrived)
                made = self._run_blocks(inputs, arguments[micro], with_inputs)
            departures = [(self._stage + 1, each) for each in made] if self._stage < self._last else []
            arrivals = like if self._stage > 0 and self._is_active(self._stage - 1, tick) else []
            chain, arrived = exchange_activations(chain, departures, arrivals, self._members)
        if chain.device.type == "cpu":
            with same_on_every_rank():
                if self._error is not None:
                    raise self._error
        if self._records is not None:
            self._records.compare(like[0].shape[0])
        return self._to_owners(chain, hidden, with_inputs)

    def hand_over(self, tensors: Sequence[torch.Tensor]) -> None:
        """Record this rank's part of what blocks recorded, in the model's order; ``tensors`` stand for them."""
        if self._records is not None:
            self._records.hand_over(tensors)

    def _is_active(self, stage: int, tick: int) -> bool:
        return 0 <= tick - stage < self._micros

    def _micro_like(self, hidden: torch.Tensor, peer: int) -> Arrival:
        samples = len(hidden) * self._members.size // self._micros
        return Arrival(peer, (samples, *hidden.shape[1:]), hidden.dtype)

    def _others(self) -> list[int]:
        return [peer for peer in range(self._members.size) if peer != self._stage]

    def _to_first(
        self, chain: torch.Tensor, hidden: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, ...]]]:
        """Return the micro-batches of each hidden state on the first stage; nothing elsewhere."""
        if self._stage > 0:
            chain, _ = exchange_activations(chain, [(0, each) for each in hidden], [], self._members)
            return chain, []
        arrivals = [Arrival(peer, each.shape, each.dtype) for peer in self._others() for each in hidden]
        chain, arrived = exchange_activations(chain, [], arrivals, self._members)
        every = [*hidden, *arrived]
        whole = [torch.cat(every[index :: len(hidden)]) for index in range(len(hidden))]
        return chain, [each.chunk(self._micros) for each in whole]

    def _run_blocks(self, inputs: States, arguments: Any, with_inputs: bool) -> States:
        try:
            with captured() as records:
                made, entered = self._blocks(inputs, arguments)
            _check_kept(inputs, made)
            if self._records is not None:
                self._records.add(records)
        except Exception as error:
            if inputs[0].device.type != "cpu":
                raise
            # The next stage waits for something; the error is told when all have arrived.
            self._error, made, entered = self._error or error, inputs, []
        self._finished.append(made)
        if with_inputs:
            self._entered.append(entered)
        return made

    def _to_owners(
        self, chain: torch.Tensor, hidden: Sequence[torch.Tensor], with_inputs: bool
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """Every rank gets what belongs to its own samples, from all stages that have some of it."""
        mine = self._by_owner(with_inputs)
        departures = [(peer, each) for peer in self._others() for each in mine[peer]]
        arrivals = [each for peer in self._others() for each in self._owned_by_me(peer, hidden, with_inputs)]
        chain, arrived = exchange_activations(chain, departures, arrivals, self._members)
        outputs: list[torch.Tensor] = []
        inputs: list[list[torch.Tensor]] = []
        recorded: list[torch.Tensor] = []
        rest, count = iter(arrived), len(hidden)
        for stage in range(self._members.size):
            owned = len(self._owned_by_me(stage, hidden, with_inputs))
            parts = iter(mine[stage] if stage == self._stage else list(islice(rest, owned)))
            outputs += islice(parts, count if stage == self._last else 0)
            if with_inputs:
                inputs.append(list(islice(parts, count)))
            recorded += parts
        return chain, [*outputs, *(torch.cat(stages) for stages in zip(*inputs, strict=True))], recorded

    def _by_owner(self, with_inputs: bool) -> list[list[torch.Tensor]]:
        """Return what this stage has for each rank.

        On the last one hidden states, then inputs of its blocks, then records.
        """
        size = self._members.size
        mine: list[list[torch.Tensor]] = [[] for _ in range(size)]
        if self._stage == self._last:
            for micros in zip(*self._finished, strict=True):
                for owner, part in enumerate(torch.cat(micros).chunk(size)):
                    mine[owner].append(part)
        if with_inputs:
            # Micro-batches of blocks of states, to states of blocks of micro-batches.
            for blocks in zip(*(zip(*entered, strict=True) for entered in self._entered), strict=True):
                whole = torch.cat([torch.stack(blocks_of_one) for blocks_of_one in blocks], dim=1)
                for owner, part in enumerate(whole.chunk(size, dim=1)):
                    mine[owner].append(part)
        for whole in self._records.joined() if self._records is not None else ():
            for owner, part in enumerate(whole.chunk(size)):
                mine[owner].append(part)
        return mine

    def _owned_by_me(self, peer: int, hidden: Sequence[torch.Tensor], with_inputs: bool) -> list[Arrival]:
        outputs = [Arrival(peer, each.shape, each.dtype) for each in hidden] if peer == self._last else []
        length = self._lengths[peer]
        inputs = [Arrival(peer, (length, *each.shape), each.dtype) for each in hidden if with_inputs]
        return outputs + inputs + (self._records.arrivals(peer) if self._records is not None else [])


def _check_kept(inputs: States, made: States) -> None:
    before, after = ([(tuple(each.shape), each.dtype) for each in states] for states in (inputs, made))
    if before != after:
        raise ModelError(
            "The blocks of a pipeline change the shape or dtype of a hidden state",
            expected=str(before),
            got=str(after),
            fix="keep what flows from block to block alike; put layers that change it outside the list",
        )


# --- What the blocks of a pipeline record for an inspector, on its way to the ranks whose samples it is of.
#
# A stage records a tensor once for each micro-batch, of samples of all ranks. Joined along dim 0 and divided, every
# rank gets what it would have recorded had it run all blocks on its own batch. A loss may be built from it: gradients
# travel back. Statistics are taken where the tensor was recorded, for only there all of its gradient arrives.


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
        """Take what this stage recorded in its next micro-batch."""
        self._own.append(records)

    def compare(self, samples: int) -> None:
        """Tell all ranks what each has, when the last micro-batch has passed. Collective over the world.

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
        """Return what a rank gets of a stage's tensors."""
        size = self._members.size
        return [
            Arrival(stage, (one.shape[0] * self._micros // size, *one.shape[1:]), one.dtype)
            for one in self._stages[stage]
        ]

    def hand_over(self, tensors: Sequence[torch.Tensor]) -> None:
        """Pass this rank's part of everything on to the inspector, in the order of stages."""
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
