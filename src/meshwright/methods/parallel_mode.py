"""Build the named mesh, and replicate over its `data` axis with DDP where no method shards."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from meshwright.cost import AVERAGING, Step, Traffic, element_bytes, mean_traffic
from meshwright.errors import ModelError, StrategyError
from meshwright.methods.base import Method, Phase
from meshwright.methods.gradient_averaging import (
    GradientAverager,
    SharedBuffers,
    average_every_backward,
    refuse_frozen,
)
from meshwright.methods.job import AVERAGED, SAME_EXPERTS, Job, MicroBatchContext, guards_are_on
from meshwright.nn.fp8 import is_scaling_state
from meshwright.optim import guard_of
from meshwright.optim.guarded_step import call_around
from meshwright.runtime import AXES, agreed, build_mesh, check_axes
from meshwright.runtime.torch_internals.c10d import COMM_HOOKS

# --- The method


_SPELLINGS = {"pipe": "pipeline"}


class ParallelMode(Method):
    """Names the axes of the mesh, innermost first, and optionally the order of the ranks on it.

    Config as in ATorch: ``([("tensor", 4), ("data", 2)], rank_order or None)``; also ``{"zero": 2, "data": 2}``. None
    means data parallelism over all ranks. The size of ``data`` is adjusted to the number of ranks.
    """

    method_name: ClassVar[str] = "parallel_mode"
    phase: ClassVar[Phase] = Phase.MESH
    summary: ClassVar[str] = "names the mesh axes; the data axis averages gradients over replicas"
    effect: ClassVar[str] = "memory: as one rank's. Communication: one all-reduce of all gradients per step"
    seed_name: ClassVar[str | None] = "ATorch: parallel_mode"

    axes: tuple[tuple[str, int], ...] = ()
    rank_order: tuple[int, ...] | None = None

    @classmethod
    def from_short(cls, raw: Any) -> Mapping[str, Any]:
        """Read ``([(name, size), …], rank_order)`` with ATorch's further items, and a bare list of axes."""
        if not isinstance(raw, tuple | list) or not raw:
            return super().from_short(raw)
        if len(raw) == 2 and isinstance(raw[0], str):  # one axis
            return {"axes": (raw,)}
        if all(isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], str) for item in raw):
            return {"axes": raw}
        if len(raw) > 2 and raw[2]:
            raise StrategyError(
                "parallel_mode: several instances of one mesh are not supported",
                expected="([(name, size), …], rank_order)",
                got=f"multi_instance={raw[2]!r}",
                fix="start one job for each instance",
            )
        return {"axes": raw[0] or (), "rank_order": raw[1] if len(raw) > 1 else None}

    @classmethod
    def normalised(cls, keys: dict[str, Any]) -> dict[str, Any]:
        """Accept axes given as keys (``zero=2, data=2``) and ATorch's spelling ``pipe``."""
        named = [(name, keys.pop(name)) for name in list(keys) if _SPELLINGS.get(name, name) in AXES]
        if named and "axes" not in keys:
            keys["axes"] = named
        if isinstance(keys.get("axes"), tuple | list):
            keys["axes"] = tuple(_spelled(item) for item in keys["axes"])
            if all(isinstance(item, tuple) and isinstance(item[1], int) for item in keys["axes"]):
                check_axes(keys["axes"])
        return keys

    def text_arguments(self) -> dict[str, Any]:
        """Return the axes as keys."""
        order = {"rank_order": list(self.rank_order)} if self.rank_order is not None else {}
        return {**dict(self.axes), **order}

    def apply(self, job: Job) -> None:
        """Create the mesh and its process groups."""
        mesh = build_mesh(self.axes, self.rank_order, job.device.type)
        job.mesh_axes = dataclasses.replace(job.mesh_axes, mesh=mesh)

    def cost(self, step: Step) -> Step:
        """Set the axes of the simulated step."""
        return step.replace(axes=self.axes)


def _spelled(item: Any) -> Any:
    if isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], str):
        return (_SPELLINGS.get(item[0], item[0]), item[1])
    return item


# --- Data parallelism


