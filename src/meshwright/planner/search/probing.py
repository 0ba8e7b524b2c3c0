"""Probe one rank's computation and state once, to be scaled to every candidate that only divides samples."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from meshwright.cost import Activations, Block, Cluster, Op, Parameter, Step, Traffic, memory, peak
from meshwright.cost.activations import PRODUCTS
from meshwright.cost.device_time import Machine, Network, is_misaligned, offload_time
from meshwright.cost.step_time import one_s, updated_s
from meshwright.methods import Method, Role
from meshwright.planner.plans import Plan, needed_bytes
from meshwright.planner.search.search_space import Choice, searched
from meshwright.strategy import MethodConfig


def scaled(step: Step, samples: int) -> Step:
    """Return a step as one micro-batch of ``samples`` times as many samples.

    Traffic that no block waits for is left out.
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
    if op.of_weights:
        return op
    if op.kind == "move":
        backward = None if op.backward_bytes is None else op.backward_bytes * samples
        fused = None if op.when_fused is None else (op.when_fused[0] * samples, op.when_fused[1])
        return dataclasses.replace(op, num_bytes=op.num_bytes * samples, backward_bytes=backward, when_fused=fused)
    if op.kind == "attention":
        return dataclasses.replace(op, batch=op.batch * samples)
    if op.moment == "backward" or (op.batch > 1 and op.operator not in PRODUCTS):
        return _grown(op, samples)
    return dataclasses.replace(op, m=op.m * samples)


def _grown(product: Op, samples: int) -> Op:
    """Return a product of more samples, where it is not known how it grows: in the way that costs least.

    Samples are its rows where it is a gradient of an input, or experts' weights are multiplied by, and what it sums
    over where it is the gradient of a weight: what takes a result of more rows takes more bytes, and what sums over an
    odd number of tokens has no fast kernel. In attention they are more products, which cost no less than either.
    """
    grown = (dataclasses.replace(product, **{dim: getattr(product, dim) * samples}) for dim in ("m", "n", "k"))
    return min(grown, key=lambda op: (is_misaligned(op), op.m * op.k + op.k * op.n + op.m * op.n))


