"""Predict strategies for a known model family from its dimensions alone."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from meshwright.cost import FP8, HALF, Calibration, Cluster, Device, Peak, Step, memory, peak
from meshwright.errors import ConfigError, ModelError, StrategyError
from meshwright.methods import (
    Resolved,
    Role,
    StepCut,
    cost_of,
    cut_step,
    find_method,
    in_phase_order,
    mixed_precision,
    resolve,
)
from meshwright.methods.pipeline.schedules import SCHEDULES, live_peaks
from meshwright.planner.family_ops import OWN, FamilyRun, Implementation
from meshwright.planner.family_steps import family_step, with_experts
from meshwright.planner.memory_budget import fit_budget
from meshwright.planner.model_shapes import BLOCK, Shape
from meshwright.planner.plans import (
    Plan,
    Subject,
    communicator_bytes,
    forecast,
    host_bytes,
    most_host_bytes,
    taken_bytes,
    usable_bytes,
    usable_host_bytes,
)
from meshwright.strategy import Strategy

if TYPE_CHECKING:
    from meshwright.methods import Checkpoint, Fp8, PipelineParallel


def check_family(shape: Shape, device: Device, resolved: Resolved, asked_micro_batches: int) -> None:
    """Refuse meshes that cannot divide the model, precisions that the device lacks, and schedules that cannot run.

    Raises:
        ModelError, StrategyError: Naming what would work.
    """
    sizes = dict(resolved.axes)
    _check_device(device, resolved)
    _check_heads(shape, sizes)
    _check_tokens(shape, resolved, sizes)
    _check_experts(shape, resolved, sizes)
    method, ranks = _pipeline_in(resolved.strategy), sizes.get("pipeline", 1)
    if method is not None and ranks > 1:
        method.check_numbers(shape.layers, ranks, asked_micro_batches)
    _check_recomputed(resolved)


def gaps_of(resolved: Resolved) -> tuple[str, ...]:
    """Return one line for each method whose effect is not predicted."""
    methods = in_phase_order(resolved.strategy)
    return tuple(f"{method.method_name}: {method.not_simulated}" for method in methods if method.not_simulated)


def _attending(impl: Implementation, resolved: Resolved) -> Implementation:
    """Return an implementation with the attention that methods bring in place of one that computes all scores.

    Most models with such have sinks, and blocks that see a window. Ranks that divide tokens attend by themselves.
    """
    divides = any(size > 1 for axis, size in resolved.axes if axis in ("sequence", "context"))
    fuses = divides or any(each.fuses_attention for each in in_phase_order(resolved.strategy))
    if impl.attention != "scores" or not fuses:
        return impl
    return dataclasses.replace(impl, attention="masked", score_moves=None)


def _pipeline_in(strategy: Strategy) -> PipelineParallel | None:
    return find_method(strategy, lambda each: each.axis == "pipeline")


def _check_device(device: Device, resolved: Resolved) -> None:
    narrow = find_method(resolved.strategy, lambda each: each.product_dtype == FP8)
    if narrow is not None and device.fp8_flops_per_s is None:
        raise StrategyError(
            f"{narrow.method_name}: a {device.name} has no 8-bit products",
            expected="a device with fp8_flops_per_s, such as H100, H200, B200, MI300X or L4",
            got=device.name,
            fix=f"leave {narrow.method_name} out, or take another device",
        )
    for method in in_phase_order(resolved.strategy):
        if "bf16" in method.compute_dtypes(sharded=True) and not device.bf16:
            raise StrategyError(
                f"{method.method_name}: a {device.name} cannot compute in bf16",
                expected="fp16, or a device with bf16",
                got=device.name,
                fix=f"use ('{method.method_name}', 'fp16')",
            )


def _check_heads(shape: Shape, sizes: Mapping[str, int]) -> None:
    tensor, sequence = sizes.get("tensor", 1), sizes.get("sequence", 1)
    kv_heads = shape.kv_heads or shape.heads
    if shape.heads % (tensor * sequence) or kv_heads % (tensor * sequence):
        raise ModelError(
            "The mesh cannot divide the model's heads",
            expected=f"tensor x sequence that divides {shape.heads} heads and {kv_heads} heads of keys and values",
            got=f"tensor={tensor}, sequence={sequence}",
            fix="choose smaller axes; a context axis divides tokens whatever the heads",
        )
    if shape.ffn_width % tensor:
        raise ModelError(
            "The tensor axis cannot divide the feed-forward layers",
            expected=f"a divisor of their width, {shape.ffn_width}",
            got=f"tensor={tensor}",
            fix="choose a smaller axis",
        )


def _check_tokens(shape: Shape, resolved: Resolved, sizes: Mapping[str, int]) -> None:
    context, sequence = sizes.get("context", 1), sizes.get("sequence", 1)
    dividing = (method for method in in_phase_order(resolved.strategy) if method.is_active(sizes))
    chunks = sequence * context * math.prod(method.chunks_per_rank for method in dividing)
    if shape.seq % chunks:
        raise ModelError(
            "The mesh cannot divide the tokens of a sample",
            expected=f"chunks of equal length: a number that divides {shape.seq}",
            got=f"{chunks} chunks for sequence={sequence}, context={context}",
            fix="choose smaller axes, or another length",
        )


def _check_experts(shape: Shape, resolved: Resolved, sizes: Mapping[str, int]) -> None:
    for method in in_phase_order(resolved.strategy) if shape.experts > 1 else ():
        method.check_experts(sizes)
    ranks = sizes.get("expert", 1)
    ranks *= sizes.get("tensor", 1) if ranks > 1 else 1
    if ranks > 1 and (shape.experts == 1 or shape.experts % ranks):
        raise ModelError(
            "The expert axis cannot divide the model's experts",
            expected=f"a divisor of {shape.experts} experts" if shape.experts > 1 else "a model with experts",
            got=f"{ranks} ranks, of the axes expert and tensor",
            fix="choose another axis",
        )


def _check_recomputed(resolved: Resolved) -> None:
    method: Checkpoint | None = find_method(resolved.strategy, lambda each: each.role is Role.RECOMPUTATION)
    wanted = method.wrap_class if method is not None else None
    if wanted is not None and not any(name.rsplit(".", 1)[-1] == BLOCK for name in wanted):
        raise ModelError(
            "checkpoint names classes that a family does not have",
            expected=f"no wrap_class, or {BLOCK}",
            got=", ".join(wanted),
            fix="leave wrap_class out: blocks are recomputed",
        )


# --- Predictions

_HALF = ("bf16", "fp16")


@dataclass(frozen=True)
class FamilyWorkload:
    """A model of a well-known family and how it is trained, before any strategy.

    Args:
        shape: The model.
        cluster: The cluster, with one rank per device.
        batch_size: Samples per step over all ranks.
        dtype: Half precision for strategies that name no precision, which get ``amp_native`` in it; None: they train
            in fp32.
        num_micro_batches: Micro-batches per step; None: 1, or as many as a pipeline takes.
        zero_level: Which method a ``zero`` axis means when none is named.
        limit_bytes: Usable device memory of a rank; None: what its device has for tensors.
        limit_is_free: Whether ``limit_bytes`` is what is free, of which communicators of the mesh will take some.
        calibration: Efficiencies of the cluster's kernels and links; None: the cluster's own.
        fused_loss: Whether the loss reads the logits as they are, and writes their gradient in their place.
        implementation: Which kernels run the family, and what they save.
        gap: Why formulas stand in for the model itself, where a user asked for that; empty: nothing to say.
    """

    shape: Shape
    cluster: Cluster
    batch_size: int
    dtype: Literal["bf16", "fp16"] | None = None
    num_micro_batches: int | None = None
    zero_level: int = 3
    limit_bytes: int | None = None
    limit_is_free: bool = False
    calibration: Calibration | None = None
    fused_loss: bool = False
    implementation: Implementation = OWN
    gap: str = ""

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.dtype not in (*_HALF, None):
            raise ConfigError(
                "A workload is not valid",
                expected=f"a batch of at least one sample, and a dtype from {', '.join(_HALF)} or None",
                got=f"batch_size={self.batch_size}, dtype={self.dtype!r}",
                fix="correct the argument",
            )

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return self.cluster.num_devices

    @property
    def half_dtype(self) -> str:
        """Return the name of half precision on the cluster's devices."""
        return self.cluster.device.half_dtype

    def plan(self, strategy: Strategy, num_micro_batches: int | None = None) -> Plan:
        """Predict one strategy.

        Args:
            strategy: The strategy; it is resolved for the cluster, as on its devices.
            num_micro_batches: Micro-batches per step; None: those of the workload.

        Raises:
            StrategyError: When its methods do not fit together or do not fit the cluster.
            ModelError: When the mesh cannot divide the model.
        """
        return self._plan(strategy, num_micro_batches, alike=False)

    def outline(self, strategy: Strategy, num_micro_batches: int | None = None) -> Plan:
        """Predict the same seconds and bytes as ``plan``, sooner for long pipelines.

        Pipeline ranks with equal work share the step of the one that needs most memory.

        Args:
            strategy: As for ``plan``.
            num_micro_batches: As for ``plan``.

        Raises:
            StrategyError, ModelError: As ``plan`` does.
        """
        return self._plan(strategy, num_micro_batches, alike=True)

    def is_too_large(self, strategy: Strategy, num_micro_batches: int | None = None) -> bool:
        """Return whether the first rank alone exceeds the limits, which is a quick check of many strategies.

        Raises:
            StrategyError, ModelError: As ``plan`` does.
        """
        resolved = self._resolved(strategy)
        batch = cut_step(resolved, num_micro_batches or self.num_micro_batches, self.batch_size)
        run = self._run(resolved, batch)
        check_family(self.shape, self.cluster.device, resolved, batch.asked)
        step = cost_of(resolved.strategy, self._before(resolved, run)[0])
        host = usable_host_bytes(self.cluster)
        taken = self._taken(step, peak(step)) + self._communicator_bytes(step)
        return taken > self._limit_bytes or (host is not None and host_bytes(step) > host)

    @property
    def _limit_bytes(self) -> int:
        return self.limit_bytes if self.limit_bytes is not None else usable_bytes(self.cluster.device)

    def _communicator_bytes(self, step: Step) -> int:
        # A limit that somebody gives is for tensors alone.
        return communicator_bytes(step) if self.limit_bytes is None or self.limit_is_free else 0

    def on(self, num_devices: int) -> FamilyWorkload:
        """Return the workload on another number of the same devices."""
        return dataclasses.replace(self, cluster=self.cluster.resized(num_devices))

    @property
    def tokens_per_sample(self) -> int:
        """Return the tokens of a sample."""
        return self.shape.seq

    def of_batch(self, batch_size: int) -> FamilyWorkload:
        """Return the workload with another number of samples per step."""
        return dataclasses.replace(self, batch_size=batch_size)

    def _plan(self, strategy: Strategy, wanted_micro_batches: int | None, *, alike: bool) -> Plan:
        resolved = self._resolved(strategy)
        batch = cut_step(resolved, wanted_micro_batches or self.num_micro_batches, self.batch_size)
        run = self._run(resolved, batch)
        check_family(self.shape, self.cluster.device, resolved, batch.asked)
        before = self._before(resolved, run)
        fitted = fit_budget(resolved.strategy, before)
        steps = tuple(_costed(fitted.strategy, before, alike=alike))
        sizes = {"samples": self.batch_size, "tokens_per_sample": self.tokens_per_sample}
        forecasted = forecast(steps, self.cluster, **sizes, calibration=self.calibration)
        taken = [self._taken(step, most) for step, most in zip(steps, forecasted.peaks, strict=True)]
        most = steps[taken.index(max(taken))]
        return Plan(
            strategy=fitted.strategy,
            step=most,
            memory=memory(most),
            limit_bytes=self._limit_bytes,
            notices=(*resolved.notices, *batch.notices, *fitted.notices),
            gaps=(*filter(None, [self.gap]), *gaps_of(resolved)),
            steps=steps if len(steps) > 1 else (),
            micro_batch=run.micro_batch,
            forecast=forecasted,
            taken_bytes=max(taken),
            communicator_bytes=self._communicator_bytes(most),
            host_bytes=most_host_bytes(steps),
            host_limit_bytes=usable_host_bytes(self.cluster),
        )

    def _resolved(self, strategy: Strategy) -> Resolved:
        if self.dtype is not None and not _is_lowered(strategy):
            strategy = strategy.with_method(mixed_precision(self.dtype))
        return _resolve(strategy, self.world, self.zero_level)

    def _run(self, resolved: Resolved, batch: StepCut) -> FamilyRun:
        strategy = resolved.strategy
        narrow: Fp8 | None = find_method(strategy, lambda each: each.product_dtype == FP8)
        precision = find_method(strategy, lambda each: each.role is Role.PRECISION)
        widens = precision is not None and precision.compute_dtypes(sharded=False).output is not None
        is_gathered = resolved.shard_axis is not None
        autocasts = not is_gathered and precision is not None and precision.compute_dtypes(sharded=False).autocast
        impl = _with_wide_logits(self.implementation) if widens else self.implementation
        impl = _attending(impl, resolved)
        impl = dataclasses.replace(
            impl,
            keeps_gathered=any(each.keeps_gathered for each in in_phase_order(strategy)),
            sums_apart=any(each.splits_backward for each in in_phase_order(strategy)),
            divides_blocks_alone=True,
            split_tokens=any(method.divides_between_layers for method in in_phase_order(strategy)),
            compiled=self.implementation.compiled or _fuses_blocks(strategy, dict(resolved.axes)),
            fused_loss=self.implementation.fused_loss or self.fused_loss,
            omits_logits=any(each.fuses_loss for each in in_phase_order(strategy)),
            scaling=narrow.recipe if narrow is not None else self.implementation.scaling,
            casts_weights=narrow is None or not narrow.all_gather,
            autocasts=bool(autocasts),
        )
        return FamilyRun(
            micro_batch=batch.samples,
            num_micro_batches=batch.micro_batches,
            dtype=FP8 if narrow is not None else HALF if _is_lowered(strategy) else "fp32",
            seq=self.shape.seq,
            stacked=_experts_here(self.shape, dict(resolved.axes)),
            exchanged=dict(resolved.axes).get("expert", 1) > 1,
            again=_run_again(strategy, self.shape.layers),
            impl=impl,
        )

    def _before(self, resolved: Resolved, run: FamilyRun) -> list[Step]:
        """Return the step of every pipeline rank before any method."""
        ranks, method = dict(resolved.axes).get("pipeline", 1), _pipeline_in(resolved.strategy)
        stages = method.ranks_of_stages(ranks) if method is not None and ranks > 1 else (0,)
        steps = family_step(self.shape, run, resolved.axes, shard_axis=resolved.shard_axis, stage_ranks=stages)
        if dict(resolved.axes).get("expert", 1) > 1:
            steps = [with_experts(step, self.shape, run) for step in steps]
        return [step.replace(on_cpu=self.cluster.device.is_host) for step in steps]

    def _taken(self, step: Step, most: Peak) -> int:
        on_host = most.memory.host_total if step.on_cpu else 0
        return taken_bytes(most.reserved_bytes, self.cluster.device) + on_host


