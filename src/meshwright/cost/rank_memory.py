"""Bytes of a simulated step on one rank, by memory class, and which parameters are offloaded."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from meshwright.cost.step import (
    Block,
    Parameter,
    Placement,
    StateTensor,
    Step,
    element_bytes,
    gathered_itemsize,
    padded_bytes,
)


def balanced_owners(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Assign every item one owner, the largest first to the least loaded rank (Graham's LPT rule).

    No rank gets more than 4/3 of the fullest rank's load in the best division. Every rank computes the same.

    Returns:
        The owner of each.
    """
    loads = [0] * num_ranks
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        owners[index] = min(range(num_ranks), key=lambda rank: loads[rank])
        loads[owners[index]] += sizes[index]
    return owners


# --- Offload placement, by one rule for the real job and the simulated step.


def pick_largest(keys: Sequence[tuple[Any, ...]], sizes: Sequence[int], budget: float) -> set[int]:
    """Choose items, the largest first, as long as they fit into what is left of a budget.

    Args:
        keys: Break ties between equal sizes, in the same way wherever the same things are asked about.
        sizes: Size of each item.
        budget: Most that the chosen may sum up to.

    Returns:
        The positions of the chosen.
    """
    picked = pick_numbers(keys, sizes, [1] * len(sizes), budget)
    return {place for place, number in enumerate(picked) if number}


