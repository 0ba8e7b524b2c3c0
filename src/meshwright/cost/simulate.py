"""The simulated step in seconds: streams for computing and for each direction of traffic, played through.

A rank computes its blocks on one stream. Collectives that can hide (gathers and reductions of parameters and gradients)
run on another, in the order in which FSDP2 issues them: one block ahead in forward and in backward. Those that cannot
(of tensor and sequence parallelism) are part of the blocks' time. Pipelines play each rank's times through their
schedule. Equal blocks are played a few times and continued.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.cost.cluster import Cluster
from meshwright.cost.collectives import Network, collective_s, group_of
from meshwright.cost.efficiency import Calibration, fitted
from meshwright.cost.kernels import Machine, backward_s, forward_s
from meshwright.cost.passes import Passes, pass_s, pass_tasks
from meshwright.cost.pipeline import StageTimes, pipeline_s
from meshwright.cost.step import Step, Traffic
from meshwright.cost.timeline import Event, schedule
from meshwright.cost.update import update_s

_BACKWARD_SHARE = 2 / 3  # of ``Step.flops``, where only their sum is known


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, and where they go: the parts add up to the whole."""

    step_time_s: float
    compute_s: float  # kernels of all micro-batches on the slowest rank
    inline_s: float  # collectives that its blocks wait for
    exposed_s: float  # gathers and reductions that did not hide, and computing that they slowed down
    bubble_s: float  # waiting for other stages of a pipeline
    update_s: float
    overhead_s: float

    @property
    def binds(self) -> str:
        """The largest part."""
        parts = {"compute": self.compute_s, "tensor or sequence collectives": self.inline_s}
        parts |= {"data collectives": self.exposed_s, "pipeline bubble": self.bubble_s, "update": self.update_s}
        return max(parts, key=parts.__getitem__)


def simulate(
    steps: Step | Sequence[Step], cluster: Cluster, calibration: Calibration | None = None, *, in_turn: bool = False
) -> StepTime:
    """Seconds of a step on a cluster.

    Args:
        steps: The step of a rank after all ``cost`` twins; with a pipeline, of every rank of its axis.
        cluster: What it runs on.
        calibration: What kernels and links reach; None: the fitted presets.
        in_turn: Whether gradients are reduced only when backward has ended, and not beside it.
    """
    every = [steps] if isinstance(steps, Step) else list(steps)
    known = calibration or fitted()
    played: dict[Step, _Played] = {}
    for step in every:
        if step not in played:
            played[step] = _play(step, cluster, known)
    ranks = [played[step] for step in every]
    return _together(every, ranks, cluster, known, in_turn=in_turn)


def timeline(step: Step, cluster: Cluster, calibration: Calibration | None = None) -> list[Event]:
    """The events of one micro-batch that gathers and reduces, forward and backward, on one rank."""
    known = calibration or fitted()
    return schedule(pass_tasks(_play(step, cluster, known).passes, gather=True, reduce=True))


@dataclass(frozen=True)
class _Played:
    """One rank's micro-batch."""

    passes: Passes
    inline_s: float
    update_s: float
    gathers_each: bool
    reduces_each: bool


def _play(step: Step, cluster: Cluster, known: Calibration) -> _Played:
    efficiency = known.of(cluster.device.efficiency)
    machine = Machine(cluster.device, efficiency, known.constants)
    network = Network(cluster, efficiency, known.constants)
    inline = {m: _seconds(step, network, moment=m, hidden=False) / step.num_micro_batches for m in _MOMENTS}
    passes = _passes(step, machine, network, inline)
    hidden = [each for each in step.traffic if each.hidden and each.moment != "update" and each.kind != "send"]
    return _Played(
        passes=passes,
        inline_s=inline["forward"] + inline["backward"],
        update_s=update_s(step, machine) + _seconds(step, network, moment="update", hidden=True),
        gathers_each=any(each.per_micro_batch for each in hidden if each.kind == "all_gather"),
        reduces_each=any(each.per_micro_batch for each in hidden if each.kind != "all_gather"),
    )


_MOMENTS = ("forward", "backward")


def _passes(step: Step, machine: Machine, network: Network, inline: dict[str, float]) -> Passes:
    """What one micro-batch computes and sends, block by block."""
    blocks = [block for block in step.blocks if block.name != "outside"]
    count = sum(block.count for block in blocks)
    forward = [sum(forward_s(op, machine) for op in block.ops) for block in blocks]
    backward = [sum(backward_s(op, machine) for op in block.ops) for block in blocks]
    outside = [op for block in step.blocks if block.name == "outside" for op in block.ops if _runs_here(step, op)]
    traced = any(block.ops for block in step.blocks)
    if not traced and step.flops:
        whole = step.flops / machine.matmul_flops_per_s("half" if step.compute_itemsize == 2 else "fp32")
        forward = [whole * (1 - _BACKWARD_SHARE) / max(count, 1)] * len(blocks)
        backward = [whole * _BACKWARD_SHARE / max(count, 1)] * len(blocks)
    total = max(count, 1)
    share_forward, share_backward = inline["forward"] / total, inline["backward"] / total
    gathers = {moment: _part(step, network, "all_gather", moment) for moment in _MOMENTS}
    reduction = _part(step, network, "reduce", "backward")
    outside_share = _outside_share(step) if count else 1.0
    return Passes(
        forward_s=tuple(
            seconds + share_forward for b, seconds in zip(blocks, forward, strict=True) for _ in range(b.count)
        ),
        backward_s=tuple(
            seconds + share_backward for b, seconds in zip(blocks, backward, strict=True) for _ in range(b.count)
        ),
        outside_forward_s=sum(forward_s(op, machine) for op in outside),
        outside_backward_s=sum(backward_s(op, machine) for op in outside),
        gather_forward_s=gathers["forward"] * (1 - outside_share) / total,
        gather_backward_s=gathers["backward"] / total,
        reduce_s=reduction * (1 - outside_share) / total,
        gather_outside_s=gathers["forward"] * outside_share,
        reduce_outside_s=reduction * outside_share,
        interference=machine.constants.interference,
    )


