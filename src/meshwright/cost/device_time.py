"""Seconds of a device's work: kernels, the optimizer's update, copies to host and disk, and collectives."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.cost.calibration import Constants, Efficiency
from meshwright.cost.cluster import Cluster, Device
from meshwright.cost.rank_memory import (
    average_bytes,
    copy_bytes,
    held_bytes,
    keeps_state,
    offload_placements,
    shape_on,
    state_bytes,
    visiting_bytes,
)
from meshwright.cost.step import ATTENTION_BACKWARD_FLOPS, Copy, Op, Step, element_bytes


@dataclass(frozen=True)
class Casts:
    """Bytes moved per element that is cast around the three products of a layer.

    Args:
        input: Cast of the layer's input in forward.
        weight: Cast of the weight in forward.
        gradient: Cast of the result's gradient in backward.
        input_again: Cast of the input in backward, where forward's was not kept.
        weight_again: Cast of the weight in backward, likewise.
    """

    input: float
    weight: float
    gradient: float
    input_again: float = 0.0
    weight_again: float = 0.0

    @property
    def listed(self) -> float:
        """Bytes per operand of a backward product that is listed by itself: the mean over all four operands."""
        return (self.gradient + self.input_again + self.weight_again) / 4

    def times(self, factor: float) -> Casts:
        """Scale all bytes by a factor."""
        parts = (self.input, self.weight, self.gradient, self.input_again, self.weight_again)
        return Casts(*(factor * part for part in parts))


# Both backward products cast what they take anew, their shared gradient twice.
_EACH = Casts(3, 3, 6, 3, 3)
# Transformer Engine casts a tensor once for all products that take it. ``delayed`` reads 2 bytes and writes one in each
# of two layouts, with the largest value found on the way; ``current`` finds that in a pass of its own (2 more). What
# the documentation's timings of 12 products leave when those of products already cast are taken off (gemm_profiling of
# 2.13: 15,872 tokens through layers of 4096 and 16384 on B300 and H200) is 3 to 4 bytes an element for ``delayed``, 6
# to 7 for ``current``, 5 for blocks of 32 (``blocks``) and 8 for 4 bits with their transforms (``nvfp4``), of memory
# that reaches 0.9 of what is stated. torchao's layers keep inputs as they are; compiled, ``tensorwise`` reads a tensor
# for its largest value and once more, and writes the gradient in two layouts.
CASTS: Mapping[str, Casts] = {
    "delayed": Casts(4, 4, 4),
    "current": Casts(6, 6, 6),
    "blocks": Casts(5, 5, 5),
    "nvfp4": Casts(8, 8, 8),
    "tensorwise": Casts(5, 5, 6, 5, 5),
    "rowwise": _EACH,
    "mxfp8": _EACH,
}
"""Casts of products in 8 and 4 bits, by ``Op.scaling``."""


def casts_of(op: Op, rowwise_bytes: float) -> Casts:
    """Return the casts of a product; all zero unless it runs in 8 or 4 bits.

    Args:
        op: A product.
        rowwise_bytes: Bytes that scales by rows move beside each cast.
    """
    if op.dtype not in ("fp8", "fp4"):
        return Casts(0, 0, 0)
    known = CASTS.get(op.scaling, _EACH)
    if op.scaling == "rowwise":
        known = known.times(1 + rowwise_bytes / _EACH.input)
    return known if op.casts_weight else Casts(known.input, 0, known.gradient, known.input_again)


# --- Seconds of one kernel: matrix products, fused attention and kernels bound by memory, forward and backward.
#
# A kernel takes the time of its arithmetic plus that of its bytes plus a gap. The sum, rather than the larger of the
# two (a roofline), is what a tile's prologue and epilogue and the spread between its first and last block cost;
# products of narrow matrices reach less of the peak for it.

_HEAD_WIDTH = 128  # that ``Efficiency.attention`` is stated for
# The first generation's, in Triton, is 1.3 to 1.5 times slower than the second in forward and twice in backward (Dao
# 2023, §4.1, from memory). That it gains nothing from wide heads is what llm-foundry's runs show.
_FLASH1_BACKWARD = 0.7
_ALIGNED = 8  # elements of 16 bytes, which tensor cores' loads move at once
_BLOCKS = ("blocks", "mxfp8")  # a scale for each 32 elements
_ITEMSIZE = {"fp32": (4, 4), "half": (2, 2), "fp8": (1, 2), "fp4": (0.5, 2)}  # of inputs and outputs in memory


@dataclass(frozen=True)
class Machine:
    """A device with its efficiencies and constants: all that a kernel's time depends on."""

    device: Device
    efficiency: Efficiency
    constants: Constants
    num_devices: int = 1

    @property
    def sustained(self) -> float:
        """Fraction of the peak clock that power allows in the slowest device, for which the others wait.

        The least of ``N`` normally distributed speeds lies about ``sqrt(2 ln N)`` deviations below the mean.
        """
        slowest = 1 + self.constants.spread * math.sqrt(2 * math.log(self.num_devices))
        return self.device.power_fraction**self.constants.power / slowest

    def matmul_flops_per_s(self, dtype: str) -> float:
        """Return the rate of large products."""
        fraction = self.efficiency.of_matmul(dtype)
        return self.device.peak_flops_per_s(dtype) * fraction * self.sustained

    @property
    def bytes_per_s(self) -> float:
        """Rate of memory-bound kernels."""
        return self.device.bandwidth_bytes_per_s * self.efficiency.memory

    def move_s(self, num_bytes: float) -> float:
        """Return the seconds of a kernel's bytes, of which some fit into the cache."""
        cached = min(num_bytes, self.device.cache_bytes)
        return (cached / self.efficiency.cached + num_bytes - cached) / self.bytes_per_s

    def attention_flops_per_s(self, width: int, dtype: str, variant: str = "") -> float:
        """Return the rate of fused attention with heads of a width."""
        slower = self.constants.flash1 if variant == "flash1" else 1.0
        known = self.efficiency
        named = known.flash2 if variant in ("flash1", "flash2", "masked") and dtype != "fp32" else None
        named = known.masked if variant == "masked" and named is not None and known.masked is not None else named
        fraction = slower * (known.of_attention(dtype)[0] if named is None else named)
        narrow = 1.0 if variant == "flash1" else min(1.0, width / _HEAD_WIDTH) ** self.constants.narrow
        peak = self.device.peak_flops_per_s("half" if dtype in ("fp8", "fp4") else dtype)
        return peak * fraction * narrow * self.sustained


