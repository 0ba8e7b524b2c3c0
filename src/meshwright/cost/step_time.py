"""Seconds of the simulated step: one rank block by block, then all streams and pipeline ranks together.

And, before the first one, memory and seconds of building the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshwright.cost.calibration import Calibration, fitted
from meshwright.cost.cluster import Cluster
from meshwright.cost.device_time import (
    NO_COPIES,
    Machine,
    Network,
    OffloadTime,
    accumulated_bytes,
    backward_s,
    collective_s,
    forward_s,
    group_of,
    launched_s,
    offload_time,
    offloaded_shares,
    ring_s,
    update_s,
    weights_s,
)
from meshwright.cost.rank_memory import held_bytes, memory, whole_numel
from meshwright.cost.scheduling import (
    SPLIT_BACKWARD,
    Event,
    Passes,
    StageTimes,
    order,
    pass_s,
    pass_tasks,
    pipeline_s,
    play_on_cores,
    schedule,
)
from meshwright.cost.step import Block, Op, Step, Traffic, axis_parts, element_bytes, gathered_itemsize

_FORWARD_SHARE = 1 / 3  # of ``Step.flops``, where only their sum is known
_MOMENTS = ("forward", "backward")
_SMALL_SHARE = 8  # of the largest messages: those that are small beside them


@dataclass(frozen=True)
class Rank:
    """Seconds of one rank's micro-batches.

    Args:
        passes: A micro-batch; it gathers and reduces what every one does, or else what the first and the last do.
        last: The last one: it reduces what is reduced once a step, too.
        inline_s: Collectives that its blocks wait for, per micro-batch.
        update_s: The optimizer's update, with what it sends.
        gathers_each: Whether every micro-batch gathers, and not the first alone.
        reduces_each: Whether every micro-batch reduces, and not the last alone.
        accumulate_s: Seconds in which every micro-batch after the first adds to the gradients.
        offload_time: Copies between memories, where something is offloaded.
    """

    passes: Passes
    last: Passes
    inline_s: float
    update_s: float
    gathers_each: bool
    reduces_each: bool
    accumulate_s: float = 0.0
    offload_time: OffloadTime = NO_COPIES


def rank_of(step: Step, cluster: Cluster, known: Calibration) -> Rank:
    """Compute the seconds of one rank's micro-batches on a cluster."""
    efficiency = known.of(cluster.device.efficiency)
    machine = Machine(cluster.device, efficiency, known.constants, cluster.num_devices)
    network = Network(cluster, efficiency, known.constants)
    inline = {moment: inline_s(step, network, moment) for moment in _MOMENTS}
    hidden = [each for each in step.traffic if each.hidden and each.moment != "update" and each.kind != "send"]
    gathers_each = any(each.per_micro_batch for each in hidden if _gathers(each))
    reduces_each = any(each.per_micro_batch for each in hidden if not _gathers(each))
    passes, moved = _passes(step, machine, network, inline), offload_time(step, cluster)

    def reducing(wanted: Callable[[Traffic], bool]) -> Passes:
        reductions = (each for each in hidden if not _gathers(each) and wanted(each))
        seconds = sum(_of_micro_batch(step, each, network) for each in reductions)
        return _with_reduction(step, passes, seconds)

    return Rank(
        passes=reducing(lambda each: each.per_micro_batch or not reduces_each),
        last=reducing(lambda each: True),
        inline_s=inline["forward"] + inline["backward"],
        update_s=updated_s(step, machine, cluster, moved)
        + sum(one_s(step, t, network) for t in step.traffic if t.moment == "update"),
        offload_time=moved,
        gathers_each=gathers_each,
        reduces_each=reduces_each,
        accumulate_s=known.constants.accumulation
        * known.constants.in_step
        * accumulated_bytes(step, whole=not reduces_each)
        / machine.bytes_per_s,
    )


