"""Which parameters are offloaded: one rule for the real job and for the simulated step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.cost.step import Block, Parameter, Step


def pick_largest(keys: Sequence[tuple[Any, ...]], sizes: Sequence[int], budget: float) -> set[int]:
    """Takes things, the largest first, as long as they fit into what is left of a budget.

    Args:
        keys: Break ties between equal sizes, in the same way wherever the same things are asked about.
        sizes: Of each thing.
        budget: Most that the chosen may sum up to.

    Returns:
        The positions of the chosen.
    """
    picked = pick_numbers(keys, sizes, [1] * len(sizes), budget)
    return {place for place, number in enumerate(picked) if number}


def pick_numbers(
    keys: Sequence[tuple[Any, ...]], sizes: Sequence[int], counts: Sequence[int], budget: float
) -> list[int]:
    """The same of things that there are several of: how many of each are chosen.

    Args:
        keys: As of :func:`pick_largest`.
        sizes: Of one of each.
        counts: How many of each there are.
        budget: Most that the chosen may sum up to.
    """
    chosen, left = [0] * len(sizes), budget + 1e-6  # a fraction of 1 must fit in spite of rounding
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], keys[place], place)):
        size, count = sizes[place], counts[place]
        if left >= size:
            chosen[place] = min(count, int(left // size)) if size else count
            left -= chosen[place] * size
    return chosen


@dataclass
class Home:
    """How many of the equal instances of a parameter live where; every instance counts once."""

    count: int  # instances in all
    parameters: int = 0  # the parameter itself is on the host, with its gradient and states
    gradients: int = 0  # states are on the host, and gradients leave in backward
    optimizer: int = 0  # states are on the host, and gradients stay on the device until the update

    @property
    def on_device(self) -> int:
        """Instances with nothing on the host."""
        return self.count - self.parameters - self.gradients - self.optimizer

    @property
    def copied(self) -> int:
        """Instances with a copy of the parameter on the host, where it is updated."""
        return self.gradients + self.optimizer


def homes_of(step: Step) -> list[Home]:
    """The homes of the parameters of a step, in the order of ``every_parameter``."""
    homes = [Home(count) for count, _ in step.every_parameter()]
    if step.hosted is None:
        return homes
    _place_parameters(step, homes)
    listed = [parameter for _, parameter in step.every_parameter()]
    keys, sizes = [_whole_shape(step, each) for each in listed], [whole_numel(step, each) for each in listed]
    trained = [size if each.trainable else 0 for size, each in zip(sizes, listed, strict=True)]
    total = sum(home.count * size for home, size in zip(homes, trained, strict=True))
    taken = sum(home.parameters * size for home, size in zip(homes, trained, strict=True))
    left = [home.count - home.parameters if each.trainable else 0 for home, each in zip(homes, listed, strict=True)]
    hosted = pick_numbers(keys, sizes, left, step.hosted.optimizer * total - taken)
    early = [
        number if each.sharded or step.shard_axis is None else 0 for number, each in zip(hosted, listed, strict=True)
    ]
    leaving = pick_numbers(keys, sizes, early, step.hosted.gradients * total - taken)
    for home, number, gone in zip(homes, hosted, leaving, strict=True):
        home.optimizer, home.gradients = number - gone, gone
    return homes


def whole_numel(step: Step, parameter: Parameter) -> int:
    """Elements of the whole parameter, before a tensor axis divides it."""
    return parameter.numel * (step.size("tensor") if parameter.tensor_dim is not None else 1)


def _whole_shape(step: Step, parameter: Parameter) -> tuple[int, ...]:
    parts = step.size("tensor")
    return tuple(size * parts if dim == parameter.tensor_dim else size for dim, size in enumerate(parameter.shape))


def _place_parameters(step: Step, homes: list[Home]) -> None:
    """Parameters leave by unit of sharding: a block, or all that lies outside of the blocks."""
    assert step.hosted is not None
    if step.shard_axis is None or not step.hosted.parameters:
        return
    sizes, counts = [_sharded_numel(step, block) for block in step.blocks], [block.count for block in step.blocks]
    budget = step.hosted.parameters * sum(size * count for size, count in zip(sizes, counts, strict=True))
    chosen, first = pick_numbers([()] * len(sizes), sizes, counts, budget), 0
    for number, block in zip(chosen, step.blocks, strict=True):
        for offset, parameter in enumerate(block.parameters):
            if parameter.sharded:
                homes[first + offset].parameters = number
        first += len(block.parameters)


def _sharded_numel(step: Step, block: Block) -> int:
    return sum(whole_numel(step, parameter) for parameter in block.parameters if parameter.sharded)
