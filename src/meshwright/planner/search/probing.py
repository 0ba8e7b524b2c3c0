"""Probe one rank's computation and state once, to be scaled to every candidate that only divides samples."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from meshwright.cost import Activations, Block, Cluster, Op, Parameter, Step, Traffic, memory, peak
from meshwright.cost.device_time import Machine, Network, offload_time
from meshwright.cost.step_time import one_s, updated_s
from meshwright.methods import Method
from meshwright.planner.plans import Plan, needed_bytes
from meshwright.planner.search.search_space import Choice, choices
from meshwright.strategy import MethodConfig


def scaled(step: Step, samples: int) -> Step:
    """Return the same step with a single micro-batch of so many times as many samples.

    Only what blocks wait for is kept of its traffic.
    """
    return step.replace(
        blocks=tuple(dataclasses.replace(b, ops=tuple(_op(op, samples) for op in b.ops)) for b in step.blocks),
        flops=None if step.flops is None else step.flops * samples,
        fp8_flops=step.fp8_flops * samples,
        num_micro_batches=1,
        traffic=tuple(
            _one(each, samples, step.num_micro_batches)
            for each in step.traffic
            if not each.hidden and each.moment != "update"
        ),
    )


def _op(op: Op, samples: int) -> Op:
    if op.kind == "move":
        backward = None if op.backward_bytes is None else op.backward_bytes * samples
        return dataclasses.replace(op, num_bytes=op.num_bytes * samples, backward_bytes=backward)
    if op.kind == "attention" or op.batch > 1:
        return dataclasses.replace(op, batch=op.batch * samples)
    return dataclasses.replace(op, m=op.m * samples)


def _one(traffic: Traffic, samples: int, micro_batches: int) -> Traffic:
    return dataclasses.replace(
        traffic,
        bytes_per_step=traffic.bytes_per_step * samples // micro_batches,
        calls=max(traffic.calls // micro_batches, 1),
    )


def bare_blocks(step: Step, *, merged: bool = True) -> tuple[Block, ...]:
    """Return the blocks without what they compute; parameters that are treated alike are one where they may be merged.

    What an update holds for a moment is left out: it is not there together with activations, which come on top.
    """
    blocks = (
        dataclasses.replace(
            block, ops=(), parameters=tuple(dataclasses.replace(p, updating=None) for p in block.parameters)
        )
        for block in step.blocks
    )
    return tuple(dataclasses.replace(b, parameters=_merged(b.parameters)) if merged else b for b in blocks)


def _merged(parameters: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
    alike: dict[Parameter, int] = {}
    for parameter in parameters:
        key = _as_vector(parameter)
        alike[key] = alike.get(key, 0) + parameter.numel
    return tuple(dataclasses.replace(p, shape=(numel,)) if len(p.shape) == 1 else p for p, numel in alike.items())


def _as_vector(parameter: Parameter) -> Parameter:
    """Return what is left of a parameter when its size is not looked at.

    States of only some of its dims keep its shape.
    """
    every = tuple(range(len(parameter.shape)))
    if not parameter.shape or any(state.dims not in (every, ()) for state in parameter.states):
        return parameter
    states = tuple(dataclasses.replace(s, dims=(0,)) if s.dims else s for s in parameter.states)
    return dataclasses.replace(parameter, name="", shape=(1,), states=states, tensor_dim=None, trained_on=None)


# --- What parameters alone cost a candidate, each figure found out when it is first asked for.

_VERY_MUCH = 2**60  # bytes


@dataclass(frozen=True, eq=False)
class State:
    """Bytes on a rank, and seconds of an update and of gathers and reductions.

    Args:
        bare: ``bare(micro_batches)`` is a step of bare parameters.
        wires: Links at their full bandwidth.
        machine: Kernels at their best.
        network: Collectives at their best.
        taken: What a step takes of a rank's limit.
    """

    bare: Callable[[int], Step]
    full_links: Cluster
    machine: Machine
    network: Network
    taken: Callable[[Step], int]

    @functools.cached_property
    def once(self) -> Step:
        """With one micro-batch."""
        return self.bare(1)

    @functools.cached_property
    def twice(self) -> Step:
        """With more."""
        return self.bare(2)

    def held_bytes(self, micro_batches: int) -> int:
        """Return the parameters, gradients, the optimizer's state and what is gathered."""
        return self._held_once if micro_batches == 1 else self._held_twice

    def at_loss_bytes(self, micro_batches: int) -> int:
        """Return the same as the loss runs backward, beside all that forward saved.

        What only forward gathers is free then.
        """
        return self._at_loss_once if micro_batches == 1 else self._at_loss_twice

    @functools.cached_property
    def _at_loss_once(self) -> int:
        return self._at_loss(self.once)

    @functools.cached_property
    def _at_loss_twice(self) -> int:
        return self._at_loss(self.twice)

    def _at_loss(self, step: Step) -> int:
        # What saves so much behind the blocks holds most as the loss runs backward, whatever else the step does.
        much = Activations(_VERY_MUCH, outside_bytes=_VERY_MUCH)
        return self.taken(step.replace(activations=much)) - _VERY_MUCH

    @functools.cached_property
    def _held_once(self) -> int:
        return self.taken(self.once)

    @functools.cached_property
    def _held_twice(self) -> int:
        return self.taken(self.twice)

    @functools.cached_property
    def update_s(self) -> float:
        """Return the update."""
        return updated_s(self.once, self.machine, self.full_links, offload_time(self.once, self.full_links))

    @functools.cached_property
    def link_s(self) -> tuple[float, float]:
        """Gather and reductions of one micro-batch, and of every further one."""
        first, both = self._link_s(self.once), self._link_s(self.twice)
        return first, max(both - first, 0.0)

    def _link_s(self, step: Step) -> float:
        hidden = (each for each in step.traffic if each.hidden and each.moment != "update" and each.kind != "send")
        return sum(one_s(step, each, self.network) for each in hidden)