def updated_s(step: Step, machine: Machine, cluster: Cluster, moved: OffloadTime) -> float:
    """Return the seconds of the update on the device and in host memory, with the copies it waits for.

    The update of what visits the device runs beside the copies of other buckets.
    """
    here = max(update_s(step, machine), launched_s(step, machine) - _ahead_s(step, machine))
    on_host, visiting = (0.0, 0.0) if step.on_cpu else offloaded_shares(step)
    slower = machine.bytes_per_s * machine.efficiency.update / cluster.host_memory.bytes_per_s
    return here * (1 - on_host - visiting + on_host * slower) + max(here * visiting, moved.update_s)


def _ahead_s(step: Step, machine: Machine) -> float:
    """Return the host's lead over the device at the update: backward's kernels take longer than their launches."""
    if step.waits_to_update:
        return 0.0
    blocks = (block for block in step.blocks if block.name != "outside")
    return sum(
        block.count * max(0.0, _seconds(block.ops, machine)[1] - _behind_s(block.ops, machine)) for block in blocks
    )


def one_s(step: Step, traffic: Traffic, network: Network) -> float:
    """Return the seconds of a step's collectives of one kind, were they alone."""
    group = group_of(step.axes, axis_parts(traffic.axis), network.cluster.devices_per_node, step.counted_again)
    known, calls = network.constants, traffic.calls
    # How shards of gradients are reduced.
    reduction = "all_to_all" if step.on_cpu else "reduce_scatter"
    if traffic.hidden and traffic.kind in ("all_gather", reduction):
        bytes_s = collective_s(traffic.kind, traffic.bytes_per_step, group, network, 0 if known.shard_s else calls)
        return (bytes_s * known.sharded + calls * known.shard_s) / traffic.every
    seconds = collective_s(traffic.kind, traffic.bytes_per_step, group, network, calls)
    if traffic.hidden:
        seconds += calls * known.waits_s(group.size)
    if traffic.beside:
        # Products hide bytes, and no latency; on cores that compute, too, they hide none.
        moved = collective_s(traffic.kind, traffic.bytes_per_step, group, network, 0)
        seconds -= moved * (1 - (known.async_tensor if traffic.beside == "fed" else min(known.shared, 1.0)))
    return seconds / traffic.every


def _gathers(traffic: Traffic) -> bool:
    return traffic.kind == "all_gather"


def _of_micro_batch(step: Step, traffic: Traffic, network: Network) -> float:
    return one_s(step, traffic, network) / (step.num_micro_batches if traffic.per_micro_batch else 1)


def inline_s(step: Step, network: Network, moment: str) -> float:
    """Return the seconds of the collectives that a micro-batch's blocks wait for, in forward or in backward."""
    waited_for = [each for each in step.traffic if each.moment == moment and not each.hidden and each.kind != "send"]
    seconds = sum(one_s(step, each, network) for each in waited_for)
    seconds += sum(each.calls * network.constants.waits_s(step.size(each.axis)) for each in _met(waited_for))
    return seconds / step.num_micro_batches + ring_s(step, network, moment)


def _met(waited_for: Sequence[Traffic]) -> list[Traffic]:
    """Return the collectives at which ranks wait for each other.

    Small messages, such as gradients of norms, follow others at once; products run meanwhile beside some.
    """
    waited_for = [each for each in waited_for if each.beside != "others"]
    large = max((each.bytes_per_step / each.calls for each in waited_for), default=0.0) / _SMALL_SHARE
    return [each for each in waited_for if each.bytes_per_step / each.calls >= large]