def forward_s(op: Op, machine: Machine) -> float:
    """Return the seconds of an op in forward, times its ``count``."""
    return 0.0 if op.moment == "backward" else _kernel_s(op, machine)


def _kernel_s(op: Op, machine: Machine) -> float:
    gap = machine.constants.gap_s
    if op.kind == "move":
        return op.count * (machine.move_s(op.num_bytes) + _functions_s(op, machine) + gap)
    if op.kind == "attention":
        return _attention_s(op, machine) + op.count * gap
    casts = casts_of(op, machine.constants.rowwise_bytes)
    of_input, of_weight = (casts.listed,) * 2 if op.moment == "backward" else (casts.input, casts.weight)
    cast = of_input * op.m * op.k + of_weight * op.k * op.n
    return op.count * (_matmul_s(op.m, op.n, op.k, op, machine, cast) + gap)


def backward_s(op: Op, machine: Machine) -> float:
    """Return the seconds of an op in backward, recomputation included."""
    gap = machine.constants.gap_s
    again = forward_s(op, machine) * op.recomputed if op.recomputed else 0.0
    if op.moment == "forward":
        return again
    if op.moment == "backward" and op.kind != "attention":
        return _kernel_s(op, machine)
    if op.kind == "move":
        moved = 2 * op.num_bytes if op.backward_bytes is None else op.backward_bytes
        return again + op.count * (machine.move_s(moved) + _functions_s(op, machine) + gap)
    if op.kind == "attention":
        speed = machine.efficiency.of_attention(op.dtype)[1] * (_FLASH1_BACKWARD if op.variant == "flash1" else 1.0)
        slower = ATTENTION_BACKWARD_FLOPS / speed
        return again + _attention_s(op, machine) * slower + op.count * gap
    casts = casts_of(op, machine.constants.rowwise_bytes)
    cast = casts.gradient * op.m * op.n + casts.weight_again * op.k * op.n
    of_input = _matmul_s(op.m, op.k, op.n, op, machine, cast)
    of_weight = _matmul_s(op.k, op.n, op.m, op, machine, casts.input_again * op.m * op.k)
    return again + op.count * (of_input + of_weight + 2 * gap)