# --- What one rank computes and keeps for a sample, found out once for all that only divides samples.

_SHARDING = choices("zero1")[0]


class Kept(NamedTuple):
    """What a rank keeps of a micro-batch from forward to backward, in bytes."""

    inside: int  # by the blocks
    behind: int  # behind the last of them
    loss: int  # beside these, as the loss runs backward

    @property
    def total(self) -> int:
        """All that is there as the loss runs backward."""
        return self.inside + self.behind + self.loss

    def of_samples(self, samples: int, two: Kept | None) -> Kept:
        """Of a micro-batch of more samples than one.

        Args:
            samples: Their number.
            two: What a micro-batch of two keeps: casts of weights, masks and tables it keeps once. None: this as often
                as there are samples, which can be too much.
        """
        if two is None or samples < 1:
            return Kept(*(samples * each for each in self))
        return Kept(*(one + max(both - one, 0) * (samples - 1) for one, both in zip(self, two, strict=True)))


@dataclass(frozen=True)
class Probe:
    """What one rank computes and keeps for a micro-batch of one sample.

    Args:
        step: After the twins of its axes, precision and recomputation.
        kept: From forward to backward.
        slack: By how much more is taken of the limit than tensors need.
        taken: What a step's tensors take of the limit, but for slack, at least.
        again: The same of a micro-batch of so many samples; None where that is not known.
    """

    step: Step
    kept: Kept
    slack: float
    taken: Callable[[Step], int]
    again: Callable[[int], Kept] | None = None

    @functools.cached_property
    def kept_by_two(self) -> Kept | None:
        """Of a micro-batch of two samples."""
        return None if self.again is None else self.again(2)

    @property
    def offloaded_bytes(self) -> int:
        """Return what forward sends to the host, and backward brings back."""
        return self.step.activations.offloaded_bytes if self.step.activations is not None else 0

    @functools.cached_property
    def num_blocks(self) -> int:
        """Blocks that a pipeline can deal out."""
        return sum(block.count for block in self.step.blocks if block.name != "outside")


def probe_of(plan: Plan, again: Callable[[int], Kept] | None = None) -> Probe:
    """Return what a plan says of its rank's work."""
    if plan.taken_bytes is None:
        return Probe(plan.step, kept_of(plan), 1.0, lambda step: needed_bytes(step, memory(step)), again)
    slack = plan.taken_bytes / max(_at_peak(plan.step), 1)
    # Of a real module it is known block by block when gradients are there: parameters alone do not tell.
    known = plan.step.activations
    but_for: tuple[Literal["recomputation"], ...] = ("recomputation",) if known is not None and known.transients else ()
    return Probe(plan.step, kept_of(plan), slack, functools.partial(_at_peak, but_for=but_for), again)


def kept_of(plan: Plan) -> Kept:
    """Return what a plan says of its micro-batch."""
    known, kept = plan.step.activations, plan.memory.activations or 0
    behind = min(known.outside_bytes, kept) if known is not None else 0
    # Where classes are summed, what only the loss's backward makes is none of them.
    return Kept(kept - behind, behind, known.loss_bytes if known is not None and plan.taken_bytes is not None else 0)


def _at_peak(step: Step, but_for: tuple[Literal["recomputation"], ...] = ()) -> int:
    return peak(step, but_for).reserved_bytes + (memory(step).host_total if step.on_cpu else 0)


def probing(precision: Choice, recompute: Choice, rest: Choice, *, sharded: bool) -> Choice:
    """Return what a probe has: all but what needs other axes, or a sharding method, or is no matter of one sample.

    What shards gathers weights in the precision that they compute in, where autocast casts them in every layer: that is
    time, and bytes for backward. All that shard do it alike, so that one of them stands for all.
    """
    alone = (each for each in rest if getattr(each, "axis", None) is None and not _lacks(each) and not _no_probes(each))
    return (*(_SHARDING if sharded and precision else ()), *precision, *recompute, *alone)


def _no_probes(method: MethodConfig) -> bool:
    """Return whether it is of states alone, or says into how many micro-batches a step is cut, where a probe has its own."""
    return getattr(method, "num_micro_batches", None) is not None or (isinstance(method, Method) and method.of_state)


def _lacks(method: MethodConfig) -> bool:
    """Return whether it needs another method beside it."""
    return isinstance(method, Method) and any(need.when(method) for need in method.needs)
