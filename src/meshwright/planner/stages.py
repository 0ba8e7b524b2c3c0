"""Candidate cuts by the cost twins: the time of single blocks, and what a pipeline rank holds of some of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from meshwright.cost import Activations, Block, Parameter, SavedTensor, Stages, Step, memory

Ranges = tuple[tuple[int, int], ...]


class CandidateStages:
    """Simulates ranks of a pipeline that is not cut yet.

    Args:
        finest: The step of a model cut into its single blocks: of these its blocks, parameters and buffers tell where
            they are (``on_ranks``, ``trained_on``, ``lent_to``, ``on_rank``).
        num_blocks: How many there are.
        ranks: The pipeline rank of every stage to be.
        cost: What the strategy makes of a step.
        uniform: Whether it does so with equal blocks alike, wherever they are.
    """

    def __init__(
        self, finest: Step, num_blocks: int, ranks: tuple[int, ...], cost: Callable[[Step], Step], *, uniform: bool
    ) -> None:
        self._finest, self._num_blocks, self._ranks, self._cost = finest, num_blocks, ranks, cost
        self._alike = _alike(finest, num_blocks) if uniform else tuple(range(num_blocks))
        self._needs: dict[tuple[int, tuple[tuple[int, ...], ...]], int] = {}  # of ranks with blocks of these kinds

    def flops(self, index: int) -> int:
        """Time of a block: operations of a micro-batch with recomputation; the first and last have what is around."""
        step = self._step(self._ranks[0], ((index, index + 1),))
        return (step.flops or 0) + step.recompute_flops

    def need(self, rank: int, ranges: Ranges) -> int:
        """Bytes that a rank holds whose first stages compute these blocks; unknown activations count as nothing."""
        key = rank, tuple(self._alike[first:end] for first, end in ranges)
        if key not in self._needs:
            self._needs[key] = memory(self._step(rank, ranges)).total
        return self._needs[key]

    def _step(self, rank: int, ranges: Ranges) -> Step:
        own = {index for first, end in ranges for index in range(first, end)}
        every = [(0, 0)] * len(self._ranks)
        for stage, each in zip([s for s, owner in enumerate(self._ranks) if owner == rank], ranges, strict=False):
            every[stage] = each
        finest = self._finest
        return self._cost(
            finest.replace(
                blocks=tuple(_on_rank(block, rank, max(self._ranks) + 1, own) for block in finest.blocks),
                buffers=tuple(
                    b if b.on_rank is None else dataclasses.replace(b, on_rank=rank)
                    for b in finest.buffers
                    if b.on_rank is None or b.on_rank in own
                ),
                stages=Stages(self._ranks, tuple(every), self._num_blocks, rank),
            )
        )


def _on_rank(block: Block, rank: int, ranks: int, own: set[int]) -> Block:
    counts: list[int] = [0] * ranks
    if block.on_ranks:
        counts[rank] = sum(block.on_ranks[index] for index in own)
    parameters = tuple(_placed(p, rank, own) for p in block.parameters)
    return dataclasses.replace(block, parameters=parameters, on_ranks=tuple(counts) if block.on_ranks else ())


def _placed(parameter: Parameter, rank: int, own: set[int]) -> Parameter:
    if parameter.trained_on is None:
        return parameter
    trains = bool(own.intersection(parameter.trained_on))
    lent = bool(parameter.lent_to) and not trains
    return dataclasses.replace(parameter, trained_on=(rank,) if trains else (), lent_to=(rank,) if lent else ())


def _alike(finest: Step, num_blocks: int) -> tuple[int, ...]:
    """A number for every block; rows of blocks with equal numbers hold and keep the same."""
    kinds: list[list[object]] = [[] for _ in range(num_blocks)]
    known = finest.activations
    for stage in known.stages if known is not None else ():
        for group, tensor in enumerate(stage):
            for index in tensor.places:
                if 0 <= index < num_blocks:
                    # Neighbours share what one hands to the other; all share masks.
                    among = tuple(p - index for p in tensor.places) if len(tensor.places) <= 2 else group
                    kinds[index].append((among, tensor.num_bytes, _by_class(known, tensor)))
    for block in finest.blocks:
        for number, count in enumerate(block.on_ranks):
            kinds[number].append((block.name, id(block), count))
        for parameter in block.parameters:
            for number in parameter.trained_on or ():
                kinds[number].append(parameter.name)
    for buffer in finest.buffers:
        if buffer.on_rank is not None:
            kinds[buffer.on_rank].append((buffer.numel, buffer.itemsize))
    texts = [repr(sorted(map(repr, kind))) for kind in kinds]
    return tuple(texts.index(text) for text in texts)


def _by_class(known: Activations | None, tensor: SavedTensor) -> object:
    """Who saves, takes and makes a tensor, by classes: modules of one class are recomputed alike."""
    assert known is not None

    def classes(running: tuple[int, ...]) -> tuple[tuple[str, ...], ...]:
        return tuple(known.modules[module].classes for module in running)

    makers = [(operator, classes(running)) for operator, running in tensor.results]
    return [classes(running) for running in tensor.savers], classes(tensor.inputs_of), makers