def weights_s(ops: Iterable[Op], machine: Machine) -> float:
    """Return the seconds of the gradients of weights in a backward.

    Where products of backward are listed by themselves, gradients of inputs take about as long as forward, and those of
    weights what is left: half, or nothing where weights are frozen.
    """
    products = [op for op in ops if op.kind == "matmul" and op.batch == 1]
    listed = sum(backward_s(op, machine) for op in products if op.moment == "backward")
    before = sum(forward_s(op, machine) for op in products if op.moment == "forward")
    by_rule = sum(_weights_s(op, machine) for op in products if op.moment == "both")
    return by_rule + min(listed / 2, max(listed - before, 0.0))


def _weights_s(op: Op, machine: Machine) -> float:
    casts = casts_of(op, machine.constants.rowwise_bytes)
    seconds = _matmul_s(op.k, op.n, op.m, op, machine, casts.input_again * op.m * op.k)
    return op.count * (seconds + machine.constants.gap_s)


def _functions_s(op: Op, machine: Machine) -> float:
    return op.functions * machine.constants.function_s


def _matmul_s(m: int, n: int, k: int, op: Op, machine: Machine, cast_bytes: float) -> float:
    """Return the seconds of one product and the casts before it."""
    size_in, size_out = _ITEMSIZE[op.dtype]
    moved = machine.constants.tile * (size_in * (m * k + k * n) + size_out * m * n) + cast_bytes
    spent = 2 * m * n * k / (machine.matmul_flops_per_s(op.dtype) * _speed(op, machine)) + machine.move_s(moved)
    return machine.constants.product_s + op.batch * spent


def _speed(op: Op, machine: Machine) -> float:
    """Return the speed of a product relative to others of its precision."""
    early = machine.constants.early if op.variant == "early" else 1.0
    if op.dtype == "half" and is_misaligned(op):
        return early * machine.constants.misaligned
    return early * (machine.constants.blocks if op.scaling in _BLOCKS else 1.0)


def is_misaligned(product: Op) -> bool:
    """Return whether rows of a product in half precision would be no multiples of 16 bytes."""
    return bool(product.n % _ALIGNED or product.k % _ALIGNED)


def _attention_s(op: Op, machine: Machine) -> float:
    moved = 2 * op.batch * op.count * op.k * (2 * op.m + 2 * op.n)
    return op.flops / machine.attention_flops_per_s(op.k, op.dtype, op.variant) + machine.move_s(moved)


# --- The optimizer's update: bound by memory bandwidth, or by the host that launches its kernels.

_FP32_BYTES = 4


def accumulated_bytes(step: Step, *, whole: bool) -> int:
    """Return the bytes of the gradients that micro-batches add up: whole ones, or this rank's shards."""
    axis = None if whole else step.gradients.axis
    return sum(
        count * math.prod(shape_on(step, parameter, axis)) * element_bytes(parameter, step.gradients.itemsize)
        for count, parameter in step.every_parameter()
        if parameter.trainable
    )


def update_s(step: Step, machine: Machine) -> float:
    """Return the seconds of the update, bound by memory.

    Clipping reads gradients; the optimizer reads weights, gradients and state, and writes weights and state.
    """
    moved = 0
    for count, parameter in step.every_parameter():
        if not parameter.trainable:
            continue
        numel = math.prod(shape_on(step, parameter, step.optimizer.axis))
        state = sum(
            math.prod(parameter.shape[dim] for dim in each.dims) * each.itemsize
            for each in parameter.states
            if each.dims and keeps_state(step, parameter, each)
        )
        state = state * numel // max(parameter.numel, 1)
        weight = element_bytes(parameter, step.held_itemsize(parameter))
        master = _FP32_BYTES if step.has_master(parameter) else 0
        gradient = element_bytes(parameter, step.gradients.itemsize)
        moved += count * (2 * state + numel * (2 * (weight + master) + 3 * gradient))
        # It reads the updated weight, and reads and writes the average.
        if step.average is not None:
            moved += count * (numel * (master or weight) + 2 * average_bytes(step, parameter)) // step.average.every
    return moved / (machine.bytes_per_s * machine.efficiency.update)