def replicate(job: Job) -> None:
    """Average gradients over ``data``, ``expert``, ``sequence`` and ``context``, where no method shards parameters.

    DDP averages, or a :class:`GradientAverager` where parameters are DTensors or differ from rank to rank. Experts are
    not averaged over ``expert``.
    """
    trainable = any(parameter.requires_grad for parameter in job.model.parameters())
    if job.shard_axis is not None or job.mesh_axes.num_averaged == 1:
        return
    if job.is_split or not trainable:  # DDP refuses a model without trainable parameters
        job.micro_batch = _averaging(averagers(job))
        return
    group = job.mesh_axes.flat_mesh(*AVERAGED).get_group()
    late = _late(job, group)
    # ``apply_strategy`` has made the replicas equal.
    options = {"find_unused_parameters": job.find_unused_parameters, "init_sync": False, **job.ddp_options}
    replicas = Replicas(
        job.model,
        device_ids=[job.device.index] if job.device.type == "cuda" else None,
        process_group=group,
        gradient_as_bucket_view=True,  # otherwise every gradient exists twice
        **options,
    )
    if job.sharding.compression is not None:
        from meshwright.methods.comm import averaging_route, quantise_averages

        way = averaging_route(job, job.sharding.compression, AVERAGED)
        quantise_averages(replicas, job.sharding.compression, way, job.device)
    average_every_backward(replicas)
    if guards_are_on():
        job.optimizer.wrappers.append(AveragedGradients(replicas, group).follow)
    job.model = replicas
    job.micro_batch = functools.partial(_accumulating, replicas, late)


