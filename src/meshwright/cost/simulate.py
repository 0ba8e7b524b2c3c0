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
from meshwright.cost.passes import pass_s, pass_tasks
from meshwright.cost.pipeline import SPLIT_BACKWARD, StageTimes, order, pipeline_s
from meshwright.cost.rank import Rank, rank_of
from meshwright.cost.shared_cores import play_on_cores
from meshwright.cost.step import Step
from meshwright.cost.timeline import Event, schedule


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
    copies_s: float = 0.0  # between memories, that did not hide

    @property
    def binds(self) -> str:
        """The largest part."""
        parts = {"compute": self.compute_s, "tensor or sequence collectives": self.inline_s}
        parts |= {"copies between memories": self.copies_s}
        parts |= {"data collectives": self.exposed_s, "pipeline bubble": self.bubble_s, "update": self.update_s}
        parts |= {"launch, batch and loss": self.overhead_s}
        return max(parts, key=parts.__getitem__)


def simulate(
    steps: Step | Sequence[Step], cluster: Cluster, calibration: Calibration | None = None, *, in_turn: bool = False
) -> StepTime:
    """Seconds of a step on a cluster.

    Args:
        steps: The step of a rank after all ``cost`` twins; with a pipeline, of every rank of its axis.
        cluster: What it runs on.
        calibration: What kernels and links reach; None: what the cluster was measured to, or else the fitted presets.
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
    """The events of one micro-batch that gathers and reduces, forward and backward, on one rank."""
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
    return rank.copying.left_s(passes.forward_total_s * micro_batches, passes.backward_total_s * micro_batches)


def _replicated(rank: Rank, micro_batches: int, *, in_turn: bool) -> float:
    """All micro-batches of a rank without a pipeline, one after the other."""

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
    """Seconds until the last backward, of computing, of collectives that did not hide, and of waiting."""
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
    """Seconds until the last backward of a pipeline ends, on cores of its ranks' own or on those that they share."""
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
    """Of ranks that take turns on cores; their times are those of ranks that all compute at once."""
    turns = known.constants.per_core
    alone = [StageTimes(each.forward_s / turns, each.backward_s / turns) for each in times]
    cores = max(1, round(len(times) / turns))
    if schedule in SPLIT_BACKWARD:  # they leave next to nothing idle, where there are micro-batches enough
        busy = sum(each.forward_s + each.backward_s for each in alone) * micro_batches / cores
        return max(busy, pipeline_s(schedule, alone, hop, per_rank, micro_batches))
    return play_on_cores(order(schedule, len(times), per_rank, micro_batches), alone, hop, per_rank, cores)


def _left_s(rank: Rank, collectives_s: float, computing_s: float) -> float:
    """Of collectives beside computing, what does not hide behind it: on shared cores nothing does."""
    hidden = min(collectives_s, computing_s)
    return collectives_s - hidden * (1 - min(rank.passes.shared, 1.0))


def hop_s(step: Step, cluster: Cluster, known: Calibration) -> float:
    """Seconds from one stage of a pipeline to the next."""
    network = Network(cluster, known.of(cluster.device.efficiency), known.constants)
    group = group_of(step.axes, ("pipeline",), cluster.devices_per_node, step.counted_again)
    size = step.stages.boundary_bytes if step.stages is not None else None
    return collective_s("send", size or 0, group, network) + known.constants.p2p_s + known.constants.wait_s


def once_s(rank: Rank) -> float:
    """Gathers and reductions of a pipeline's rank once a step: as its last backward runs, and only that hides them."""
    reductions = rank.last.all_reductions_s - (rank.passes.all_reductions_s if rank.reduces_each else 0.0)
    return reductions + (0.0 if rank.gathers_each else rank.passes.all_gathers_s)


def last_rounds(ranks: int, stages: int, micro_batches: int) -> float:
    """Micro-batches' backwards behind which a rank's reductions hide: they begin with its first stage that is done.

    A rank with several stages takes a round of micro-batches through each in turn.
    """
    return 1 + (min(ranks, micro_batches) - 1) * (1 - 1 / stages)


def stage_times(rank: Rank) -> StageTimes:
    """What one micro-batch takes a rank of a pipeline, with the collectives that each one runs."""
    passes = rank.passes
    forward = passes.forward_total_s
    if rank.gathers_each:
        forward += _left_s(rank, passes.all_gathers_s, forward)
    backward = passes.backward_total_s
    if rank.reduces_each:
        backward += _left_s(rank, passes.all_reductions_s, backward)
    return StageTimes(forward, backward)