@dataclass(frozen=True)
class FamilyModel:
    """A model of a well-known family by its dimensions, and which implementation of it is simulated.

    Args:
        name: Name for reports.
        shape: The model.
        implementation: Which kernels run it, and what they save.
        gap: See :class:`FamilyWorkload`.
    """

    name: str
    shape: Shape
    implementation: Implementation = OWN
    gap: str = ""

    def describe(self) -> dict[str, Any]:
        """See :class:`~meshwright.planner.plans.PlannedModel`."""
        return {"name": self.name, "num_parameters": self.shape.num_parameters, "seq": self.shape.seq}

    def subject(self, cluster: Cluster, samples: int, limit_bytes: int | None, limit_is_free: bool = False) -> Subject:
        """See :class:`~meshwright.planner.plans.PlannedModel`."""
        return FamilyWorkload(
            self.shape, cluster, samples, limit_bytes=limit_bytes, limit_is_free=limit_is_free,
            implementation=self.implementation, gap=self.gap,
        )  # fmt: skip


def _experts_here(shape: Shape, sizes: Mapping[str, int]) -> int:
    """Return the number of stacked experts on a rank, which beside an axis of experts a tensor axis divides, too."""
    ranks = sizes.get("expert", 1)
    return 0 if shape.experts == 1 else max(shape.experts // (ranks * sizes.get("tensor", 1) if ranks > 1 else 1), 1)


def _fuses_blocks(strategy: Strategy, sizes: Mapping[str, int]) -> bool:
    recomputes = find_method(strategy, lambda each: each.role is Role.RECOMPUTATION) is not None
    return any(each.fuses_blocks(sizes, recomputes=recomputes) for each in in_phase_order(strategy))


def _run_again(strategy: Strategy, layers: int) -> float:
    """Return about what share of the blocks' forward runs again."""
    method: Checkpoint | None = find_method(strategy, lambda each: each.role is Role.RECOMPUTATION)
    if method is None or method.memory_budget is not None:
        return 0.0
    covered = method.granularities(layers)
    return sum({"full": 1.0, "selective": 0.5, "none": 0.0}[each] for each in covered) / layers


def _with_wide_logits(impl: Implementation) -> Implementation:
    """Return an implementation whose loss takes an fp32 copy in place of the logits, and reads that."""
    if impl.logit_moves is None:
        return impl
    forward, backward = impl.logit_moves
    return dataclasses.replace(impl, wide_logits=True, logit_bytes=(4, 4), logit_moves=(forward + 10, backward + 16))


def _is_lowered(strategy: Strategy) -> bool:
    return find_method(strategy, lambda each: each.role is Role.PRECISION) is not None


@functools.lru_cache(maxsize=4096)
def _resolve(strategy: Strategy, world: int, zero_level: int) -> Resolved:
    # No device is passed, so that no method is dropped for what this process runs on.
    return resolve(strategy, world, zero_level)


def _costed(strategy: Strategy, before: Sequence[Step], *, alike: bool) -> list[Step]:
    method = _pipeline_in(strategy)
    shown: Sequence[int] = range(len(before))
    if alike and method is not None:
        shown = _shown_by(before, method.schedule)
    made = {rank: cost_of(strategy, before[rank]) for rank in dict.fromkeys(shown)}
    return [made[rank] for rank in shown]


def _shown_by(steps: Sequence[Step], schedule: str) -> Sequence[int]:
    """Return for every rank the one whose step it shares: of those with equal stages, the one that saves most.

    Ranks with parameters outside of blocks share with no other.
    """
    stages = steps[0].stages
    if stages is None:
        return range(len(steps))
    ranks, sizes = len(steps), [end - first for first, end in stages.ranges]
    micro_batches = steps[0].num_micro_batches
    few = micro_batches if schedule == "gpipe" else min(micro_batches, 2 * ranks)  # the most in flight at once
    live, waits = live_peaks(schedule, ranks, len(sizes) // ranks, few, sizes), SCHEDULES[schedule].splits_backward
    alike: dict[object, list[int]] = {}
    for rank in range(ranks):
        own = tuple(size for size, owner in zip(sizes, stages.ranks, strict=True) if owner == rank)
        ends = rank if rank in (stages.ranks[0], stages.ranks[-1]) else None
        alike.setdefault((own, ends), []).append(rank)
    # Of ranks that save as much the last has most gradients of weights left to compute, where backward is split.
    most = {rank: max(group, key=lambda each: (live[each], waits * each)) for group in alike.values() for rank in group}
    return [most[rank] for rank in range(ranks)]