def _passes(step: Step, machine: Machine, network: Network, inline: dict[str, float]) -> Passes:
    """Return the seconds in which one micro-batch computes and gathers; reductions are left at zero."""
    blocks = [block for block in step.blocks if block.name != "outside"]
    calls = {moment: _calls(step, moment) for moment in _MOMENTS}
    forward, backward, outside = _computing(step, blocks, machine, inline, calls)
    count = max(len(forward), 1)
    gathered = {
        moment: sum(
            _of_micro_batch(step, each, network)
            for each in step.traffic
            if each.hidden and _gathers(each) and each.moment == moment
        )
        for moment in _MOMENTS
    }
    share = _outside_share(step)
    return Passes(
        forward_s=tuple(forward),
        backward_s=tuple(backward),
        outside_forward_s=outside[0] + step.micro_batch_s + (0.0 if forward else inline["forward"]),
        outside_backward_s=outside[1] + (0.0 if backward else inline["backward"]),
        gather_forward_s=gathered["forward"] * (1 - share) / count,
        gather_backward_s=gathered["backward"] / count,
        reduce_s=0.0,
        gather_outside_s=gathered["forward"] * share,
        reduce_outside_s=0.0,
        interference=machine.constants.interference,
        weights_s=_weights_s(step, blocks, machine),
        gathers_ahead=step.gathers_ahead,
        shared=machine.constants.shared,
    )


def _calls(step: Step, moment: str) -> float:
    """Return the collectives per micro-batch that blocks wait for."""
    waited_for = (each for each in step.traffic if each.moment == moment and not each.hidden and each.kind != "send")
    return sum(each.calls for each in waited_for) / step.num_micro_batches


def _computing(
    step: Step, blocks: list[Block], machine: Machine, inline: dict[str, float], calls: dict[str, float]
) -> tuple[list[float], list[float], tuple[float, float]]:
    """Return the seconds of every block's forward and backward, with the collectives that blocks wait for.

    Behind them those of all that is outside of blocks. Without ops, from FLOPs alone.
    """
    slower, count = machine.constants.in_step, max(sum(block.count for block in blocks), 1)
    host = machine.constants.collective_host_s if step.collective_host_s is None else step.collective_host_s
    outside = [op for block in step.blocks if block.name == "outside" for op in block.ops if _runs_here(step, op)]
    rest = (block for block in step.blocks if block.name == "outside")
    copied = map(sum, zip((0.0, 0.0), *(_copied_s(step, block, machine) for block in rest), strict=True))
    apart = tuple(slower * (a + b) for a, b in zip(_seconds(outside, machine), copied, strict=True))
    has_ops = any(block.ops for block in step.blocks)
    whole = (0.0, 0.0) if has_ops else _from_flops(step, machine)
    if not has_ops and not blocks:
        return [], [], whole
    times: dict[str, list[float]] = {moment: [] for moment in _MOMENTS}
    for block in blocks:
        kernels = _seconds(block.ops, machine) if has_ops else (whole[0] / count, whole[1] / count)
        copies = _copied_s(step, block, machine)
        launches = _launched_s(block.ops, machine)
        for moment, busy, copied_s, launched in zip(_MOMENTS, kernels, copies, launches, strict=True):
            seconds = _block_s(slower, busy + copied_s, launched, inline[moment] / count, calls[moment] * host / count)
            times[moment] += [seconds] * block.count
    return times["forward"], times["backward"], apart  # type: ignore[return-value]


def _weights_s(step: Step, blocks: list[Block], machine: Machine) -> float:
    """Return the seconds of a micro-batch's gradients of weights, where a schedule computes them later."""
    if step.stages is None or step.stages.schedule not in SPLIT_BACKWARD:
        return 0.0
    # Blocks that run again compute all gradients at once, and so do those that are compiled.
    if step.activations is not None and (step.activations.recomputed or step.activations.in_one_part):
        return 0.0
    seconds = sum(block.count * weights_s(block.ops, machine) for block in blocks)
    return machine.constants.in_step * seconds


def _block_s(slower: float, kernels: float, launches: float, inline: float, called: float) -> float:
    """Return the seconds of one block: of its kernels and collectives, or of launching short ones."""
    # Without seconds of their launches, those of collectives hold them.
    if not called:
        return slower * max(kernels, launches) + inline
    return max(slower * kernels + inline, slower * launches + called)


def _launched_s(ops: Sequence[Op], machine: Machine) -> tuple[float, float]:
    """Return the seconds of launching a block's forward and its backward, recomputation included."""
    return sum(_launch_s(op, machine) for op in ops if op.moment != "backward"), _behind_s(ops, machine)