class Replicas(DistributedDataParallel):
    """DDP that passes on the attributes of its model, such as ``config``, and the method ``generate``.

    Other methods of the model are refused: they would compute gradients that are not averaged. A deep copy averages its
    own gradients, over the same ranks.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Replicas:
        """Copy the model; DDP itself copies over the default process group only, and drops its communication hooks."""
        memo[id(self.process_group)] = self.process_group  # hooks inside refer to it, too
        memo[id(self)] = twin = type(self).__new__(type(self))
        uncopied = ("reducer", "logger", COMM_HOOKS)
        state = {name: value for name, value in vars(self).items() if name not in uncopied}
        twin.__setstate__({**copy.deepcopy(state, memo), COMM_HOOKS: []})
        for hook, hook_state in getattr(self, COMM_HOOKS):
            twin.register_comm_hook(copy.deepcopy(hook_state, memo), hook)
        return twin

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of DDP, else of the model, unless it is a method that may train."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = getattr(super().__getattr__("module"), name)
            if name == "generate" or not inspect.ismethod(found):
                return found
            raise AttributeError(
                f"DistributedDataParallel has no {name!r}, and the model's own would train on this rank alone. What to "
                f"do: call the model itself, or model.module.{name} where nothing trains"
            ) from None


def share_buffers(job: Job) -> None:
    """Keep the buffers that forwards change equal on all ranks that average gradients, where DDP does not.

    Buffers of experts are shared by the ranks that have the same experts.
    """
    if isinstance(job.model, Replicas) or job.mesh_axes.num_averaged == 1:
        return
    inside = job.experts.inside() if job.experts is not None else set()
    for axes in (AVERAGED, SAME_EXPERTS) if inside else (AVERAGED,):
        if all(job.size(axis) == 1 for axis in axes):
            continue
        of_experts = axes is not AVERAGED

        def skip(module: nn.Module, name: str, of_experts: bool = of_experts) -> bool:
            return is_scaling_state(name) or (module in inside) != of_experts

        # Made on every rank, for that is collective over the world: a stage may have no buffers where others have.
        group = job.mesh_axes.flat_mesh(*axes).get_group()
        shared = SharedBuffers(job.model, group, job.device, skip)
        if shared.places:
            job.optimizer.before_update_or_skip.append(shared.share)


def averagers(job: Job, *, in_backward: bool = True) -> list[GradientAverager]:
    """Return what averages gradients in place of DDP and FSDP2: of experts over the ranks that have the same ones.

    An expert may get no token on any rank: it has no gradient then, as in one process.

    Args:
        job: The job; none of its parameters is sharded.
        in_backward: See :class:`GradientAverager`.
    """
    from meshwright.methods.comm import averages_of

    experts = job.experts.parameters() if job.experts is not None else set()
    others = set(job.model.parameters()) - experts
    every: list[tuple[tuple[str, ...], set[nn.Parameter], bool]] = [(AVERAGED, others, job.find_unused_parameters)]
    every += [(SAME_EXPERTS, experts, True)] if job.experts is not None else []
    found = []
    for axes, only, unused in every:
        if all(job.size(axis) == 1 for axis in axes):
            continue
        # Also on a pipeline rank that has none of them: making a group is collective over the world.
        group = job.mesh_axes.flat_mesh(*axes).get_group()
        found.append(
            GradientAverager(
                job.model,
                group,
                allow_unused=unused,
                in_backward=in_backward,
                only=only,
                compressed=averages_of(job, axes),
                at_end=only is experts,
            )
        )
    return found


def _averaging(every: list[GradientAverager]) -> MicroBatchContext:
    @contextlib.contextmanager
    def accumulating(is_last: bool) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for averager in every:
                stack.enter_context(averager.accumulating(is_last))
            yield

    return accumulating


def _late(job: Job, group: dist.ProcessGroup) -> GradientAverager:
    """Average parameters that are unfrozen later: DDP ignores those that were frozen when it was made."""
    frozen = {p for p in job.model.parameters() if not p.requires_grad}
    if not job.find_unused_parameters:
        refuse_frozen(job.model)
    return GradientAverager(job.model, group, allow_unused=True, only=frozen)


@contextlib.contextmanager
def _accumulating(replicas: DistributedDataParallel, late: GradientAverager, is_last: bool) -> Iterator[None]:
    with contextlib.nullcontext() if is_last else replicas.no_sync(), late.accumulating(is_last):
        yield


def replicate_cost(step: Step) -> Step:
    """Add one mean of every gradient per step: the twin of :func:`replicate`."""
    if step.shard_axis is not None:
        return step
    axes = (*AVERAGING, "expert")  # one collective over all of them
    axis = next((axis for axis in axes if step.size(axis) > 1), "data")
    same = next((each for each in AVERAGING if step.size(each) > 1), "data")
    experts = [(count, p) for count, p in step.every_parameter() if p.trainable and p.expert is not None]
    # Each of their parameters adds one element that says whether it has a gradient.
    flags = sum(count * element_bytes(p, step.reduce_itemsize) for count, p in experts)
    return step.send(
        *mean_traffic(step, axis, math.prod(map(step.size, axes))),
        *mean_traffic(step, same, math.prod(map(step.size, AVERAGING)), experts=True),
        Traffic("all_reduce", same, flags, "backward"),
    )


# --- The guard

_TOLERANCE = 1e-5  # relative: devices of other kinds add in another order; other samples differ by far more


class AveragedGradients:
    """Compares the gradients of replicas before a step that no forward of DDP preceded.

    DDP averages only gradients that its own forward leads to. A loop that calls a module inside the model, or steps
    after ``no_sync``, would let the replicas drift apart. Steps after a forward of DDP, nearly all, are not checked.
    See [Note: cross-rank guards] in methods/job.py.

    Args:
        replicas: The DDP module.
        group: Its ranks.
    """

    def __init__(self, replicas: DistributedDataParallel, group: dist.ProcessGroup) -> None:
        self._replicas, self._group = replicas, group
        self._will_average = False
        replicas.register_forward_pre_hook(self._before_forward)

    def _before_forward(self, module: nn.Module, args: object) -> None:
        self._will_average |= torch.is_grad_enabled() and self._replicas.require_backward_grad_sync

    def follow(self, optimizer: Optimizer) -> Optimizer:
        """Check before each step of an optimizer from now on; return it."""
        guard = guard_of(optimizer)
        stepped = guard.inner if guard is not None else optimizer
        call_around(stepped, before=[lambda: self._check(stepped)], may_be_skipped=True)
        return optimizer

    def _check(self, optimizer: Optimizer) -> None:
        will_average, self._will_average = self._will_average, False
        if will_average:
            return
        smallest, largest = self._extremes(optimizer)
        if largest - smallest > _TOLERANCE * largest:
            raise agreed(
                ModelError(
                    "The ranks have gradients of their own, which nobody has averaged",
                    expected="in every step a forward of job.model itself, outside of no_sync, that leads to the loss",
                    got=f"none since the last step, and gradients of norms from {smallest:g} to {largest:g}; the "
                    "weights are as they were",
                    fix="call job.model, whose forward may choose what of it runs, in place of a module in it; where "
                    "ranks are to take steps of their own, use the method outer",
                )
            )

    @torch.no_grad()
    def _extremes(self, optimizer: Optimizer) -> tuple[float, float]:
        """Return the smallest and the largest norm of all gradients among the ranks; collective."""
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        device = next(self._replicas.parameters()).device
        total = torch.zeros((), dtype=torch.float64, device=device)
        for gradient in gradients:
            if gradient.layout == torch.strided:
                total += gradient.double().square().sum().to(device)
        norm = total.sqrt().nan_to_num(0.0, 0.0, 0.0)  # other guards judge gradients that are not finite
        both = torch.stack([-norm, norm])
        dist.all_reduce(both, dist.ReduceOp.MAX, self._group)
        smallest, largest = both.tolist()
        return -smallest, largest
