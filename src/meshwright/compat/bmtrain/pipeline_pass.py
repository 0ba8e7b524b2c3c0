"""Run one pass of micro-batches through the stages of a ``PipelineTransformerBlockList``.

[Note: one chain of exchanges]
A pass goes through ticks in lock-step: in tick t, stage s computes micro-batch t - s and sends it on, all in one
exchange per tick (:func:`exchange_activations`). A chain tensor runs through all exchanges, so that backward visits
them in exactly the reverse order on every rank, whatever the loss was made of, and no rank waits for another in a
circle. Before the first tick samples of all ranks travel to the first stage, after the last one results travel back to
the ranks whose samples they are; tensors recorded for an inspector travel with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import Function, once_differentiable
from torch.distributed.tensor import DTensor

from meshwright.comm.transport import Members
from meshwright.errors import InspectError, ModelError
from meshwright.inspect import Record, captured, hand_over
from meshwright.runtime import gather_from, same_on_every_rank

States = tuple[torch.Tensor, ...]
RunBlocks = Callable[[States, Any], tuple[States, list[States]]]
"""Runs this stage's blocks: from the hidden states and arguments of a micro-batch to the hidden states after the stage
and those before each of its blocks."""


class PipelineRun:
    """Takes a rank's batch through all stages and brings back its result.

    Args:
        blocks: Runs this stage's blocks.
        members: The ranks of the pipeline; a rank's place is its stage.
        micros: Number of micro-batches, which divides the samples of all ranks.
        lengths: Number of blocks of each stage.
        recording: Whether to bring back recorded tensors, too; the same on all ranks of the world.
    """

    def __init__(
        self, blocks: RunBlocks, members: Members, micros: int, lengths: Sequence[int], *, recording: bool = False
    ) -> None:
        self._blocks, self._members, self._micros, self._lengths = blocks, members, micros, lengths
        self._records = PipelineRecords(members, micros) if recording else None
        self._stage, self._last = members.rank, members.size - 1
        self._finished: list[States] = []  # this stage's outputs, by micro-batch
        self._entered: list[list[States]] = []  # inputs of each of its blocks, by micro-batch
        self._error: Exception | None = None

    def __call__(
        self, chain: torch.Tensor, hidden: Sequence[torch.Tensor], arguments: Sequence[Any], with_inputs: bool
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """Run the pass.

        Args:
            chain: See :func:`exchange_activations`.
            hidden: This rank's hidden states, (B, …).
            arguments: Arguments of the blocks for each micro-batch.
            with_inputs: Bring back the inputs of blocks, too.

        Returns:
            The chain; this rank's last hidden states, with ``with_inputs`` followed by as many (L, B, …); and this
            rank's part of all recorded tensors, for :meth:`hand_over`.

        Raises:
            ModelError: When a block changes the shape or dtype of a hidden state. On CPU, this and any exception of a
                block is raised on every rank; on CUDA, where that would make the host wait, only here, at once.
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
        """Pass ``tensors``, this rank's part of what blocks recorded, to the inspector in the model's order."""
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
        """Send all ranks' samples to the first stage; return the micro-batches of each hidden state there."""
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
            # The next stage waits for a tensor of this shape; the error is raised after the last tick.
            self._error, made, entered = self._error or error, inputs, []
        self._finished.append(made)
        if with_inputs:
            self._entered.append(entered)
        return made

    def _to_owners(
        self, chain: torch.Tensor, hidden: Sequence[torch.Tensor], with_inputs: bool
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """Send results to the ranks whose samples they are, and receive this rank's from all stages."""
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
        """Return this stage's results for each rank: last hidden states, inputs of its blocks, recorded tensors."""
        size = self._members.size
        mine: list[list[torch.Tensor]] = [[] for _ in range(size)]
        if self._stage == self._last:
            for micros in zip(*self._finished, strict=True):
                for owner, part in enumerate(torch.cat(micros).chunk(size)):
                    mine[owner].append(part)
        if with_inputs:
            # From [micro-batch][block][state] to [state][block][micro-batch].
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
            fix="keep hidden states alike from block to block; put layers that change them outside the list",
        )


# --- Tensors recorded for an inspector
#
# A stage records a tensor once per micro-batch, with samples of all ranks. Joined along dim 0 and divided, every rank
# gets what it would have recorded had it run all blocks on its own batch. A loss may be built from it, since gradients
# travel back. Statistics are taken where the tensor was recorded: only there its whole gradient arrives.