def _behind_s(ops: Sequence[Op], machine: Machine) -> float:
    """Return the seconds of launching a block's backward, recomputation included."""
    behind = sum(_launch_s(op, machine) for op in ops if op.moment != "forward" or op.recomputed)
    return behind + sum(_launch_s(op, machine) for op in ops if op.moment == "both" and op.recomputed)


def _launch_s(op: Op, machine: Machine) -> float:
    known = machine.constants
    return op.count * op.launches * (known.operator_s if op.traced else known.host_s)


def _seconds(ops: Sequence[Op], machine: Machine) -> tuple[float, float]:
    """Return the seconds of kernels in forward and in backward."""
    forward = backward = 0.0
    for op in ops:
        slower = machine.constants.half_in_step if op.kind != "move" and op.dtype == "half" else 1.0
        forward += slower * forward_s(op, machine)
        backward += slower * backward_s(op, machine)
    return forward, backward


def _copied_s(step: Step, block: Block, machine: Machine) -> tuple[float, float]:
    """Return the seconds of forward and of backward in which the shards of a single rank are copied.

    FSDP2 casts and copies them where it would gather them, and casts gradients where it would reduce them. Of several
    ranks that is in the seconds of their collectives.
    """
    if step.gathered == "nothing" or step.shard_axis is None or step.size(step.shard_axis) > 1:
        return 0.0, 0.0
    gathered = reduced = 0
    for parameter in (each for each in block.parameters if each.sharded):
        held = element_bytes(parameter, step.held_itemsize(parameter))
        whole, wide = gathered_itemsize(step, parameter), element_bytes(parameter, step.reduce_itemsize)
        gathered += parameter.numel * (2 * whole + (held + whole if held != whole else 0))
        reduced += parameter.numel * (whole + wide) if parameter.trainable else 0
    again = step.gathered == "unit"
    reduced_s = reduced / machine.bytes_per_s / (step.num_micro_batches if step.whole_gradients else 1)
    gathered_s = gathered / machine.bytes_per_s
    behind_s = gathered_s if again and block.name != "outside" else 0.0
    return gathered_s / (1 if again else step.num_micro_batches), behind_s + reduced_s


def _from_flops(step: Step, machine: Machine) -> tuple[float, float]:
    """Return forward's and backward's seconds as if all FLOPs were large products."""
    rate = machine.matmul_flops_per_s("half" if step.compute_itemsize == 2 else "fp32")
    whole = (step.flops or 0) / rate
    return whole * _FORWARD_SHARE, whole * (1 - _FORWARD_SHARE) + step.recompute_flops / rate


def _runs_here(step: Step, op: Op) -> bool:
    return op.on_rank is None or step.stages is None or op.on_rank == step.stages.here


def _with_reduction(step: Step, passes: Passes, seconds: float) -> Passes:
    share, count = _outside_share(step), max(len(passes.forward_s), 1)
    return dataclasses.replace(passes, reduce_s=seconds * (1 - share) / count, reduce_outside_s=seconds * share)


def _outside_share(step: Step) -> float:
    """Return the share of the parameters that lies outside the blocks."""
    sizes = [(block.name, block.count * sum(p.numel for p in block.parameters)) for block in step.blocks]
    whole = sum(size for _, size in sizes)
    inside = sum(size for name, size in sizes if name != "outside")
    return 1 - inside / whole if whole and inside else 1.0


def seconds_of(step: Step, traffic: Traffic, cluster: Cluster, known: Calibration) -> float:
    """Return the seconds of a step's collectives of one kind on a cluster, were they alone."""
    return one_s(step, traffic, Network(cluster, known.of(cluster.device.efficiency), known.constants))


