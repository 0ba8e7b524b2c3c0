"""Measure the overheads of training steps over their kernels and collectives, with small reference transformers."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.cost import Cluster, Constants, Step, simulate
from meshwright.methods import (
    Job,
    Role,
    SampleRun,
    SearchScope,
    apply_strategy,
    check_strategy,
    mesh_method,
    method_of_axes,
    methods_for,
    mixed_precision,
)
from meshwright.methods.base import half_dtype, torch_dtype
from meshwright.methods.job import MeshAxes
from meshwright.nn import widen
from meshwright.optim import local_tensor
from meshwright.planner.measure.timing import Clock, calls_of, slowest
from meshwright.planner.workload import Workload
from meshwright.runtime import Settings, coordinate_of, rank, synchronize, world_size
from meshwright.runtime.torch_internals.optim import foreach_mul_
from meshwright.strategy import Strategy

_HEAD_WIDTH = 64


@dataclass(frozen=True)
class Size:
    """Size of the model and of a rank's micro-batch."""

    width: int
    depth: int
    vocabulary: int
    samples: int
    tokens: int


def sizes_on(device: torch.device) -> tuple[Size, Size]:
    """Return a wide and a narrow size, each a fraction of a second's work."""
    if device.type == "cuda":
        return Size(2048, 3, 8192, 2, 2048), Size(768, 4, 8192, 4, 1024)
    return Size(512, 3, 1024, 4, 128), Size(192, 4, 1024, 4, 128)


@dataclass(frozen=True)
class Reference:
    """A forward and backward that can run under a strategy.

    Args:
        run: Runs them once on this rank; collective where the strategy communicates.
        step: The simulated step.
        between: Reads and writes weights and two states, as an optimizer does to the caches between steps.
    """

    run: Callable[[], None]
    step: Step
    between: Callable[[], None] = lambda: None


def reference(strategy: Strategy | None, size: Size, now: Settings, *, in_half: bool = False) -> Reference:
    """Build the reference model under a strategy of this world; collective.

    Args:
        strategy: The strategy; None: every rank trains its own model.
        size: Size of the model.
        now: This rank's settings.
        in_half: Whether to train in mixed precision, without a strategy.
    """
    model, world = _Model(size), 1 if strategy is None else world_size()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, size.vocabulary, (size.samples, size.tokens), generator=generator).to(now.device)
    workload = Workload(
        model, now.device, torch.optim.SGD, lambda samples: ids[:samples], _loss_of,
        batch_size=size.samples * world, num_micro_batches=1, world=world, zero_level=0, limit_bytes=None,
    )  # fmt: skip
    dtype = half_dtype(now.device) if in_half else None
    plan = workload.plan(strategy or Strategy([mixed_precision(dtype)] if dtype else ()))
    model.to(now.device)
    if strategy is None:
        return Reference(_alone(model, ids, dtype), plan.step, _optimizer_like(model))
    job = Job(
        model, plan.strategy, now.device, _loss, lambda inputs, device: inputs,
        mesh_axes=MeshAxes(plan.step.axes, coordinate_of(rank(), plan.step.axes), plan.step.shard_axis),
        sample=SampleRun(workload.inputs_of, _loss_of),
    )  # fmt: skip
    check_strategy(job)
    apply_strategy(job)

    def run() -> None:
        with job.micro_batch(True):
            _backward(job.model, job.loss_func(ids, job.model(ids)))

    return Reference(run, plan.step, _optimizer_like(job.model))


def _optimizer_like(model: nn.Module) -> Callable[[], None]:
    weights = [local_tensor(parameter.data) for parameter in model.parameters()]
    every = [*weights, *(torch.zeros_like(each) for each in (*weights, *weights))]
    return lambda: foreach_mul_(every, 1.0)


