"""What a search tries: sizes of mesh axes, and for every kind of decision the methods that can make it."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

from meshwright.cost import Cluster
from meshwright.planner.plan import Subject
from meshwright.strategy import MethodConfig, Strategy

Choice = tuple[MethodConfig, ...]
"""Methods that are taken together; none: the decision is to do nothing."""

_MOST_TOKEN_RANKS = 16  # beyond, a rank's part of a sample is too short to be worth dividing
_MOST_STAGES = 64
_EVERY_ZERO_SIZE = 8  # of so many data-parallel ranks all divisors are tried for a group that shards
_STAGES_PER_RANK = (2, 4)
_FRACTIONS = (0.25, 0.5, 0.75)
_MOST_IN_PART = 1024  # devices; sharded over more, states are small beside all else


@dataclass(frozen=True)
class Space:
    """The choices of a search; it tries their combinations, as far as the law of methods allows.

    Args:
        sizes: Sizes to try of the axes ``tensor``, ``sequence``, ``context``, ``expert``, ``pipeline`` and ``replica``,
            1 included; an axis that is absent is not tried.
        axis_methods: The methods that may work on each of these axes.
        sharding: What may shard parameters, over an axis ``zero``; nothing: data parallelism.
        hybrid: Whether parameters may be sharded within groups that hold copies of each other (HSDP).
        inner_axes: Most of the axes ``tensor``, ``sequence``, ``context`` and ``expert`` that are used together.
        precision: What may lower the precision, what computes fastest first.
        half_dtype: What half precision is on the devices.
        recompute: What may recompute activations, the least first.
        offload: What may leave the device.
        extra: Methods that every candidate has.
        micro_batches: Numbers of micro-batches; None: all that divide a replica's samples.
    """

    sizes: dict[str, tuple[int, ...]]
    axis_methods: dict[str, tuple[Choice, ...]]
    sharding: tuple[Choice, ...]
    hybrid: bool = True
    inner_axes: int = 2
    precision: tuple[Choice, ...] = ((),)
    half_dtype: str = "bf16"
    recompute: tuple[Choice, ...] = ((),)
    offload: tuple[Choice, ...] = ((),)
    extra: Choice = ()
    micro_batches: tuple[int | None, ...] | None = None

    def replace(self, **changes: Any) -> Space:
        """The same space with some choices changed."""
        return dataclasses.replace(self, **changes)


def choices(*options: Any) -> tuple[Choice, ...]:
    """Reads choices as users write methods; None is the choice to do nothing."""
    return tuple(Strategy([] if option is None else [option]).methods for option in options)


def default_space(subject: Subject, *, lower_precision: bool = True) -> Space:
    """What is tried for a subject when nothing else is asked for.

    Args:
        subject: What is planned; its cluster, if it has one, says how large a node is and which precisions it has.
        lower_precision: Whether half precision is tried; without, what the subject has is kept.
    """
    cluster: Cluster | None = getattr(subject, "cluster", None)
    world, node = subject.world, cluster.devices_per_node if cluster is not None else subject.world
    divisors = divisors_of(world)
    within = tuple(size for size in divisors if node % size == 0 or (size % node == 0 and size <= node))
    tokens = tuple(size for size in divisors if size <= _MOST_TOKEN_RANKS)
    return Space(
        sizes={
            "tensor": within,
            "sequence": within,
            "context": tokens,
            "pipeline": tuple(size for size in divisors if size <= _MOST_STAGES),
        },
        axis_methods={
            "tensor": choices("tensor_parallel", ("tensor_parallel", {"sequence": True})),
            "sequence": choices("sequence_parallel"),
            "context": choices("context_parallel"),
            "expert": choices("expert_parallel"),
            "pipeline": _pipelines(),
            "replica": choices("outer"),
        },
        sharding=choices(None, "zero1", "zero2", "fsdp"),
        precision=_precisions(cluster) if lower_precision else ((),),
        half_dtype=subject.half_dtype,
        recompute=_recomputations(),
    )


def offloads(world: int = 1) -> tuple[Choice, ...]:
    """What may leave the device: states also in part, the least first, as their update waits for the host.

    Args:
        world: Devices; on very many, states leave whole or not at all.
    """
    parts = (("offload", {"optimizer": fraction}) for fraction in _FRACTIONS if world <= _MOST_IN_PART)
    # Of gradients what can leave before the update: on some meshes backward does not complete them.
    every = ("offload", {"optimizer": 1.0, "parameters": 1.0, "activations": 1.0})
    return choices(*parts, ("offload", "optimizer"), ("offload", "activation"), every)


@functools.cache
def divisors_of(number: int) -> tuple[int, ...]:
    """All of them, from 1."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return tuple(sorted({*small, *(number // size for size in small)}))


def zero_sizes(ranks: int, inner: int, node: int) -> tuple[int, ...]:
    """Sizes of a group that shards within ``ranks``: all of them, or of many those that fill a node and steps of 4.

    Args:
        ranks: Data-parallel ranks.
        inner: Ranks that lie closer together than they.
        node: Ranks of a node.
    """
    if ranks <= _EVERY_ZERO_SIZE:
        return divisors_of(ranks)[1:]
    size, found = max(2, node // inner), [ranks]
    while size < ranks:
        if ranks % size == 0:
            found.append(size)
        size *= 4
    return tuple(sorted(found))


def _pipelines() -> tuple[Choice, ...]:
    name = "pipeline_parallel"
    interleaved = ((name, {"schedule": "interleaved", "num_stages_per_rank": each}) for each in _STAGES_PER_RANK)
    return choices(name, *interleaved, (name, {"schedule": "zbv"}), (name, {"schedule": "gpipe"}))


def _precisions(cluster: Cluster | None) -> tuple[Choice, ...]:
    """Mixed precision: its gradients add up in fp32. ``half``, which is faster and less exact, is tried when asked."""
    if cluster is None or cluster.device.is_host:
        return ((),)
    return choices(("amp_native", cluster.device.half_dtype))


def _recomputations() -> tuple[Choice, ...]:
    """Nothing, everything, and what lies between."""
    return choices(None, ("checkpoint", {"policy": "selective"}), ("checkpoint", {"every": 2}), "checkpoint")