# --- The whole step: streams for computing and for traffic, played against time.
#
# A rank computes its blocks on one stream. Collectives that can hide (gathers and reductions of parameters and
# gradients) run on another, in the order in which FSDP2 issues them: one block ahead in forward and in backward.
# Collectives that cannot hide (of tensor and sequence parallelism) are part of the blocks' time. Pipelines play each
# rank's times through their schedule. Of many equal blocks a few are played, and the rest is extrapolated.


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step; the parts add up to the whole."""

    step_time_s: float
    compute_s: float  # kernels of all micro-batches on the slowest rank
    inline_s: float  # collectives that its blocks wait for
    exposed_s: float  # exposed communication, and computing that it slowed down
    bubble_s: float  # waiting for other stages of a pipeline
    update_s: float
    overhead_s: float
    copies_s: float = 0.0  # exposed offload copies

    @property
    def binds(self) -> str:
        """Largest part of the step."""
        parts = {"compute": self.compute_s, "tensor or sequence collectives": self.inline_s}
        parts |= {"copies between memories": self.copies_s}
        parts |= {"data collectives": self.exposed_s, "pipeline bubble": self.bubble_s, "update": self.update_s}
        parts |= {"launch, batch and loss": self.overhead_s}
        return max(parts, key=parts.__getitem__)


def simulate(
    steps: Step | Sequence[Step], cluster: Cluster, calibration: Calibration | None = None, *, in_turn: bool = False
) -> StepTime:
    """Predict the seconds of a step on a cluster.

    Args:
        steps: The step of a rank after all ``cost`` twins; with a pipeline, of every rank of its axis.
        cluster: The cluster to run on.
        calibration: Speed of kernels and links; None: the cluster's own calibration, or else the fitted presets.
        in_turn: Whether gradients are reduced only when backward has ended, and not beside it.
    """
    every = [steps] if isinstance(steps, Step) else list(steps)
    known = calibration or cluster.calibration or fitted()
    played: dict[Step, Rank] = {}
    for step in every:
        if step not in played:
            played[step] = rank_of(step, cluster, known)
    ranks = [played[step] for step in every]
    return _together(every, ranks, cluster, known, in_turn=in_turn)


def timeline(step: Step, cluster: Cluster, calibration: Calibration | None = None) -> list[Event]:
    """Return the events of one micro-batch that gathers and reduces, forward and backward, on one rank."""
    known = calibration or cluster.calibration or fitted()
    return schedule(pass_tasks(rank_of(step, cluster, known).last, gather=True, reduce=True))


def _together(
    steps: Sequence[Step], ranks: Sequence[Rank], cluster: Cluster, known: Calibration, *, in_turn: bool
) -> StepTime:
    micro_batches = steps[0].num_micro_batches
    overhead = known.constants.step_s
    slowest = max(ranks, key=lambda each: each.passes.compute_s)
    update = max(each.update_s for each in ranks)
    if len(steps) > 1:
        busy, compute, exposed, bubble = _pipelined(steps, ranks, cluster, known, in_turn=in_turn)
    else:
        busy = _replicated(slowest, micro_batches, in_turn=in_turn)
        compute, bubble = slowest.passes.compute_s * micro_batches, 0.0
        exposed = busy - compute
    inline = slowest.inline_s * micro_batches
    accumulating = (micro_batches - 1) * max(each.accumulate_s for each in ranks)
    busy, compute = busy + accumulating, compute + accumulating
    copied = max(_copies_left_s(each, micro_batches) for each in ranks)
    whole = busy + copied + update + overhead
    return StepTime(whole, compute - inline, inline, exposed, bubble, update, overhead, copied)


def _copies_left_s(rank: Rank, micro_batches: int) -> float:
    passes = rank.passes
    return rank.offload_time.left_s(passes.forward_total_s * micro_batches, passes.backward_total_s * micro_batches)


def _replicated(rank: Rank, micro_batches: int, *, in_turn: bool) -> float:
    """Return the seconds of all micro-batches of a rank without a pipeline."""

    def one(first: bool, last: bool) -> float:
        gather, reduce = rank.gathers_each or first, rank.reduces_each or last
        passes = rank.last if last else rank.passes
        if in_turn and reduce:
            return pass_s(passes, gather=gather, reduce=False) + passes.all_reductions_s
        return pass_s(passes, gather=gather, reduce=reduce)

    if micro_batches == 1:
        return one(True, True)
    middle = one(False, False) if micro_batches > 2 else 0.0
    return one(True, False) + (micro_batches - 2) * middle + one(False, True)


def _pipelined(
    steps: Sequence[Step], ranks: Sequence[Rank], cluster: Cluster, known: Calibration, *, in_turn: bool
) -> tuple[float, float, float, float]:
    """Return the seconds until the last backward, of computing, of exposed communication, and of waiting."""
    step = steps[0]
    stages = step.stages
    assert stages is not None
    per_rank = len(stages.ranks) // (max(stages.ranks) + 1)
    times = [stage_times(each) for each in ranks]
    micro_batches = step.num_micro_batches
    slowest = max(each.forward_s + each.backward_s for each in times) * micro_batches
    whole = played_s(step, times, hop_s(step, cluster, known), known)
    rounds = 0.0 if in_turn else last_rounds(len(ranks), per_rank, micro_batches)
    once = max(_left_s(each, once_s(each), each.passes.backward_total_s * rounds) for each in ranks)
    compute = max(each.passes.compute_s for each in ranks) * micro_batches
    return whole + once, compute, once + slowest - compute, whole - slowest


def played_s(step: Step, times: Sequence[StageTimes], hop: float, known: Calibration) -> float:
    """Return the seconds until the last backward of a pipeline ends, on separate or shared cores."""
    stages = step.stages
    assert stages is not None
    per_rank, micro_batches = len(stages.ranks) // (max(stages.ranks) + 1), step.num_micro_batches
    if known.constants.per_core <= 1:
        return pipeline_s(stages.schedule, times, hop, per_rank, micro_batches)
    slowest = max(each.forward_s + each.backward_s for each in times) * micro_batches
    return max(_on_shared_cores(stages.schedule, times, hop, per_rank, micro_batches, known), slowest)


def _on_shared_cores(
    schedule: str, times: Sequence[StageTimes], hop: float, per_rank: int, micro_batches: int, known: Calibration
) -> float:
    """Return the seconds of ranks that take turns on cores; ``times`` are those of ranks that all compute at once."""
    turns = known.constants.per_core
    alone = [StageTimes(each.forward_s / turns, each.backward_s / turns) for each in times]
    cores = max(1, round(len(times) / turns))
    # These schedules leave next to nothing idle if there are enough micro-batches.
    if schedule in SPLIT_BACKWARD:
        busy = sum(each.forward_s + each.backward_s for each in alone) * micro_batches / cores
        return max(busy, pipeline_s(schedule, alone, hop, per_rank, micro_batches))
    return play_on_cores(order(schedule, len(times), per_rank, micro_batches), alone, hop, per_rank, cores)


def _left_s(rank: Rank, collectives_s: float, computing_s: float) -> float:
    """Return the exposed seconds of collectives beside computing: all of them on shared cores."""
    hidden = min(collectives_s, computing_s)
    return collectives_s - hidden * (1 - min(rank.passes.shared, 1.0))


def hop_s(step: Step, cluster: Cluster, known: Calibration) -> float:
    """Return the seconds from one stage of a pipeline to the next."""
    network = Network(cluster, known.of(cluster.device.efficiency), known.constants)
    group = group_of(step.axes, ("pipeline",), cluster.devices_per_node, step.counted_again)
    size = step.stages.boundary_bytes if step.stages is not None else None
    return collective_s("send", size or 0, group, network) + known.constants.p2p_s + known.constants.wait_s


def once_s(rank: Rank) -> float:
    """Return the seconds of a rank's collectives once a step, which only its last backward in a pipeline hides."""
    reductions = rank.last.all_reductions_s - (rank.passes.all_reductions_s if rank.reduces_each else 0.0)
    return reductions + (0.0 if rank.gathers_each else rank.passes.all_gathers_s)