def pick_numbers(
    keys: Sequence[tuple[Any, ...]], sizes: Sequence[int], counts: Sequence[int], budget: float
) -> list[int]:
    """Choose how many of each kind of item fit, as :func:`pick_largest` chooses items.

    Args:
        keys: Keys as in :func:`pick_largest`.
        sizes: Size of one of each kind.
        counts: Number of each kind.
        budget: Most that the chosen may sum up to.
    """
    # The margin lets a fraction of 1 fit in spite of rounding.
    chosen, left = [0] * len(sizes), budget + 1e-6
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], keys[place], place)):
        size, count = sizes[place], counts[place]
        if left >= size:
            chosen[place] = min(count, int(left // size)) if size else count
            left -= chosen[place] * size
    return chosen


def tie_key(shape: tuple[int, ...], tensor_dim: int | None, sharded: bool) -> tuple[Any, ...]:
    """Return a key by which parameters of one size are told apart if ranks hold different parts of them.

    Args:
        shape: Shape of the whole parameter.
        tensor_dim: The dim that a tensor axis divides; None: none.
        sharded: Whether it is sharded where others are.
    """
    return shape, -1 if tensor_dim is None else tensor_dim, sharded


@dataclass
class OffloadPlacement:
    """Numbers of the equal instances of a parameter that are offloaded, by how far they are."""

    count: int  # instances in all
    parameters: int = 0  # the parameter itself is on the host, with its gradient and states
    gradients: int = 0  # states are on the host, and gradients leave in backward
    optimizer: int = 0  # states are on the host, and gradients stay on the device until the update
    visits: bool = False  # states of these visit the device for it, and gradients stay there

    @property
    def on_device(self) -> int:
        """Instances with nothing on the host."""
        return self.count - self.parameters - self.gradients - self.optimizer

    @property
    def copied(self) -> int:
        """Instances with a copy of the parameter on the host."""
        return self.gradients + self.optimizer

    @property
    def visiting(self) -> int:
        """Instances that are updated on the device, which their states visit."""
        return self.optimizer if self.visits else 0

    @property
    def updated_on_host(self) -> int:
        """Instances that the host updates."""
        return self.count - self.on_device - self.visiting


def offload_placements(step: Step) -> list[OffloadPlacement]:
    """Return the offload placement of every parameter, in the order of ``every_parameter``.

    The real job follows the same rule.
    """
    placements = [OffloadPlacement(count) for count, _ in step.every_parameter()]
    if step.offloaded is None:
        return placements
    _place_parameters(step, placements)
    listed = [parameter for _, parameter in step.every_parameter()]
    keys = [tie_key(_whole_shape(step, each), each.tensor_dim, each.sharded) for each in listed]
    sizes = [whole_numel(step, each) for each in listed]
    trained = [size if each.trainable else 0 for size, each in zip(sizes, listed, strict=True)]
    total = sum(placement.count * size for placement, size in zip(placements, trained, strict=True))
    taken = sum(placement.parameters * size for placement, size in zip(placements, trained, strict=True))
    left = [
        placement.count - placement.parameters if each.trainable else 0
        for placement, each in zip(placements, listed, strict=True)
    ]
    offloaded = pick_numbers(keys, sizes, left, step.offloaded.optimizer * total - taken)
    early = [
        number if each.sharded or step.shard_axis is None else 0 for number, each in zip(offloaded, listed, strict=True)
    ]
    leaving = pick_numbers(keys, sizes, early, step.offloaded.gradients * total - taken)
    for placement, number, gone in zip(placements, offloaded, leaving, strict=True):
        placement.optimizer, placement.gradients = number - gone, gone
        placement.visits = step.offloaded.visiting_bytes > 0
    return placements


def whole_numel(step: Step, parameter: Parameter) -> int:
    """Return the elements of the whole parameter, before a tensor or an expert axis divides it."""
    return math.prod(_whole_shape(step, parameter))


def _whole_shape(step: Step, parameter: Parameter) -> tuple[int, ...]:
    shape = list(parameter.shape)
    if parameter.tensor_dim is not None:
        shape[parameter.tensor_dim] *= step.size("tensor")
    if parameter.expert is not None and parameter.expert[0] is None:  # a stack; of a list every rank has some whole
        shape[0] *= step.size("expert") * step.size("tensor")
    return tuple(shape)


def _place_parameters(step: Step, placements: list[OffloadPlacement]) -> None:
    """Place parameters by unit of sharding: a block, or all that lies outside the blocks."""
    assert step.offloaded is not None
    if step.shard_axis is None or not step.offloaded.parameters:
        return
    sizes, counts = [_sharded_numel(step, block) for block in step.blocks], [block.count for block in step.blocks]
    budget = step.offloaded.parameters * sum(size * count for size, count in zip(sizes, counts, strict=True))
    chosen, first = pick_numbers([()] * len(sizes), sizes, counts, budget), 0
    for number, block in zip(chosen, step.blocks, strict=True):
        for offset, parameter in enumerate(block.parameters):
            if parameter.sharded:
                placements[first + offset].parameters = number
        first += len(block.parameters)


def _sharded_numel(step: Step, block: Block) -> int:
    return sum(whole_numel(step, parameter) for parameter in block.parameters if parameter.sharded)


# --- Bytes by class; exact for parameters, gradients, optimizer states and buffers.

_FP32_BYTES = 4
MEMORY_LABELS = {
    "parameters": "parameters",
    "master": "fp32 master weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "outer": "global weights and outer state",
    "average": "averaged weights",
    "buffers": "buffers",
    "activations": "activations",
    "recomputation": "activations recomputed",
    "returned": "activations brought back",
    "gathered": "gathered while computing",
    "updating": "held while updating",
    "visiting": "offloaded states under way",
    "host_parameters": "on the host: parameters",
    "host_master": "on the host: copies to update",
    "host_gradients": "on the host: gradients",
    "host_optimizer": "on the host: optimizer state",
    "host_activations": "on the host: activations",
    "host_average": "on the host: averaged weights",
    "disk_master": "on disk: copies to update",
    "disk_optimizer": "on disk: optimizer state",
}
"""The fields of :class:`Memory`, as reports name them and in their order."""

_COMPUTING = ("activations", "recomputation", "returned")  # classes of which nothing is left at the update


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank at the peak of a step, by class."""

    parameters: int
    master: int
    gradients: int
    optimizer: int
    buffers: int
    gathered: int  # whole copies of sharded parameters and gradients while a step runs
    activations: int | None  # saved by forward for backward, for one micro-batch; None: unknown
    outer: int = 0  # global weights and outer momentum of replicas that synchronise rarely
    average: int = 0  # a moving average of the weights
    recomputation: int = 0  # saved again while the largest recomputed part runs backward
    returned: int = 0  # offloaded activations that are back on the device at once
    updating: int = 0  # what the optimizer holds for a moment: at the update, when no activations are left
    visiting: int = 0  # offloaded states in a few buckets, on their way to an update on the device and back
    host_parameters: int = 0  # in host memory beside a device, or apart from the model where the host is the device
    host_master: int = 0  # copies of parameters, which the optimizer updates in their place
    host_gradients: int = 0
    host_optimizer: int = 0
    host_activations: int = 0
    host_average: int = 0
    disk_master: int = 0
    disk_optimizer: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device, where activations and the update's temporaries count as the larger of both.

        Unknown classes count 0.
        """
        return sum(filter(None, _on_device(self))) - min(sum(filter(None, _of_computing(self))), self.updating)

    @property
    def host_total(self) -> int:
        """Bytes in host memory."""
        return sum(filter(None, _on_host(self)))


_of_computing = attrgetter(*_COMPUTING)
_on_host = attrgetter(*(each.name for each in fields(Memory) if each.name.startswith("host_")))
_on_device = attrgetter(*(each.name for each in fields(Memory) if not each.name.startswith(("host_", "disk_"))))


_BytesOf = Callable[[Step, Parameter, Mapping[str, int]], int]
"""The bytes of one rank's part of a parameter on the rank at a coordinate."""
_NumberOf = Callable[[OffloadPlacement], int]


def memory(step: Step, coordinate: Mapping[str, int] | None = None) -> Memory:
    """Predict the bytes of every class on the rank at ``coordinate`` (axis name -> index; absent axes count as 0).

    Rank 0 of the sharding axis holds the most: shards are cut as ``torch.chunk`` does, the remainder last.
    """
    where, known = coordinate or {}, step.activations
    placements = offload_placements(step)
    total = functools.partial(_total, step, placements, where)
    found = Memory(
        parameters=total(held_bytes, lambda placement: placement.count - placement.parameters),
        master=total(_master_bytes, lambda placement: placement.on_device),
        gradients=total(_gradient_bytes, lambda placement: placement.on_device + placement.visiting)
        + total(held_bytes, lambda placement: placement.optimizer - placement.visiting),
        # Counters of parameters that are updated on the device stay there.
        optimizer=total(_all_state_bytes, lambda placement: placement.on_device)
        + total(_counter_bytes, lambda placement: placement.visiting),
        buffers=sum(buffer.numel * element_bytes(buffer, step.buffers_itemsize) for buffer in step.buffers),
        gathered=_gathered_bytes(step),
        activations=known.saved_bytes if known is not None else None,
        outer=_outer_bytes(step, where),
        average=total(average_bytes, lambda placement: placement.on_device),
        recomputation=known.working_bytes if known is not None else 0,
        returned=max(map(known.returned_at, range(len(known.copied_at))), default=0) if known is not None else 0,
        updating=_updating_bytes(step, placements, where),
        visiting=_visiting_bytes(step, placements, where),
        host_activations=known.offloaded_bytes if known is not None else 0,
    )
    return found if step.offloaded is None else _with_offloaded(found, total, on_disk=step.offloaded.on_disk)


def _with_offloaded(found: Memory, total: Callable[[_BytesOf, _NumberOf], int], *, on_disk: bool) -> Memory:
    """Add what is offloaded of parameters, and of their gradients and states, whose counters stay in memory."""
    master = total(copy_bytes, lambda placement: placement.copied)
    counters = total(_counter_bytes, lambda placement: placement.updated_on_host)
    states = total(_all_state_bytes, lambda placement: placement.count - placement.on_device)
    states -= total(_counter_bytes, lambda placement: placement.visiting)
    return dataclasses.replace(
        found,
        host_parameters=total(held_bytes, lambda placement: placement.parameters),
        host_master=0 if on_disk else master,
        host_gradients=total(copy_bytes, lambda placement: placement.copied - placement.visiting)
        + total(_gradient_bytes, lambda placement: placement.parameters),
        host_optimizer=counters if on_disk else states,
        host_average=total(average_bytes, lambda placement: placement.count - placement.on_device),
        disk_master=master if on_disk else 0,
        disk_optimizer=states - counters if on_disk else 0,
    )


def _total(
    step: Step,
    placements: Sequence[OffloadPlacement],
    where: Mapping[str, int],
    bytes_of: _BytesOf,
    number_of: _NumberOf,
) -> int:
    """Return the bytes of all parameters, each counted for as many of its equal instances as its placement says."""
    pairs = zip(placements, step.every_parameter(), strict=True)
    return sum(
        number * bytes_of(step, parameter, where)
        for placement, (_, parameter) in pairs
        if (number := number_of(placement))
    )


def snapshot_bytes(step: Step) -> int:
    """Return the bytes of the tensors of which a snapshot of one rank's training state consists.

    Where a parameter has an fp32 master, that is stored in its place; gradients are not stored.
    """
    known = memory(step)

    def stored(parameter: Parameter) -> int:
        has_master = step.master is not None and parameter.trainable and parameter.floating
        return copy_bytes(step, parameter) if has_master else held_bytes(step, parameter)

    weights = sum(count * stored(parameter) for count, parameter in step.every_parameter())
    states = known.optimizer + known.host_optimizer + known.disk_optimizer + known.average + known.host_average
    return weights + states + known.buffers + known.outer


def held_bytes(step: Step, parameter: Parameter, where: Mapping[str, int] | None = None) -> int:
    """Return the bytes of one rank's part of a parameter, as the model stores it."""
    placement = Placement(step.parameters.axis, step.held_itemsize(parameter))
    return _local_bytes(step, parameter, placement, where or {})


def copy_bytes(step: Step, parameter: Parameter, where: Mapping[str, int] | None = None) -> int:
    """Return the bytes of the host's copy of one rank's part of a parameter: fp32 with master weights."""
    itemsize = element_bytes(parameter, step.parameters.itemsize)
    if step.master is not None and parameter.floating:
        itemsize = max(itemsize, _FP32_BYTES)
    return math.prod(shape_on(step, parameter, step.parameters.axis, where)) * itemsize


def average_bytes(step: Step, parameter: Parameter, where: Mapping[str, int] | None = None) -> int:
    """Return the bytes of the moving average of one rank's part of a parameter; 0 without one."""
    if step.average is None or not parameter.trainable:
        return 0
    itemsize = element_bytes(parameter, step.average.itemsize or max(parameter.itemsize, _FP32_BYTES))
    return math.prod(shape_on(step, parameter, step.parameters.axis, where)) * itemsize


def state_bytes(step: Step, parameter: Parameter) -> int:
    """Return the bytes of the states of one rank's part of a parameter, without counters."""
    return sum(_state_bytes(step, parameter, state, {}) for state in parameter.states if not _is_scalar(state))


def keeps_state(step: Step, parameter: Parameter, state: StateTensor) -> bool:
    """Return whether the optimizer keeps a state at all; some exist only for parameters in half precision."""
    return not state.only_for_half or element_bytes(parameter, step.optimizer.itemsize) < _FP32_BYTES


def _is_scalar(state: StateTensor) -> bool:
    return not state.dims and state.numel_apart == 1


def local_shape(shape: tuple[int, ...], parts: int, index: int, dim: int = 0) -> tuple[int, ...]:
    """Return the shape of chunk ``index`` of ``parts`` along a dim, as ``torch.chunk`` and FSDP2 cut it.

    A scalar stays whole.
    """
    if not shape or parts == 1:
        return shape
    rows = math.ceil(shape[dim] / parts)
    return (*shape[:dim], max(0, min(shape[dim], rows * (index + 1)) - rows * index), *shape[dim + 1 :])


def shape_on(
    step: Step, parameter: Parameter, axis: str | None, where: Mapping[str, int] | None = None
) -> tuple[int, ...]:
    """Return the shape of a parameter's part on the rank at ``where`` when ``axis`` shards it (None: whole)."""
    where = where or {}
    if axis is None or not parameter.sharded:
        return parameter.shape
    return local_shape(parameter.shape, step.size(axis), step.index(axis, where), parameter.shard_dim)


def _local_bytes(step: Step, parameter: Parameter, placement: Placement, where: Mapping[str, int]) -> int:
    shape = shape_on(step, parameter, placement.axis, where)
    return math.prod(shape) * element_bytes(parameter, placement.itemsize)


def _master_bytes(step: Step, parameter: Parameter, where: Mapping[str, int]) -> int:
    if not parameter.trainable or not parameter.floating or not step.has_master(parameter):
        return 0
    axis = step.master.axis if step.master is not None else None
    return math.prod(shape_on(step, parameter, axis, where)) * _FP32_BYTES


def _gradient_bytes(step: Step, parameter: Parameter, where: Mapping[str, int]) -> int:
    return _local_bytes(step, parameter, step.gradients, where) if parameter.trainable else 0


def _all_state_bytes(step: Step, parameter: Parameter, where: Mapping[str, int]) -> int:
    return sum(_state_bytes(step, parameter, state, where) for state in parameter.states)


def _counter_bytes(step: Step, parameter: Parameter, where: Mapping[str, int]) -> int:
    return sum(_state_bytes(step, parameter, state, where) for state in parameter.states if _is_scalar(state))


def _state_bytes(step: Step, parameter: Parameter, state: StateTensor, where: Mapping[str, int]) -> int:
    shape = shape_on(step, parameter, step.optimizer.axis, where)
    # None: parameters and states are as they were given.
    updated = step.optimizer.itemsize if parameter.trainable else step.held_itemsize(parameter)
    if not keeps_state(step, parameter, state):
        return 0
    is_cast = updated is not None and parameter.floating and state.dims and not state.own_type
    itemsize = updated if is_cast and updated is not None else state.itemsize
    return math.prod(shape[dim] for dim in state.dims) * state.numel_apart * itemsize


def _updating_bytes(step: Step, placements: Sequence[OffloadPlacement], where: Mapping[str, int]) -> int:
    """Return the most bytes of temporaries on the device while one group is updated.

    Parameters of a group that are divided over another mesh are updated by themselves.
    """
    together: dict[Hashable, int] = {}
    apart: dict[Hashable, int] = {}

    def size(parameter: Parameter, tensors: tuple[StateTensor, ...]) -> int:
        return sum(_state_bytes(step, parameter, tensor, where) for tensor in tensors)

    is_divided = step.shard_axis is not None or any(p.tensor_dim is not None for _, p in step.every_parameter())
    for placement, (_, p) in zip(placements, step.every_parameter(), strict=True):
        if p.updating is not None and p.updating.only_divided and not is_divided:
            continue
        if p.updating is not None and p.trainable and placement.on_device:
            key = (p.updating.group, p.tensor_dim is not None, p.expert is not None, p.sharded)
            together[key] = together.get(key, 0) + placement.on_device * size(p, p.updating.together)
            apart[key] = max(apart.get(key, 0), size(p, p.updating.apart))
    return max((together[key] + apart[key] for key in together), default=0)


def _visiting_bytes(step: Step, placements: Sequence[OffloadPlacement], where: Mapping[str, int]) -> int:
    """Return the bytes that the device holds for the few buckets of offloaded states that are there at once."""
    fp32 = whole = 0
    for placement, (_, p) in zip(placements, step.every_parameter(), strict=True):
        if placement.visiting:
            fp32 += placement.visiting * _FP32_BYTES * math.prod(shape_on(step, p, step.parameters.axis, where))
            whole += placement.visiting * visiting_bytes(step, p, where)[0]
    if step.offloaded is None or not fp32:
        return 0
    return math.ceil(whole * min(1.0, step.offloaded.visiting_bytes / fp32))


def visiting_bytes(step: Step, parameter: Parameter, where: Mapping[str, int] | None = None) -> tuple[int, int]:
    """Return the bytes that come to the device for the update of one rank's part of a parameter, and those that leave.

    A parameter whose copy on the host has its own type is updated itself, so that only states come.
    """
    states = sum(_state_bytes(step, parameter, each, where or {}) for each in parameter.states if not _is_scalar(each))
    copied = copy_bytes(step, parameter, where)
    return states + (copied if copied != held_bytes(step, parameter, where) else 0), states + copied


def _outer_bytes(step: Step, where: Mapping[str, int]) -> int:
    outer = step.outer
    if outer is None or outer.on_host:
        return 0
    # Dealt out by the sizes of whole tensors, on which all ranks of a replica agree. Global weights lie beside the
    # weights that the optimizer updates.
    held = [
        (
            whole_numel(step, parameter),
            _wide_bytes(step, parameter, where) if step.on_cpu or number < placement.on_device else 0,
        )
        for placement, (count, parameter) in zip(offload_placements(step), step.every_parameter(), strict=True)
        for number in range(count)
        if parameter.trainable
    ]
    owners = balanced_owners([numel for numel, _ in held], step.size(outer.split_axis))
    own = where.get(outer.split_axis or "", 0)
    return outer.num_tensors * sum(size for (_, size), owner in zip(held, owners, strict=True) if owner == own)


def _wide_bytes(step: Step, parameter: Parameter, where: Mapping[str, int]) -> int:
    return math.prod(shape_on(step, parameter, step.parameters.axis, where)) * max(parameter.itemsize, _FP32_BYTES)


def _gathered_bytes(step: Step) -> int:
    """Return the bytes of whole parameters and gradients that live at once beside the shards.

    ``unit``: parameters outside blocks stay whole through a step, and two blocks are whole at once (the one that runs
    and the prefetched one). ``model``: all are whole from forward to backward. Gradients of two units are whole at once
    (computed, and being reduced), or all of them while they accumulate.
    """
    gradients = whole_gradients(step)
    largest = max((size for _, size in gradients), default=0)
    if step.whole_gradients and step.num_micro_batches > 1:
        return whole_weights_bytes(step) + sum(block.count * size for block, size in gradients) + largest
    return whole_weights_bytes(step) + 2 * largest


def whole_weights_bytes(step: Step) -> int:
    """Return the bytes of whole copies of sharded parameters that live at once."""
    weights = whole_weights(step)
    if step.gathered == "model":
        return sum(block.count * size for block, size in weights)
    inside = [size for block, size in weights if block.name != "outside"]
    # Prefetched weights of the next block are in that memory, which is counted apart.
    at_once = 1 if step.shards_in_memory else 2
    return sum(size for block, size in weights if block.name == "outside") + at_once * max(inside, default=0)


def whole_weights(step: Step, *, by_unit: bool = False) -> list[tuple[Block, int]]:
    """Return every distinct block with the bytes of its gathered weights.

    Args:
        step: The step.
        by_unit: Whether to list what FSDP2 exchanges at once: the divided experts of a block are a unit of their own.
    """
    if not _gathers(step):
        return []
    itemsize = functools.partial(gathered_itemsize, step)
    return [(block, _whole_bytes(step, block, itemsize)) for block in (_units(step) if by_unit else step.blocks)]


def whole_gradients(step: Step, *, by_unit: bool = False) -> list[tuple[Block, int]]:
    """Return the same of gradients before they are reduced to shards."""
    if not _gathers(step):
        return []
    reduced = functools.partial(element_bytes, itemsize=step.reduce_itemsize)
    blocks = _units(step) if by_unit else step.blocks
    return [(block, _whole_bytes(step, block, reduced, trainable_only=True)) for block in blocks]


def exchanged_in_memory(step: Step) -> int:
    """Return a rank's share of the host memory through which ranks exchange weights and gradients of shards.

    It has room for three units of gathered weights, shared by all ranks, and for one unit of each rank's gradients.
    """
    if not step.shards_in_memory:
        return 0
    gathered = sorted(
        size
        for block, size in whole_weights(step, by_unit=True)
        for _ in range(1 if block.name == "outside" else block.count)
    )
    reduced = max((size for _, size in whole_gradients(step, by_unit=True)), default=0)
    return sum(gathered[-3:]) // step.size(step.shard_axis) + reduced


def unsharded_gradients(step: Step) -> int:
    """Return the bytes of gradients that a rank keeps whole beside shards of others."""
    every = ((count, p) for count, p in step.every_parameter() if p.trainable and not p.sharded)
    return sum(count * held_bytes(step, p) for count, p in every)


def _units(step: Step) -> list[Block]:
    parts = (
        dataclasses.replace(block, parameters=tuple(p for p in block.parameters if (p.expert is None) is others))
        for block in step.blocks
        for others in (True, False)
    )
    return [part for part in parts if part.parameters]


def _gathers(step: Step) -> bool:
    """Return whether weights are whole beside their shards: on a single rank, too, where FSDP2 copies what it has."""
    return step.gathered != "nothing" and step.shard_axis is not None


def _whole_bytes(
    step: Step, block: Block, itemsize: Callable[[Parameter], int], *, trainable_only: bool = False
) -> int:
    return sum(
        padded_bytes(step, parameter, itemsize(parameter))
        for parameter in block.parameters
        if parameter.sharded and (parameter.trainable or not trainable_only)
    )