class _Outline(NamedTuple):
    """Description of a tensor recorded in one micro-batch, for other ranks."""

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
    """Tensors that blocks record in one pass.

    Args:
        members: The ranks of the pipeline.
        micros: Number of micro-batches.
    """

    def __init__(self, members: Members, micros: int) -> None:
        self._members, self._micros = members, micros
        self._own: list[Sequence[Record]] = []  # records of this stage, by micro-batch
        self._stages: list[list[_Outline]] = []  # descriptions of the records of every stage

    def add(self, records: Sequence[Record]) -> None:
        """Add what this stage recorded in its next micro-batch."""
        self._own.append(records)

    def compare(self, samples: int) -> None:
        """Exchange descriptions of all records after the last micro-batch. Collective over the world.

        Args:
            samples: Samples of a micro-batch.

        Raises:
            InspectError: On every rank, when micro-batches record different tensors, or one without rows of samples.
        """
        every = gather_from(lambda: _outlines(self._own, samples))
        group, size = self._members.group, self._members.size
        self._stages = [every[dist.get_global_rank(group, place)] for place in range(size)]

    def joined(self) -> list[torch.Tensor]:
        """Return this stage's tensors, each joined over all samples of the pipeline."""
        return [torch.cat([record.tensor for record in micros]) for micros in zip(*self._own, strict=True)]

    def arrivals(self, stage: int) -> list[Arrival]:
        """Return the parts of a stage's tensors that each rank receives."""
        size = self._members.size
        return [
            Arrival(stage, (one.shape[0] * self._micros // size, *one.shape[1:]), one.dtype)
            for one in self._stages[stage]
        ]

    def hand_over(self, tensors: Sequence[torch.Tensor]) -> None:
        """Pass ``tensors``, this rank's part of all records, to the inspector in the order of stages."""
        places = [(stage, index) for stage, found in enumerate(self._stages) for index in range(len(found))]
        for (stage, index), tensor in zip(places, tensors, strict=True):
            one = self._stages[stage][index]
            # A tensor from an exchange requires a gradient even if it did not where it was recorded.
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


# --- Exchanges between many ranks at once


class Arrival(NamedTuple):
    """A tensor that a rank of the group sends to this one."""

    peer: int
    shape: Sequence[int]
    dtype: torch.dtype


def new_chain(device: torch.device) -> torch.Tensor:
    """Return the start of a chain of exchanges; see [Note: one chain of exchanges]."""
    return torch.zeros(1, device=device, requires_grad=torch.is_grad_enabled())


def exchange_activations(
    chain: torch.Tensor, departures: Sequence[tuple[int, torch.Tensor]], arrivals: Sequence[Arrival], members: Members
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Send tensors to ranks of a group while others arrive; in backward gradients travel the other way.

    Every rank of the group must make the same sequence of calls with one chain; what one rank sends another must
    expect, in the same order per pair. Then no two ranks wait for each other, neither here nor in backward, provided
    that every rank runs backward through the last call's chain.

    Args:
        chain: The result of :func:`new_chain` or of the call before.
        departures: Rank of the group (not this one) and tensor on the device.
        arrivals: The tensors to receive, in the order of the result.
        members: The group.

    Returns:
        The chain for the next call, and the received tensors; those of floating point require a gradient unless
        autograd is off.
    """
    peers, tensors = tuple(peer for peer, _ in departures), [tensor for _, tensor in departures]
    chain, *arrived = _Exchange.apply(chain, peers, tuple(arrivals), members, *tensors)
    return chain, arrived


def scale_gradients(
    chain: torch.Tensor, factor: float, tensors: Iterable[torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return copies of tensors whose gradients are multiplied by ``factor`` when the chain's backward gets here."""
    chain, *copies = _Scale.apply(chain, factor, *tensors)
    return chain, copies


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Any,
        chain: torch.Tensor,
        peers: Sequence[int],
        arrivals: Sequence[Arrival],
        members: Members,
        *tensors: Any,
    ) -> tuple[torch.Tensor, ...]:
        ctx.peers, ctx.arrivals, ctx.members = peers, arrivals, members
        ctx.sent = [Arrival(peer, each.shape, each.dtype) for peer, each in zip(peers, tensors, strict=True)]
        return chain.clone(), *_transferred(zip(peers, tensors, strict=True), arrivals, chain.device, members)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        back = zip([each.peer for each in ctx.arrivals], grads[1:], strict=True)
        returned = _transferred(back, ctx.sent, grads[0].device, ctx.members)
        return grads[0], None, None, None, *returned


class _Scale(Function):
    @staticmethod
    def forward(ctx: Any, chain: torch.Tensor, factor: float, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.factor = factor
        return chain.clone(), *(tensor.clone() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0], None, *(grad if grad is None else grad * ctx.factor for grad in grads[1:])


def _transferred(
    departures: Iterable[tuple[int, torch.Tensor]],
    arrivals: Sequence[Arrival],
    device: torch.device,
    members: Members,
) -> list[torch.Tensor]:
    buffers = [torch.empty(tuple(each.shape), dtype=each.dtype, device=device) for each in arrivals]
    moves: list[tuple[Callable[..., Any], torch.Tensor, int]] = [
        (dist.isend, tensor.contiguous(), peer) for peer, tensor in departures
    ]
    moves += [(dist.irecv, buffer, each.peer) for buffer, each in zip(buffers, arrivals, strict=True)]
    operations = [
        dist.P2POp(move, tensor, dist.get_global_rank(members.group, peer), members.group)
        for move, tensor, peer in moves
        if tensor.numel()
    ]
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    return buffers