def last_rounds(ranks: int, stages: int, micro_batches: int) -> float:
    """Return the number of backwards that hide a rank's reductions, which begin with its first finished stage.

    A rank with several stages takes a round of micro-batches through each in turn.
    """
    return 1 + (min(ranks, micro_batches) - 1) * (1 - 1 / stages)


def stage_times(rank: Rank) -> StageTimes:
    """Return a pipeline rank's seconds for one micro-batch, with the collectives that each one runs."""
    passes = rank.passes
    forward = passes.forward_total_s
    if rank.gathers_each:
        forward += _left_s(rank, passes.all_gathers_s, forward)
    backward = passes.backward_total_s
    if rank.reduces_each:
        backward += _left_s(rank, passes.all_reductions_s, backward)
    return StageTimes(forward, backward, passes.weights_s)


# --- Building the model, before the first step.

DRAWN_PER_S = 2e8
"""Normally distributed numbers that one core of a server draws in a second; an assumption."""


@dataclass(frozen=True)
class Building:
    """Memory and time of building a model that is born sharded, on the rank that holds most of it.

    Bytes on the host are those beside a device. Where the host is the device, they are all.
    """

    device_bytes: int  # parameters and buffers
    host_bytes_initialised: int  # of the largest tensor, which is whole while it is drawn
    host_bytes_read: int  # of this rank's part of it, which is all that is read from stored weights
    ordinary_host_bytes: int  # of the whole model, which each rank would hold if it was built before it is divided
    ranks_per_host: int
    read_bytes_per_host: int  # each byte that a rank of the host needs once
    read_s: float | None  # at the speed of the host's disks; None: unknown
    num_drawn: int  # every rank draws the numbers of all parameters: the result must not depend on the layout
    draw_s: float


