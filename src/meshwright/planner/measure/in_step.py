"""What a step adds to its parts: kernels and collectives, timed alone before, inside training steps.

A kernel timed alone finds its memory allocated and its ranks in step; in a training step memory comes and goes, shards
are copied in and out of one buffer, and a collective that blocks wait for begins when the last rank arrives. Small
models, not those that are predicted later, train alone, split and sharded, in turns; each constant is what makes the
predictions of these steps the seconds that they took.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

from meshwright.cost import Cluster, Constants, simulate
from meshwright.planner.measure.reference import Reference, Size, reference, sizes_on
from meshwright.planner.measure.timing import Clock, calls_of, slowest, together
from meshwright.runtime import Settings, gather_objects, world_size
from meshwright.strategy import Strategy

_TURNS, _STEPS_OF_TURN = 5, 2  # timed
_FACTOR, _SECONDS = (0.02, 8.0), (0.0, 1.0)  # bounds of what is looked for
_HALVINGS = 30
_ROUNDS = 8  # of two constants that are found in turns
_LARGEST_TENSOR_GROUP = 8


@dataclasses.dataclass(frozen=True)
class Timed:
    """A step that has run.

    Args:
        step: With its prediction.
        seconds: Of forward and backward.
    """

    step: Reference
    seconds: float

    def predicted_s(self, cluster: Cluster, **constants: float) -> float:
        """Of the same, on a cluster with other constants."""
        time = simulate(self.step.step, with_constants(cluster, **constants))
        return time.step_time_s - time.update_s - time.overhead_s


def constants_in_step(now: Settings, cluster: Cluster, clock: Clock, scale: float = 1.0) -> Constants:
    """The cluster's constants with those that whole steps tell. Collective.

    These are ``in_step``, ``half_in_step`` and, where there are several ranks, ``wait_s``, ``sharded`` and ``shard_s``.

    Args:
        now: Of this rank.
        cluster: Calibrated but for these.
        clock: Which clock counts.
        scale: Of the number of turns.
    """
    world, (wide, narrow) = world_size(), sizes_on(now.device)
    kinds: list[tuple[Strategy | None, Size]] = [(None, wide), (None, narrow)]
    if world > 1:
        sharded = Strategy([("parallel_mode", {"zero": world}), "fsdp"])
        kinds += [(sharded, wide), (sharded, narrow)]
    group = math.gcd(now.local_world_size, world, _LARGEST_TENSOR_GROUP)
    if group > 1:
        split = Strategy([("parallel_mode", {"data": world // group, "tensor": group}), "tensor_parallel"])
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
    """What steps in half precision add beside others: the geometric mean of the models."""
    found = [_constants(_solved(cluster, "half_in_step", _FACTOR, each)).half_in_step for each in timed]
    return with_constants(cluster, half_in_step=statistics.geometric_mean(found))


def _in_turns(steps: Sequence[Reference], now: Settings, clock: Clock, turns: int) -> list[Timed]:
    """Medians over the steps of all turns, each as long as on the slowest rank. The first of a turn warms up."""
    found: list[list[float]] = [[] for _ in steps]
    for _ in range(turns):
        for step, seconds in zip(steps, found, strict=True):
            calls_of(step.run, now.device, 1)
            for _ in range(_STEPS_OF_TURN):
                step.between()
                together()
                seconds.append(slowest(gather_objects(calls_of(step.run, now.device, 1))).of(clock))
    return [Timed(step, statistics.median(seconds)) for step, seconds in zip(steps, found, strict=True)]


def _of_shards(cluster: Cluster, sharded: Sequence[Timed], alone: Sequence[Timed]) -> Cluster:
    """Bytes count most in the wide model, calls in the narrow one: each tells one constant, given the other.

    What is off in their computing alone is no matter of shards.
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
    """With the value of one constant at which a step takes as long as it did, or the nearest within bounds."""
    low, high = bounds
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        too_short = timed.predicted_s(cluster, **{name: middle}) < timed.seconds
        low, high = (middle, high) if too_short else (low, middle)
    return with_constants(cluster, **{name: (low + high) / 2})


def with_constants(cluster: Cluster, **constants: float) -> Cluster:
    """The cluster with some constants of its calibration changed."""
    assert cluster.calibration is not None
    changed = dataclasses.replace(_constants(cluster), **constants)
    return dataclasses.replace(cluster, calibration=dataclasses.replace(cluster.calibration, constants=changed))


def _constants(cluster: Cluster) -> Constants:
    assert cluster.calibration is not None
    return cluster.calibration.constants
