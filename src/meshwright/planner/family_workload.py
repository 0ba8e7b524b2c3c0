"""A model by its dimensions on a cluster, for which strategies are predicted: no model is built, no device needed."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from meshwright.cost import Calibration, Cluster, Peak, Step, memory
from meshwright.errors import ConfigError
from meshwright.methods import SAMPLED, PipelineParallel, Resolved, TensorParallel, cost_of, resolve
from meshwright.planner.allocator import taken_bytes, usable_bytes
from meshwright.planner.families import family_step
from meshwright.planner.family_checks import check_family, gaps_of
from meshwright.planner.family_experts import with_experts
from meshwright.planner.family_ops import FamilyRun
from meshwright.planner.family_shape import Shape
from meshwright.planner.forecast import forecast
from meshwright.planner.pipeline import num_micro_batches
from meshwright.planner.plan import Plan
from meshwright.strategy import Strategy

_HALF = ("bf16", "fp16")


@dataclass(frozen=True)
class FamilyWorkload:
    """A model of a well-known family and how it is trained, before any strategy.

    Args:
        shape: The model.
        cluster: What it runs on; a rank for every device.
        batch_size: Samples per step over all ranks.
        dtype: Half precision for strategies that name no precision, which get ``amp_native`` in it; None: they train
            in fp32.
        num_micro_batches: Micro-batches per step; None: 1, or as many as a pipeline takes.
        zero_level: Which method a ``zero`` axis means when none is named.
        limit_bytes: What tensors may take of a rank's memory; None: what its device has for them.
        calibration: What kernels and links of the cluster reach; None: the fitted presets.
        fused_loss: Whether the loss reads the logits as they are, and writes their gradient in their place.
    """

    shape: Shape
    cluster: Cluster
    batch_size: int
    dtype: Literal["bf16", "fp16"] | None = None
    num_micro_batches: int | None = None
    zero_level: int = 3
    limit_bytes: int | None = None
    calibration: Calibration | None = None
    fused_loss: bool = False

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.dtype not in (*_HALF, None):
            raise ConfigError(
                "A workload cannot be like this",
                expected=f"a batch of at least one sample, and a dtype from {', '.join(_HALF)} or None",
                got=f"batch_size={self.batch_size}, dtype={self.dtype!r}",
                fix="correct the argument",
            )

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.cluster.num_devices

    def plan(self, strategy: Strategy, num_micro_batches: int | None = None) -> Plan:
        """Predicts one strategy.

        Args:
            strategy: What is asked for; it is resolved for the cluster, as if on its devices.
            num_micro_batches: Micro-batches per step; None: as many as the workload has.

        Raises:
            StrategyError: When its methods do not fit together or do not fit the cluster.
            ModelError: When the mesh cannot divide the model.
        """
        return self._plan(strategy, num_micro_batches, alike=False)

    def outline(self, strategy: Strategy, num_micro_batches: int | None = None) -> Plan:
        """The same with the same seconds and bytes, sooner for long pipelines.

        Ranks that compute as much as each other have the step of the one among them that holds most.

        Args:
            strategy: As for ``plan``.
            num_micro_batches: As for ``plan``.

        Raises:
            StrategyError, ModelError: As ``plan`` does.
        """
        return self._plan(strategy, num_micro_batches, alike=True)

    def on(self, num_devices: int) -> FamilyWorkload:
        """The same on more of the same devices, or fewer."""
        return dataclasses.replace(self, cluster=dataclasses.replace(self.cluster, num_devices=num_devices))

    def _plan(self, strategy: Strategy, wanted_micro_batches: int | None, *, alike: bool) -> Plan:
        resolved = self._resolved(strategy)
        run = self._run(resolved, wanted_micro_batches or self.num_micro_batches)
        check_family(self.shape, self.cluster.device, resolved, run)
        steps = tuple(self._steps(resolved, run, alike=alike))
        forecasted = forecast(
            steps, self.cluster, samples=self.batch_size, tokens_per_sample=self.shape.seq, calibration=self.calibration
        )
        taken = [self._taken(step, peak) for step, peak in zip(steps, forecasted.peaks, strict=True)]
        most = steps[taken.index(max(taken))]
        return Plan(
            strategy=resolved.strategy,
            step=most,
            memory=memory(most),
            limit_bytes=self.limit_bytes if self.limit_bytes is not None else usable_bytes(self.cluster.device),
            notices=resolved.notices,
            gaps=gaps_of(resolved),
            steps=steps if len(steps) > 1 else (),
            micro_batch=run.micro_batch,
            forecast=forecasted,
            taken_bytes=max(taken),
        )

    def _resolved(self, strategy: Strategy) -> Resolved:
        if self.dtype is not None and not {"amp_native", "half"} & set(strategy.names):
            strategy = strategy.with_method(("amp_native", self.dtype))
        return _resolve(strategy, self.world, self.zero_level)

    def _run(self, resolved: Resolved, wanted: int | None) -> FamilyRun:
        strategy, sizes = resolved.strategy, dict(resolved.axes)
        micro_batches = num_micro_batches(resolved, wanted)
        replicas = math.prod(sizes.get(axis, 1) for axis in SAMPLED)
        in_half = bool({"amp_native", "half"} & set(strategy.names))
        fp8, tensor = strategy.get("fp8"), strategy.get("tensor_parallel")
        return FamilyRun(
            micro_batch=math.ceil(self.batch_size / (replicas * micro_batches)),
            num_micro_batches=micro_batches,
            dtype="fp8" if fp8 is not None else "half" if in_half else "fp32",
            split_tokens=isinstance(tensor, TensorParallel) and tensor.sequence,
            compiled="compile" in strategy,
            fused_loss=self.fused_loss,
            rowwise=getattr(fp8, "recipe", "") == "rowwise",
            seq=self.shape.seq,
        )

    def _steps(self, resolved: Resolved, run: FamilyRun, *, alike: bool) -> list[Step]:
        ranks, method = dict(resolved.axes).get("pipeline", 1), resolved.strategy.get("pipeline_parallel")
        stages = method.ranks_of_stages(ranks) if isinstance(method, PipelineParallel) and ranks > 1 else (0,)
        steps = family_step(
            self.shape, run, resolved.axes, shard_axis=resolved.shard_axis, stage_ranks=stages, exchanges_heads=True
        )
        shown = _shown_by(steps, stages) if alike else range(ranks)
        made = {rank: self._cost(resolved, run, steps[rank]) for rank in dict.fromkeys(shown)}
        return [made[rank] for rank in shown]

    def _cost(self, resolved: Resolved, run: FamilyRun, step: Step) -> Step:
        step = step.replace(on_cpu=self.cluster.device.is_host)
        if dict(resolved.axes).get("expert", 1) > 1:
            step = with_experts(step, self.shape, run)
        return cost_of(resolved.strategy, step)

    def _taken(self, step: Step, peak: Peak) -> int:
        on_host = peak.memory.host_total if step.on_cpu else 0
        return taken_bytes(peak.reserved_bytes, self.cluster.device) + on_host


@functools.lru_cache(maxsize=4096)
def _resolve(strategy: Strategy, world: int, zero_level: int) -> Resolved:
    # Without a device no method is left out: a cluster on paper is not what this process runs on.
    return resolve(strategy, world, zero_level)


def _shown_by(steps: Sequence[Step], stages: tuple[int, ...]) -> Sequence[int]:
    """For every rank the one whose step stands for it: of those with as many blocks, the first keeps most micro-batches.

    The first and the last rank, which have more than blocks, stand for themselves; so do all where stages go back.
    """
    ranks = len(steps)
    if stages[-1] != ranks - 1:
        return range(ranks)
    first: dict[int, int] = {}
    counts = steps[0].blocks[0].on_ranks
    return [rank if rank in (0, ranks - 1) else first.setdefault(counts[rank], rank) for rank in range(ranks)]