def building(steps: Sequence[Step], *, ranks_per_host: int = 1, disk_bytes_per_s: float | None = None) -> Building:
    """Predict what it takes to build a model.

    Args:
        steps: Steps of a pipeline's ranks, or the one step of all ranks, after all ``cost`` twins.
        ranks_per_host: Ranks that share the memory and the disks of a host.
        disk_bytes_per_s: Rate at which a host reads its disks; None: unknown.
    """
    numel, whole_bytes = _whole_model(steps)
    found = max(steps, key=lambda step: _born_bytes(step)[0])
    held, (needed, stored) = memory(found), _born_bytes(found)
    parameters = [parameter for _, parameter in found.every_parameter()]
    on_host = needed if found.on_cpu else held.host_parameters
    read = min(whole_bytes, ranks_per_host * stored)
    return Building(
        device_bytes=needed - on_host,
        host_bytes_initialised=on_host + max((whole_numel(found, p) * p.itemsize for p in parameters), default=0),
        host_bytes_read=on_host + max((held_bytes(found, p) for p in parameters), default=0),
        ordinary_host_bytes=whole_bytes + sum(buffer.numel * buffer.itemsize for buffer in found.buffers),
        ranks_per_host=ranks_per_host,
        read_bytes_per_host=read,
        read_s=None if disk_bytes_per_s is None else read / disk_bytes_per_s,
        num_drawn=numel,
        draw_s=numel / DRAWN_PER_S,
    )


def _born_bytes(step: Step) -> tuple[int, int]:
    """Return the bytes of one rank's part of a model, wherever it is, and of the parameters in it."""
    held = memory(step)
    parameters = held.parameters + held.host_parameters
    return parameters + held.buffers, parameters


def _whole_model(steps: Sequence[Step]) -> tuple[int, int]:
    """Return the elements and bytes of all parameters; those that several pipeline ranks have count once."""
    numel = num_bytes = 0
    seen: set[str] = set()
    for step in {id(step): step for step in steps}.values():
        for block in step.blocks:
            for parameter in block.parameters:
                if not block.on_ranks and parameter.name in seen:
                    continue
                # Of a list of experts a rank has its part, each expert whole.
                listed = parameter.expert is not None and parameter.expert[0] is not None
                parts = step.size("expert") * step.size("tensor") if listed else 1
                count = block.count * parts * whole_numel(step, parameter)
                numel, num_bytes = numel + count, num_bytes + count * parameter.itemsize
        seen |= {parameter.name for block in step.blocks if not block.on_ranks for parameter in block.parameters}
    return numel, num_bytes