def _outside_share(step: Step) -> float:
    """Of the parameters, what lies outside the blocks."""
    sizes = [(block.name, block.count * sum(p.numel for p in block.parameters)) for block in step.blocks]
    whole = sum(size for _, size in sizes)
    return sum(size for name, size in sizes if name == "outside") / whole if whole else 0.0


def _runs_here(step: Step, op: object) -> bool:
    on_rank = getattr(op, "on_rank", None)
    return on_rank is None or step.stages is None or on_rank == step.stages.here


def _part(step: Step, network: Network, kind: str, moment: str) -> float:
    """Seconds of the hidden gathers or reductions of one micro-batch that has them."""
    total = 0.0
    for traffic in step.traffic:
        is_gather = traffic.kind == "all_gather"
        if (
            traffic.hidden
            and traffic.moment == moment
            and traffic.kind != "send"
            and is_gather == (kind == "all_gather")
        ):
            times = step.num_micro_batches if traffic.per_micro_batch else 1
            total += _one_s(step, traffic, network) / times
    return total


def _seconds(step: Step, network: Network, *, moment: str, hidden: bool) -> float:
    found = [t for t in step.traffic if t.moment == moment and t.hidden == hidden and t.kind != "send"]
    return sum(_one_s(step, traffic, network) for traffic in found)


def _one_s(step: Step, traffic: Traffic, network: Network) -> float:
    group = group_of(step.axes, (traffic.axis,), network.cluster.devices_per_node)
    seconds = collective_s(traffic.kind, traffic.bytes_per_step, group, network, traffic.calls) / traffic.every
    return seconds * (network.constants.async_tensor if traffic.beside else 1.0)


def _together(
    steps: Sequence[Step], ranks: Sequence[_Played], cluster: Cluster, known: Calibration, *, in_turn: bool
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
    return StepTime(busy + update + overhead, compute - inline, inline, exposed, bubble, update, overhead)


def _replicated(rank: _Played, micro_batches: int, *, in_turn: bool) -> float:
    """All micro-batches of a rank without a pipeline, one after the other."""

    def one(first: bool, last: bool) -> float:
        gather = rank.gathers_each or first
        reduce = rank.reduces_each or last
        if in_turn and reduce:
            return pass_s(rank.passes, gather=gather, reduce=False) + rank.passes.all_reductions_s
        return pass_s(rank.passes, gather=gather, reduce=reduce)

    if micro_batches == 1:
        return one(True, True)
    middle = one(False, False) if micro_batches > 2 else 0.0
    return one(True, False) + (micro_batches - 2) * middle + one(False, True)


def _pipelined(
    steps: Sequence[Step], ranks: Sequence[_Played], cluster: Cluster, known: Calibration, *, in_turn: bool
) -> tuple[float, float, float, float]:
    """Seconds until the last backward, of computing, of collectives that did not hide, and of waiting."""
    step = steps[0]
    stages = step.stages
    assert stages is not None
    network = Network(cluster, known.of(cluster.device.efficiency), known.constants)
    group = group_of(step.axes, ("pipeline",), cluster.devices_per_node)
    hop = collective_s("send", stages.boundary_bytes or 0, group, network) + known.constants.p2p_s
    per_rank = len(stages.ranks) // (max(stages.ranks) + 1)
    times = [_stage_times(each) for each in ranks]
    micro_batches = step.num_micro_batches
    slowest = max(each.forward_s + each.backward_s for each in times) * micro_batches
    whole = pipeline_s(stages.schedule, times, hop, per_rank, micro_batches)
    # Gradients are reduced when a rank's last backward runs; only that one can hide them.
    once = 0.0
    for each in ranks:
        waits = 0.0 if each.reduces_each else each.passes.all_reductions_s
        waits += 0.0 if each.gathers_each else each.passes.all_gathers_s
        hides = 0.0 if in_turn else each.passes.backward_total_s
        once = max(once, waits - hides)
    compute = max(each.passes.compute_s for each in ranks) * micro_batches
    return whole + once, compute, once + slowest - compute, whole - slowest


def _stage_times(rank: _Played) -> StageTimes:
    passes = rank.passes
    forward = passes.forward_total_s
    if rank.gathers_each:
        forward = max(forward, passes.all_gathers_s)
    backward = passes.backward_total_s
    if rank.reduces_each:
        backward = max(backward, passes.all_reductions_s)
    return StageTimes(forward, backward)