def launched_s(step: Step, machine: Machine) -> float:
    """Return the host's time for operators that the optimizer runs for each parameter by itself."""
    if step.on_cpu:
        return 0.0
    each = sum(
        count * parameter.updating.operators
        for count, parameter in step.every_parameter()
        if parameter.trainable and parameter.updating is not None
    )
    return each * machine.constants.operator_s


# --- Copies of offloading between device, host and disk.


def copies(step: Step) -> tuple[Copy, ...]:
    """List the copies of a step on the rank that holds most; none where nothing is offloaded.

    Parameters and gradients travel in the type they are stored in. On a CPU the same bytes move within its memory.
    """
    found = (*_activations(step), *_parameters(step), *_updates(step), *_disk(step))
    return tuple(copy for copy in found if copy.bytes_per_step > 0)


def _activations(step: Step) -> tuple[Copy, ...]:
    size = step.activations.offloaded_bytes * step.num_micro_batches if step.activations is not None else 0
    return Copy("device", "host", size, "forward"), Copy("host", "device", size, "backward")


def _parameters(step: Step) -> tuple[Copy, ...]:
    """List the copies of offloaded shards: to the device for every gather, and their gradients back after reduction."""
    inside = outside = trained = 0
    names = [block.name for block in step.blocks for _ in block.parameters]
    for name, placement, (_, parameter) in zip(names, offload_placements(step), step.every_parameter(), strict=True):
        size = placement.parameters * held_bytes(step, parameter)
        inside, outside = (inside, outside + size) if name == "outside" else (inside + size, outside)
        trained += size if parameter.trainable else 0
    repeats = step.num_micro_batches if step.gathered == "unit" else 1
    reductions = 1 if step.whole_gradients else step.num_micro_batches
    return (
        Copy("host", "device", (inside + outside) * repeats, "forward"),
        Copy("host", "device", inside * repeats if step.gathered == "unit" else 0, "backward"),
        Copy("device", "host", trained * reductions, "backward"),
    )


def _updates(step: Step) -> tuple[Copy, ...]:
    early = late = come = leave = 0
    for placement, (_, parameter) in zip(offload_placements(step), step.every_parameter(), strict=True):
        early += placement.gradients * held_bytes(step, parameter)
        late += (placement.optimizer - placement.visiting) * held_bytes(step, parameter)
        if placement.visiting:
            sizes = visiting_bytes(step, parameter)
            come, leave = come + placement.visiting * sizes[0], leave + placement.visiting * sizes[1]
    reductions = 1 if step.whole_gradients else step.num_micro_batches
    return (
        Copy("device", "host", early * reductions, "backward"),
        Copy("device", "host", late + leave, "update"),
        Copy("host", "device", early + late + come, "update"),
    )


def _disk(step: Step) -> tuple[Copy, ...]:
    if step.offloaded is None or not step.offloaded.on_disk:
        return ()
    size = sum(
        placement.copied * copy_bytes(step, parameter)
        + (placement.count - placement.on_device) * state_bytes(step, parameter)
        for placement, (_, parameter) in zip(offload_placements(step), step.every_parameter(), strict=True)
    )
    return Copy("disk", "host", size, "update"), Copy("host", "disk", size, "update")


@dataclass(frozen=True)
class OffloadTime:
    """Seconds of a step's copies, were they alone.

    Args:
        forward_s: Copies beside forward, in the direction that carries more: links work in both at once.
        backward_s: Copies beside backward.
        update_s: At the update, which waits for them.
        hides: Whether they run beside computing: on a CPU they take its cores.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    update_s: float = 0.0
    hides: bool = True

    def left_s(self, forward_s: float, backward_s: float) -> float:
        """Return the exposed seconds beside so many seconds of forward and of backward."""
        if not self.hides:
            return self.forward_s + self.backward_s
        return max(0.0, self.forward_s - forward_s) + max(0.0, self.backward_s - backward_s)


NO_COPIES = OffloadTime()


def offload_time(step: Step, cluster: Cluster) -> OffloadTime:
    """Return the seconds of a step's copies on a cluster."""
    if step.offloaded is None and not (step.activations is not None and step.activations.offloaded_bytes):
        return NO_COPIES
    every = copies(step)
    forward, backward, update = (
        _copies_s([copy for copy in every if copy.moment == moment], step, cluster)
        for moment in ("forward", "backward", "update")
    )
    return OffloadTime(forward, backward, update, hides=not step.on_cpu)


