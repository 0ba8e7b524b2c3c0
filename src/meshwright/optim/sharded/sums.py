"""Whole-tensor sums: every parameter asks in the same round, one flat all-reduce per mesh axis answers them all.

An update is a generator. It yields the sums that it needs, as partial sums over this rank's shards, and is sent the
whole sums back; so LAMB, which asks once, costs one all-reduce per step and axis for any number of parameters. What
sums cannot give, it asks of owners (:class:`~meshwright.optim.sharded.whole.Whole`) in the same way.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from meshwright.optim.sharded.chunk import Chunk
from meshwright.optim.sharded.layout import Axis
from meshwright.optim.sharded.presence import Presence, votes
from meshwright.optim.sharded.tensor_list import TensorList
from meshwright.optim.sharded.whole import Whole, WholeAnswers


@dataclass
class Sum:
    """A request for sums over whole tensors, one per parameter of a chunk.

    Args:
        partial: The sums over this rank's shards: a vector with one number per parameter, or a TensorList.
        over: The parameter's dims that are summed over; None for all. Only axes that split one of these are reduced.
        largest: The largest value is wanted instead of the sum.
    """

    partial: Any
    over: tuple[int, ...] | None = None
    largest: bool = False


Request = Sum | Whole
Update = Generator[Sequence[Request], list[Any], None]
"""Yields requests, is sent their answers in the same form (None for work on whole tensors, whose results are handed
out); has moved the weights when it ends."""


@dataclass
class _Running:
    """An update that waits for answers."""

    chunk: Chunk
    update: Update
    asked: Sequence[Request]


def drive(updates: Iterable[tuple[Chunk, Update]], whole_answers: WholeAnswers) -> list[Presence]:
    """Runs all updates to their end, in lock-step where they need other ranks; collective over the axes that shard.

    Chunks that no axis splits run through at once, one after the other, so that what they work on stays in the cache.

    Returns:
        Counts of gradients that have to be looked at once they have arrived from the device.

    Raises:
        ModelError: When a parameter has a gradient on some of the ranks that share it and none on others. Weights are
            as they were then.
    """
    together: list[_Running] = []
    for chunk, update in updates:
        asked = next(update, None)
        while asked is not None and not _needs_others(chunk, asked):
            _do_alone(chunk, asked)
            asked = _sent(update, asked)
        if asked is not None:
            together.append(_Running(chunk, update, asked))
    presences = votes([running.chunk for running in together if not running.chunk.is_local])
    _answer_sums(together, presences)
    for presence in presences:
        if presence.is_on_host:
            presence.check()
    while together:
        _answer_wholes(together, whole_answers)
        together = [
            _Running(running.chunk, running.update, asked)
            for running in together
            if (asked := _sent(running.update, running.asked)) is not None
        ]
        _answer_sums(together, [])
    return [presence for presence in presences if not presence.is_on_host]


def _sent(update: Update, asked: Sequence[Request]) -> Sequence[Request] | None:
    """What an update asks next when it is sent the answers."""
    try:
        return update.send([request.partial if isinstance(request, Sum) else None for request in asked])
    except StopIteration:
        return None


def _needs_others(chunk: Chunk, asked: Sequence[Request]) -> bool:
    return not chunk.is_local or any(isinstance(request, Whole) and request.is_shared(chunk) for request in asked)


def _do_alone(chunk: Chunk, asked: Sequence[Request]) -> None:
    for request in asked:
        if isinstance(request, Whole):
            request.done_alone(chunk)


def _answer_wholes(together: Sequence[_Running], answers: WholeAnswers) -> None:
    """Has all work on whole tensors done; by this rank alone where it has all of them."""
    shared: list[tuple[Chunk, Whole]] = []
    for running in together:
        for request in running.asked:
            if isinstance(request, Whole) and request.is_shared(running.chunk):
                shared.append((running.chunk, request))
            elif isinstance(request, Whole):
                request.done_alone(running.chunk)
    answers.answer(shared)


@dataclass
class _Values:
    """The tensors of one request on their way through the all-reduces."""

    tensors: list[torch.Tensor]
    axes: tuple[Axis, ...]
    request: Sum | None = field(default=None)

    @classmethod
    def of(cls, chunk: Chunk, request: Sum) -> _Values:
        partial = request.partial
        tensors = partial.tensors if isinstance(partial, TensorList) else [partial]
        axes = chunk.layout.splitting(request.over)
        if chunk.has_gradients or not axes:
            return cls(tensors, axes, request)
        device = axes[0].device_type
        return cls([torch.zeros(tensor.shape, device=device) for tensor in tensors], axes)

    def put_back(self) -> None:
        if self.request is not None:
            is_list = isinstance(self.request.partial, TensorList)
            self.request.partial = TensorList(self.tensors) if is_list else self.tensors[0]


def _answer_sums(together: Sequence[_Running], presences: Sequence[Presence]) -> None:
    """Replaces every partial sum by the whole one."""
    counts = [_Values([presence.counts], presence.axes) for presence in presences]
    for largest in (False, True):
        asked = [
            _Values.of(running.chunk, request)
            for running in together
            for request in running.asked
            if isinstance(request, Sum) and request.largest == largest
        ]
        values = [*(counts if not largest else []), *asked]
        for axis in dict.fromkeys(axis for value in values for axis in value.axes):
            _reduce([value for value in values if axis in value.axes], axis, largest)
        for value in asked:
            value.put_back()
    for presence, count in zip(presences, counts, strict=True):
        presence.arrive(count.tensors[0])


def _reduce(values: list[_Values], axis: Axis, largest: bool) -> None:
    tensors = [tensor for value in values for tensor in value.tensors]
    flat = _flat(tensors, axis.device_type)
    dist.all_reduce(flat, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=axis.group)
    parts = iter(flat.split([tensor.numel() for tensor in tensors]))
    for value in values:
        value.tensors = [
            next(parts).view(tensor.shape).to(tensor.device, non_blocking=True) for tensor in value.tensors
        ]


def _flat(tensors: list[torch.Tensor], device_type: str) -> torch.Tensor:
    """All values in one fp32 tensor on the device where ranks meet: shards in host memory visit it for the sum."""
    parts = [tensor.reshape(-1).float() for tensor in tensors]
    if len({part.device for part in parts}) > 1:
        parts = [part.to(device_type) for part in parts]
    flat = torch.cat(parts)
    return flat if flat.device.type == device_type else flat.to(device_type)