def _one(traffic: Traffic, samples: int, micro_batches: int) -> Traffic:
    return dataclasses.replace(
        traffic,
        bytes_per_step=traffic.bytes_per_step * samples // micro_batches,
        calls=max(traffic.calls // micro_batches, 1),
    )


def bare_blocks(step: Step, *, merged: bool = True) -> tuple[Block, ...]:
    """Return the blocks without their ops; parameters that are treated alike are one where they may be merged.

    What an update holds for a moment is left out: it is never there together with activations, which are added on top.
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
    """Return a parameter without its shape.

    A parameter with states of only some of its dims keeps its shape.
    """
    every = tuple(range(len(parameter.shape)))
    if not parameter.shape or any(state.dims not in (every, ()) for state in parameter.states):
        return parameter
    states = tuple(dataclasses.replace(s, dims=(0,)) if s.dims else s for s in parameter.states)
    return dataclasses.replace(
        parameter, name="", shape=(1,), states=states, shard_dim=0, tensor_dim=None, trained_on=None
    )


# --- The cost of a candidate's parameters

_VERY_MUCH = 2**60  # bytes


@dataclass(frozen=True, eq=False)
class State:
    """Bytes of a rank's parameters and their states, and seconds of updating, gathering and reducing them.

    Each figure is computed when it is first asked for.

    Args:
        bare: Returns the step of bare parameters with so many micro-batches.
        wires: Links at their full bandwidth.
        machine: Kernels at their best.
        network: Collectives at their best.
        taken: Returns the bytes that a step takes of a rank's limit.
    """

    bare: Callable[[int], Step]
    full_links: Cluster
    machine: Machine
    network: Network
    taken: Callable[[Step], int]

    @functools.cached_property
    def once(self) -> Step:
        """Return the step with one micro-batch."""
        return self.bare(1)

    @functools.cached_property
    def twice(self) -> Step:
        """Return the step with two micro-batches."""
        return self.bare(2)

    def held_bytes(self, micro_batches: int) -> int:
        """Return the bytes of parameters, gradients, optimizer states and gathered weights."""
        return self._held_once if micro_batches == 1 else self._held_twice

    def at_loss_bytes(self, micro_batches: int) -> int:
        """Return the bytes in use at the start of backward, except those that forward saved.

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
        """Return the seconds of the update."""
        return updated_s(self.once, self.machine, self.full_links, offload_time(self.once, self.full_links))

    @functools.cached_property
    def link_s(self) -> tuple[float, float]:
        """Return the seconds of gathers and reductions of one micro-batch, and of every further one."""
        first, both = self._link_s(self.once), self._link_s(self.twice)
        return first, max(both - first, 0.0)

    def _link_s(self, step: Step) -> float:
        hidden = (each for each in step.traffic if each.hidden and each.moment != "update" and each.kind != "send")
        return sum(one_s(step, each, self.network) for each in hidden)


# --- The cost of a sample on one rank


@functools.cache
def _any_sharding() -> Choice:
    """Return any method that shards: all of them gather weights in the precision in which they compute."""
    return searched(Role.SHARDING)[0]


class SavedBytes(NamedTuple):
    """Bytes that a rank saves of a micro-batch from forward to backward."""

    inside: int  # in the blocks
    behind: int  # behind the last block
    loss: int  # further bytes, at the start of backward (loss)

    @property
    def total(self) -> int:
        """Return the sum of all three: the bytes at the start of backward."""
        return self.inside + self.behind + self.loss

    def of_samples(self, samples: int, two: SavedBytes | None) -> SavedBytes:
        """Return the bytes of a micro-batch of more samples than one.

        Args:
            samples: Number of samples.
            two: Bytes of a micro-batch of two samples, which share casts of weights, masks and tables. None counts
                every sample like the first, which can be too much.
        """
        if two is None or samples < 1:
            return SavedBytes(*(samples * each for each in self))
        return SavedBytes(*(_of_samples(one, both, samples) for one, both in zip(self, two, strict=True)))


def _of_samples(one: int, two: int, samples: int) -> int:
    """Continue the bytes of one and two samples; below what there is where a second sample costs more than the first.

    A tensor of one sample may go another way (a view in place of a copy), which says nothing of further samples.
    """
    if samples > 1 and two > 2 * one:
        return samples * two // 2
    return one + max(two - one, 0) * (samples - 1)


@dataclass(frozen=True)
class Probe:
    """The work of one rank for a micro-batch of one sample, and the bytes it saves.

    It is made once for all candidates that differ only in how samples are divided.

    Args:
        step: After the twins of its axes, precision and recomputation.
        saved: Bytes saved from forward to backward.
        slack: Ratio of the bytes taken of the limit to the bytes of tensors.
        taken: Returns the fewest bytes of the limit that a step's tensors need, without slack.
        again: Returns the saved bytes of a micro-batch of more samples; None if they cannot be found.
    """

    step: Step
    saved: SavedBytes
    slack: float
    taken: Callable[[Step], int]
    again: Callable[[int], SavedBytes] | None = None

    @functools.cached_property
    def saved_by_two(self) -> SavedBytes | None:
        """Return the saved bytes of a micro-batch of two samples; None if they cannot be found."""
        return None if self.again is None else self.again(2)

    @property
    def offloaded_bytes(self) -> int:
        """Return the bytes that forward sends to the host and backward brings back."""
        return self.step.activations.offloaded_bytes if self.step.activations is not None else 0

    @functools.cached_property
    def num_blocks(self) -> int:
        """Return the number of blocks that a pipeline can divide."""
        return sum(block.count for block in self.step.blocks if block.name != "outside")


def probe_of(plan: Plan, again: Callable[[int], SavedBytes] | None = None) -> Probe:
    """Make a probe from a plan."""
    if plan.taken_bytes is None:
        return Probe(plan.step, saved_by(plan), 1.0, lambda step: needed_bytes(step, memory(step)), again)
    slack = plan.taken_bytes / max(_at_peak(plan.step), 1)
    # For a real module, when gradients are there is known block by block, and parameters alone do not show it.
    known = plan.step.activations
    but_for: tuple[Literal["recomputation"], ...] = ("recomputation",) if known is not None and known.transients else ()
    return Probe(plan.step, saved_by(plan), slack, functools.partial(_at_peak, but_for=but_for), again)


def saved_by(plan: Plan) -> SavedBytes:
    """Return the bytes that a plan saves of its micro-batch."""
    known, saved = plan.step.activations, plan.memory.activations or 0
    behind = min(known.outside_bytes, saved) if known is not None else 0
    # Without taken_bytes, memory is a sum of classes, and none of them has what only the loss's backward makes.
    loss = known.loss_bytes if known is not None and plan.taken_bytes is not None else 0
    # The rows of which a loss has the logits at once do not grow evenly with the samples: bounds go without them.
    loss = 0 if any(isinstance(each, Method) and each.fuses_loss for each in plan.strategy.methods) else loss
    return SavedBytes(saved - behind, behind, loss)


def _at_peak(step: Step, but_for: tuple[Literal["recomputation"], ...] = ()) -> int:
    return peak(step, but_for).reserved_bytes + (memory(step).host_total if step.on_cpu else 0)


def probing(precision: Choice, recompute: Choice, rest: Choice, *, sharded: bool) -> Choice:
    """Choose the methods of a probe: those that need no other axes and no sharding, and change the work of a sample.

    Sharding methods gather weights in the precision in which they compute, where autocast casts them in every layer:
    that is time, and bytes for backward. All of them do it alike, so one stands for all.
    """
    alone = (each for each in rest if getattr(each, "axis", None) is None and not _lacks(each) and not _no_probes(each))
    return (*(_any_sharding() if sharded and precision else ()), *precision, *recompute, *alone)


def _no_probes(method: MethodConfig) -> bool:
    """Return whether a method changes states alone, or names a number of micro-batches.

    A probe has its own number.
    """
    return isinstance(method, Method) and (method.asked_micro_batches is not None or method.of_state)


def _lacks(method: MethodConfig) -> bool:
    """Return whether a method needs another one in the strategy."""
    return isinstance(method, Method) and any(need.when(method) for need in method.needs)
