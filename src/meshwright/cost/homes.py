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
    chosen, left = set(), budget + 1e-6  # a fraction of 1 must fit in spite of rounding
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], keys[place], place)):
        if sizes[place] <= left:
            chosen.add(place)
            left -= sizes[place]
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
    total = sum(home.count * whole_numel(step, p) for home, p in zip(homes, listed, strict=True) if p.trainable)
    taken = sum(home.parameters * whole_numel(step, p) for home, p in zip(homes, listed, strict=True) if p.trainable)
    places = [
        place
        for place, (home, parameter) in enumerate(zip(homes, listed, strict=True))
        for _ in range(home.count - home.parameters)
        if parameter.trainable
    ]
    for place in _chosen(step, listed, places, step.hosted.optimizer * total - taken):
        homes[place].optimizer += 1
    places = [
        place
        for place, (home, parameter) in enumerate(zip(homes, listed, strict=True))
        for _ in range(home.optimizer)
        if parameter.sharded or step.shard_axis is None
    ]
    for place in _chosen(step, listed, places, step.hosted.gradients * total - taken):
        homes[place].optimizer -= 1
        homes[place].gradients += 1
    return homes


def whole_numel(step: Step, parameter: Parameter) -> int:
    """Elements of the whole parameter, before a tensor axis divides it."""
    return parameter.numel * (step.size("tensor") if parameter.tensor_dim is not None else 1)


def _chosen(step: Step, listed: list[Parameter], places: list[int], budget: float) -> list[int]:
    keys = [_whole_shape(step, listed[place]) for place in places]
    sizes = [whole_numel(step, listed[place]) for place in places]
    return [places[index] for index in pick_largest(keys, sizes, budget)]


def _whole_shape(step: Step, parameter: Parameter) -> tuple[int, ...]:
    parts = step.size("tensor")
    return tuple(size * parts if dim == parameter.tensor_dim else size for dim, size in enumerate(parameter.shape))


def _place_parameters(step: Step, homes: list[Home]) -> None:
    """Parameters leave by unit of sharding: a block, or all that lies outside of the blocks."""
    assert step.hosted is not None
    if step.shard_axis is None or not step.hosted.parameters:
        return
    units = [place for place, block in enumerate(step.blocks) for _ in range(block.count)]
    sizes = [_sharded_numel(step, step.blocks[place]) for place in units]
    chosen = [units[index] for index in pick_largest([()] * len(units), sizes, step.hosted.parameters * sum(sizes))]
    first = 0
    for place, block in enumerate(step.blocks):
        for offset, parameter in enumerate(block.parameters):
            if parameter.sharded:
                homes[first + offset].parameters = chosen.count(place)
        first += len(block.parameters)


def _sharded_numel(step: Step, block: Block) -> int:
    return sum(whole_numel(step, parameter) for parameter in block.parameters if parameter.sharded)