def offloaded_shares(step: Step) -> tuple[float, float]:
    """Return the shares of the trainable elements whose update runs on the host, and whose states visit the device."""
    if step.offloaded is None:
        return 0.0, 0.0
    here = there = visiting = 0
    for placement, (_, parameter) in zip(offload_placements(step), step.every_parameter(), strict=True):
        if parameter.trainable:
            numel = math.prod(shape_on(step, parameter, step.optimizer.axis))
            here += placement.on_device * numel
            there += placement.updated_on_host * numel
            visiting += placement.visiting * numel
    every = here + there + visiting or 1
    return there / every, visiting / every


def _copies_s(every: Sequence[Copy], step: Step, cluster: Cluster) -> float:
    """Return the seconds of the slowest path.

    Paths are each direction of the link to the host, the host's memory under both, and the disk.
    """
    ways: dict[tuple[str, ...], float] = {}
    for copy in every:
        way: tuple[str, ...]
        if "disk" in (copy.source, copy.target):
            way, seconds = ("disk",), cluster.disk.latency_s + copy.bytes_per_step / cluster.disk.bytes_per_s
        elif step.on_cpu:  # within one memory: read and written
            way, seconds = ("host",), 2 * copy.bytes_per_step / cluster.device.bandwidth_bytes_per_s
        else:
            way, link = (copy.source, copy.target), cluster.host_share
            seconds = link.latency_s + copy.bytes_per_step / link.bytes_per_s
            ways["host",] = ways.get(("host",), 0.0) + copy.bytes_per_step / cluster.host_memory.bytes_per_s
        ways[way] = ways.get(way, 0.0) + seconds
    return max(ways.values(), default=0.0)


# --- Collectives over links of two tiers (alpha-beta).


@dataclass(frozen=True)
class Group:
    """Ranks of one mesh axis as they lie on nodes."""

    size: int
    in_node: int  # of them in one node

    @property
    def nodes(self) -> int:
        """Nodes that the group spans."""
        return math.ceil(self.size / self.in_node)


@dataclass(frozen=True)
class Network:
    """A cluster's links with what collectives reach of them."""

    cluster: Cluster
    efficiency: Efficiency
    constants: Constants

    @property
    def intra_bytes_per_s(self) -> float:
        """Rate per device inside a node, in one direction."""
        return self.cluster.intra.bytes_per_s * self.efficiency.intra

    @property
    def hop_s(self) -> float:
        """Seconds from one node to the next."""
        return self.cluster.inter.latency_s * self.constants.hop

    @property
    def inter_bytes_per_s(self) -> float:
        """Rate per device between nodes, in one direction, when all of a node's devices send."""
        return self.cluster.inter.bytes_per_s * self.efficiency.inter