def _alone(model: nn.Module, ids: torch.Tensor, dtype: str | None) -> Callable[[], None]:
    """Return the forward and backward of a plain model, with ``amp_native``'s autocast in half precision."""
    if dtype is None:
        return lambda: _backward(model, _loss_of(model, ids))
    if dtype == "bf16":
        widen(model, ids.device)

    def run() -> None:
        with torch.autocast(ids.device.type, dtype=torch_dtype(dtype)):
            loss = _loss_of(model, ids)
        _backward(model, loss)

    return run


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // _HEAD_WIDTH
        self.before, self.behind = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.given = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inside = self.before(hidden)
        query, key, value = (
            part(inside).unflatten(-1, (-1, _HEAD_WIDTH)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.given(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(F.gelu(self.up(self.behind(hidden))))


class _Model(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleList(_Layer(size.width) for _ in range(size.depth))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of token ids, ``(samples, tokens)``."""
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


def _loss(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return _loss(ids, model(ids))


def _backward(model: nn.Module, loss: torch.Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]
    model.zero_grad(set_to_none=True)


# --- Constants
#
# A kernel timed alone finds its memory allocated and its ranks synchronized. In a training step memory is allocated and
# freed, shards are copied in and out of one buffer, and an exposed collective begins when the last rank arrives. Small
# models, which no prediction is for, train alone, split and sharded, in turns; each constant is solved so that the
# predictions of these steps are the measured seconds.

_TURNS, _STEPS_OF_TURN = 5, 2  # timed steps
_FACTOR, _SECONDS = (0.02, 8.0), (0.0, 1.0)  # bounds of the constants
_HALVINGS = 30
_ROUNDS = 8  # of two constants that are solved in turns
_LARGEST_TENSOR_GROUP = 8


@dataclasses.dataclass(frozen=True)
class Timed:
    """A step that has run.

    Args:
        step: The step with its prediction.
        seconds: Measured seconds of forward and backward.
    """

    step: Reference
    seconds: float

    def predicted_s(self, cluster: Cluster, **constants: float) -> float:
        """Return the predicted seconds, on a cluster with other constants."""
        time = simulate(self.step.step, with_constants(cluster, **constants))
        return time.step_time_s - time.update_s - time.overhead_s


def constants_in_step(now: Settings, cluster: Cluster, clock: Clock, scale: float = 1.0) -> Constants:
    """Return the cluster's constants with those that only whole steps measure; collective.

    These are ``in_step``, ``half_in_step`` and, with several ranks, ``wait_s``, ``sharded`` and ``shard_s``.

    Args:
        now: This rank's settings.
        cluster: The cluster, calibrated but for these constants.
        clock: The clock that counts.
        scale: Factor on the number of turns.
    """
    world, (wide, narrow) = world_size(), sizes_on(now.device)
    kinds: list[tuple[Strategy | None, Size]] = [(None, wide), (None, narrow)]
    if world > 1:
        sharded = Strategy(
            [mesh_method((("zero", world),)), *methods_for(Role.SHARDING)[-1].search_options(SearchScope())]
        )
        kinds += [(sharded, wide), (sharded, narrow)]
    group = math.gcd(now.local_world_size, world, _LARGEST_TENSOR_GROUP)
    if group > 1:
        axes = (("data", world // group), ("tensor", group))
        split = Strategy([mesh_method(axes), method_of_axes()["tensor"]])
        kinds.append((split, wide))
    steps = [reference(strategy, size, now) for strategy, size in kinds]
    steps += [reference(None, size, now, in_half=True) for size in (wide, narrow)]
    *every, wide_half, narrow_half = _in_turns(steps, now, clock, max(3, round(_TURNS * scale)))
    timed = dict(zip(kinds, every, strict=True))
    alone = [timed[None, size] for size in (wide, narrow)]
    ratios = [each.seconds / each.predicted_s(cluster, in_step=1.0) for each in alone]
    cluster = with_constants(cluster, in_step=math.sqrt(ratios[0] * ratios[1]))
    cluster = _of_half(cluster, (wide_half, narrow_half))
    if group > 1:
        cluster = _solved(cluster, "wait_s", _SECONDS, timed[split, wide])
    if world > 1:
        cluster = _of_shards(cluster, [timed[sharded, size] for size in (wide, narrow)], alone)
    return _constants(cluster)


def _of_half(cluster: Cluster, timed: Sequence[Timed]) -> Cluster:
    """Solve the factor of steps in half precision, by the geometric mean of the models."""
    found = [_constants(_solved(cluster, "half_in_step", _FACTOR, each)).half_in_step for each in timed]
    return with_constants(cluster, half_in_step=statistics.geometric_mean(found))


def _in_turns(steps: Sequence[Reference], now: Settings, clock: Clock, turns: int) -> list[Timed]:
    """Time the steps in turns; return their medians on the slowest rank, without each turn's warm-up step."""
    found: list[list[float]] = [[] for _ in steps]
    for _ in range(turns):
        for step, seconds in zip(steps, found, strict=True):
            calls_of(step.run, now.device, 1)
            for _ in range(_STEPS_OF_TURN):
                step.between()
                synchronize()
                seconds.append(slowest([calls_of(step.run, now.device, 1)])[0].of(clock))
    return [Timed(step, statistics.median(seconds)) for step, seconds in zip(steps, found, strict=True)]


def _of_shards(cluster: Cluster, sharded: Sequence[Timed], alone: Sequence[Timed]) -> Cluster:
    """Solve the constants of sharding: bytes dominate in the wide model, calls in the narrow one.

    The prediction error of the same models without sharding is subtracted first.
    """
    wide, narrow = (
        dataclasses.replace(each, seconds=each.seconds - single.seconds + single.predicted_s(cluster))
        for each, single in zip(sharded, alone, strict=True)
    )
    cluster = with_constants(cluster, shard_s=_constants(cluster).call_s)
    for _ in range(_ROUNDS):
        cluster = _solved(cluster, "sharded", _FACTOR, wide)
        cluster = _solved(cluster, "shard_s", _SECONDS, narrow)
    return cluster


def _solved(cluster: Cluster, name: str, bounds: tuple[float, float], timed: Timed) -> Cluster:
    """Bisect one constant, within bounds, until the step's prediction is its measured time.

    Unchanged where the step does not depend on it, as where all products in half precision run in fp32.
    """
    low, high = bounds
    if timed.predicted_s(cluster, **{name: low}) == timed.predicted_s(cluster, **{name: high}):
        return cluster
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        too_short = timed.predicted_s(cluster, **{name: middle}) < timed.seconds
        low, high = (middle, high) if too_short else (low, middle)
    return with_constants(cluster, **{name: (low + high) / 2})


def with_constants(cluster: Cluster, **constants: float) -> Cluster:
    """Return the cluster with some constants of its calibration changed."""
    assert cluster.calibration is not None
    changed = dataclasses.replace(_constants(cluster), **constants)
    return dataclasses.replace(cluster, calibration=dataclasses.replace(cluster.calibration, constants=changed))


def _constants(cluster: Cluster) -> Constants:
    assert cluster.calibration is not None
    return cluster.calibration.constants