def group_of(
    axes: tuple[tuple[str, int], ...],
    names: tuple[str, ...],
    devices_per_node: int,
    counted_again: tuple[str, ...] = (),
) -> Group:
    """Count the ranks along some axes, taken as one, and those of them on one node; the first axis is innermost.

    Args:
        axes: Names and sizes.
        names: Axes that are taken as one.
        devices_per_node: Number of devices in one node.
        counted_again: Axes whose ranks those behind them have, too.
    """
    stride, size, in_node = 1, 1, 1
    for name, length in axes:
        if name in names:
            size *= length
            in_node *= max(1, min(length, devices_per_node // stride))
        stride *= 1 if name in counted_again else length
    return Group(size, max(1, min(in_node, size)))


def collective_s(kind: str, num_bytes: float, group: Group, network: Network, calls: int = 1) -> float:
    """Return the seconds of ``calls`` collectives that carry ``num_bytes`` together.

    Args:
        kind: As in ``Traffic``; so is what ``num_bytes`` counts.
        num_bytes: Payload of the whole tensors; of an all-to-all, what one rank has for all.
        group: Ranks that take part. All groups of the axis run at once, so that each has its own devices' share of a
            node's links and no more.
        network: The links.
        calls: Collectives that the bytes are cut into.
    """
    if group.size == 1 or num_bytes <= 0:
        return 0.0
    overhead = calls * network.constants.call_s
    overhead += calls * network.constants.reduce_scatter_s if kind == "reduce_scatter" else 0.0
    # Count a lower efficiency as more bytes.
    num_bytes = num_bytes / network.efficiency.of_collective(kind)
    if kind == "send":
        link = network.intra_bytes_per_s if group.nodes == 1 else network.inter_bytes_per_s
        return num_bytes / link + overhead + calls * _hop_s(group, network)
    if kind == "all_to_all":
        return _all_to_all_s(num_bytes, group, network) + overhead + calls * _hop_s(group, network)
    # Pieces go from rank to rank in a pipeline: each link carries the whole.
    if kind == "broadcast":
        cards = group.in_node * network.inter_bytes_per_s
        link = network.intra_bytes_per_s if group.nodes == 1 else min(network.intra_bytes_per_s, cards)
        return num_bytes / link + overhead + calls * _ring_hops_s(group, network)
    once = _ring_s(num_bytes, group, network)
    if kind == "all_reduce":
        # NCCL takes a tree where the ring's many hops cost more than its bytes.
        return 2 * once + overhead + 2 * calls * min(_ring_hops_s(group, network), _tree_hops_s(group, network))
    return once + overhead + calls * _ring_hops_s(group, network)


def _ring_s(num_bytes: float, group: Group, network: Network) -> float:
    """Return the seconds of an all-gather or reduce-scatter.

    It runs inside nodes and between them at the same time, and the slower one counts.
    """
    inside = num_bytes * (group.size - 1) / group.size / network.intra_bytes_per_s if group.in_node > 1 else 0.0
    if group.nodes == 1:
        return inside
    # Every node takes what it lacks through the links of its devices in this group.
    across = num_bytes * (group.nodes - 1) / group.nodes / (group.in_node * network.inter_bytes_per_s)
    return max(inside, across)


def _all_to_all_s(num_bytes: float, group: Group, network: Network) -> float:
    one = num_bytes / group.size  # what one rank has for another
    inside = one * (group.in_node - 1) / network.intra_bytes_per_s
    across = one * (group.size - group.in_node) / network.inter_bytes_per_s
    return max(inside, across)


def _ring_hops_s(group: Group, network: Network) -> float:
    inside = (group.size - group.nodes) * network.cluster.intra.latency_s
    if group.nodes == 1:
        return inside
    # In each of a ring's steps some rank sends to another node.
    return inside + group.nodes * network.hop_s + (group.size - 1) * network.cluster.inter.step_s


_CHAIN = 8  # devices of a node, which is no rack


def _tree_hops_s(group: Group, network: Network) -> float:
    # NCCL's trees are chains inside a node; the switches of a rack reduce by themselves.
    inside = (min(group.in_node, _CHAIN) - 1) * network.cluster.intra.latency_s
    return inside + 2 * math.log2(group.nodes) * network.hop_s if group.nodes > 1 else inside


def _hop_s(group: Group, network: Network) -> float:
    return network.cluster.intra.latency_s if group.nodes == 1 else network.hop_s


# --- The ring of a context axis: keys and values travel while ranks attend to those they have.

AXIS = "context"


def ring_s(step: Step, network: Network, moment: str) -> float:
    """Return the exposed seconds of a micro-batch's ring: what attention does not hide of keys and values.

    Args:
        step: The step after all ``cost`` twins.
        network: Links between the devices that attend.
        moment: ``"forward"`` or ``"backward"``.
    """
    sent = [each for each in step.traffic if each.moment == moment and each.axis == AXIS and each.kind == "send"]
    if not sent:
        return 0.0
    group = group_of(step.axes, (AXIS,), network.cluster.devices_per_node, step.counted_again)
    travels = sum(collective_s("send", each.bytes_per_step, group, network, each.calls) for each in sent)
    cluster = network.cluster
    machine = Machine(cluster.device, network.efficiency, network.constants, cluster.num_devices)
    seconds = forward_s if moment == "forward" else backward_s
    hides = sum(b.count * seconds(op, machine) for b in step.blocks for op in b.ops if op.kind == "attention")
    waits = sum(each.calls * network.constants.waits_s(step.size(each.axis)) for each in sent)
    return max(travels / step.num_micro_batches - hides, 0.0) + waits / step.num_micro_batches
