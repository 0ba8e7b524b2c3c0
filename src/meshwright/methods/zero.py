"""Shard with FSDP2: the methods `zero1`, `zero2` and `fsdp`, and the steps of the engine that they share.

The file reads in the order of a job: the three configs, each with its twins; :func:`shard`, which is their ``apply``,
and its steps; what runs around a step; the check that all ranks gather in one order. Keys, units and ``cost``, which a
plan needs without a job, are in :mod:`~meshwright.methods.zero_config`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from meshwright.comm.compression import route
from meshwright.cost import Step, axis_parts
from meshwright.errors import ModelError, StrategyError
from meshwright.methods.base import Conflict, torch_dtype
from meshwright.methods.birth import give_parameters
from meshwright.methods.comm import quantise_units
from meshwright.methods.job import (
    AVERAGED,
    MAX_EXACT_SUM,
    SAME_EXPERTS,
    STEP_AXES,
    Job,
    MeshAxes,
    MicroBatchContext,
    guards_are_on,
    sum_over,
)
from meshwright.methods.zero_config import (
    Gathers,
    Units,
    ZeroMethod,
    not_beside,
    shard_cost,
    shard_dim,
    unit_of,
    units_of,
)
from meshwright.nn import (
    CollectiveLog,
    align_deferred_gradients,
    average_gradients,
    exchange_on_host,
    find_blocks,
    follow_thawing,
    gathered_root,
    parameter_groups,
    recover_in_forward,
    reshard_at_updates,
    reshard_units,
    wrap_method,
)
from meshwright.optim import local_tensor
from meshwright.runtime import HostCopy, groups_along, mesh_of_parts
from meshwright.runtime.torch_internals.autograd import BACKWARD_HOOKS, backward_hooks_of
from meshwright.runtime.torch_internals.dtensor import side_by_side
from meshwright.runtime.torch_internals.fsdp import MANAGED, keep_nearby, set_async_unshard, unsharded_of

# --- The methods: ZeRO stages 1, 2 and 3 (Rajbhandari et al. 2020)


class Zero1(ZeroMethod):
    """Shards optimizer states: each rank updates its shard; weights and gradients are whole while a step runs.

    Gradients of all micro-batches accumulate locally and are reduced once: the least communication of the three.
    """

    method_name: ClassVar[str] = "zero1"
    summary: ClassVar[str] = "shards optimizer states; gradients are reduced once per step"
    effect: ClassVar[str] = "memory: optimizer states / n. Communication: as data parallelism, once per step"
    seed_name: ClassVar[str | None] = "ATorch: zero1"
    conflicts: ClassVar[tuple[Conflict, ...]] = not_beside("zero2", "fsdp")

    def apply(self, job: Job) -> None:
        """Shard with FSDP2; parameters stay gathered and gradients whole until the last micro-batch."""
        shard(self, job, reshard_after_forward=False, reduce_once=True)

    def cost(self, step: Step) -> Step:
        """Add one gather and one reduction of everything per step."""
        return shard_cost(self, step, gathers="once", reduce_once=True)


class Zero2(ZeroMethod):
    """Shards gradients and optimizer states: weights are gathered once per step and kept through backward.

    Gradients are reduced as they come. FSDP's SHARD_GRAD_OP.
    """

    method_name: ClassVar[str] = "zero2"
    summary: ClassVar[str] = "shards gradients and optimizer states; weights stay whole through a step"
    effect: ClassVar[str] = (
        "memory: gradients, optimizer states / n. Communication: one gather, one reduction per micro-batch"
    )
    seed_name: ClassVar[str | None] = "ATorch: zero2"
    conflicts: ClassVar[tuple[Conflict, ...]] = not_beside("fsdp")

    def apply(self, job: Job) -> None:
        """Shard with FSDP2; parameters stay gathered until the last backward."""
        shard(self, job, reshard_after_forward=False, reduce_once=False)

    def cost(self, step: Step) -> Step:
        """Add one gather per step and one reduction per micro-batch."""
        return shard_cost(self, step, gathers="once", reduce_once=False)


class Fsdp(ZeroMethod):
    """Shards parameters, gradients and optimizer states: a block's weights are whole only while it computes.

    They are gathered in forward, freed, and gathered again in backward.
    """

    method_name: ClassVar[str] = "fsdp"
    summary: ClassVar[str] = "shards weights, gradients and optimizer states; gathers block by block"
    effect: ClassVar[str] = (
        "memory: weights, gradients, optimizer states / n. Communication: two gathers, one reduction per micro-batch"
    )
    seed_name: ClassVar[str | None] = "ATorch: fsdp"

    reshard_after_forward: bool | int = True
    """True frees weights after forward; False keeps them (that is zero2); n keeps them sharded over n ranks."""

    def check(self, job: Job) -> None:
        """Refuse models that FSDP2 cannot shard, and a group of ranks that does not divide the axis."""
        super().check(job)
        group, ranks = self.reshard_after_forward, job.size(job.shard_axis)
        if not isinstance(group, bool) and (group < 1 or ranks % group):
            raise StrategyError(
                "fsdp: reshard_after_forward is not a number of ranks that divides the sharding axis",
                expected=f"True, False or a divisor of {ranks}",
                got=repr(group),
                fix="use True, or the number of ranks within a node",
            )
        if self._gathers(ranks) == "nearby" and job.size("tensor") > 1:
            raise StrategyError(
                "fsdp: FSDP2 cannot keep weights on fewer ranks after forward that tensor_parallel has split",
                expected="reshard_after_forward True or False beside tensor_parallel",
                got=repr(group),
                fix="use True, or leave tensor_parallel out",
            )

    def apply(self, job: Job) -> None:
        """Shard with FSDP2."""
        shard(self, job, reshard_after_forward=self.reshard_after_forward, reduce_once=False)

    def cost(self, step: Step) -> Step:
        """Add two gathers and one reduction per micro-batch."""
        return shard_cost(self, step, gathers=self._gathers(step.size(step.shard_axis)), reduce_once=False)

    def _gathers(self, ranks: int) -> Gathers:
        group = self.reshard_after_forward
        if not group:
            return "once"
        return "nearby" if not isinstance(group, bool) and 1 < group < ranks else "twice"


# --- ``apply``


def shard(config: ZeroMethod, job: Job, *, reshard_after_forward: bool | int, reduce_once: bool) -> None:
    """Shard the model's parameters over ``job.shard_axis``, unit by unit, and replicate over the other axes.

    Its twin is :func:`~meshwright.methods.zero_config.shard_cost`.

    Args:
        config: The method's keys.
        job: The job; its model is changed in place.
        reshard_after_forward: Whether units are freed after forward and gathered again in backward; an integer keeps
            them sharded over that many ranks (within a node) in between.
        reduce_once: Whether gradients of several micro-batches accumulate whole and are reduced once.
    """
    if job.pipeline is not None:
        # torch's schedules split backward while weights are whole, and reduce once.
        reshard_after_forward, reduce_once = False, True
    model, blocks = job.model, [path for path, _ in find_blocks(job.model)]
    units = units_of(config, model, job.strategy, dict(job.axes))
    for parameter in model.parameters():
        if not parameter.is_contiguous():  # transposed weights, and convolutions in channels_last: FSDP2 refuses them
            parameter.data = parameter.data.contiguous()
    is_nearby = not isinstance(reshard_after_forward, bool) and 1 < reshard_after_forward < job.size(job.shard_axis)
    num_nearby, reshard_after_forward = int(reshard_after_forward), is_nearby or reshard_after_forward
    placed = functools.partial(_placed, 1 if is_nearby else job.size(job.shard_axis))
    ignored = units.ignored | _shard_experts(config, job, reshard_after_forward, placed)
    _shard_units(config, job, units, ignored, blocks, reshard_after_forward, placed)
    if is_nearby:
        _keep_nearby(job, num_nearby)
    if job.birth is not None:
        offloaded = job.sharding.offloaded_units
        new_of = give_parameters(model, job.birth, job.device, lambda name: unit_of(name, blocks) in offloaded)
        ignored = {new_of.get(parameter, parameter) for parameter in ignored}
        units = dataclasses.replace(units, ignored={new_of.get(each, each) for each in units.ignored})
    share_hooks(model)
    _choose_collectives(job)
    if config.forward_prefetch and reshard_after_forward is not False:
        _prefetch_forward(units)
    _average_unsharded(units.ignored, job)
    _reshard_around_steps(job)
    follow_thawing(model)
    _adapt_to_transformers(config.method_name, job)
    _check_gather_order(job, ignored, blocks)
    if not reduce_once and job.mesh_axes.num_averaged > job.size(job.shard_axis):  # HSDP
        align_deferred_gradients(model.modules())
    job.micro_batch = _micro_batch_context(model, reduce_once=reduce_once, keep=reshard_after_forward is False)


def _shard_experts(
    config: ZeroMethod, job: Job, reshard_after_forward: bool | int, placed: Callable[[nn.Parameter], Shard]
) -> set[nn.Parameter]:
    """Shard experts over the ranks that have the same ones; return their parameters if every rank has its own."""
    if job.experts is None:
        return set()
    assert job.shard_axis is not None
    policy = _precision(config, job)
    if job.shard_axis == "expert":
        job.experts.compute_in(policy.param_dtype)
        return job.experts.parameters()
    job.experts.run_always()
    mesh = _mesh(job, SAME_EXPERTS)
    # Inputs of experts include the router's weights, which are not to be cast.
    policy = dataclasses.replace(policy, cast_forward_inputs=False)
    for module in job.experts.modules:
        fully_shard(
            module,
            mesh=mesh,  # type: ignore[arg-type]
            mp_policy=policy,
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=placed,
        )
    return set()


def _shard_units(
    config: ZeroMethod,
    job: Job,
    units: Units,
    ignored: set[nn.Parameter],
    blocks: list[str],
    reshard_after_forward: bool | int,
    placed: Callable[[nn.Parameter], Shard],
) -> None:
    """Call ``fully_shard`` on every unit, inner before outer, and last on the model."""
    inside_experts = job.experts.inside() if job.experts is not None else set()
    mesh, precision, whole = _mesh(job), _precision(config, job), set(job.model.parameters()) - ignored

    def shard_unit(modules: list[nn.Module], path: str | None) -> None:
        """Shard modules that are gathered together, in a block or (None) outside of them."""
        # Outside: the root is needed first in backward; freeing it in between would only gather it twice.
        is_complex = any(p.is_complex() for module in modules for p in module.parameters() if p in whole)
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh=mesh,
            mp_policy=MixedPrecisionPolicy() if is_complex else precision,  # no half precision is complex
            ignored_params=ignored or None,
            reshard_after_forward=reshard_after_forward if path else False,
            shard_placement_fn=placed,
            offload_policy=_offload_policy(job, unit_of(f"{path}.", blocks) if path else ""),
        )

    for modules in units.trainable:
        shard_unit(modules, None)
    for path, modules in units.apart:
        shard_unit(modules, path)
    for path, module in reversed(units.modules):
        if not isinstance(module, FSDPModule) and module not in inside_experts:
            shard_unit([module], path)
    shard_unit([job.model], None)


def _placed(parts: int, parameter: nn.Parameter) -> Shard:
    """Return how a parameter is cut for so many ranks; see :func:`~meshwright.methods.zero_config.shard_dim`."""
    return Shard(shard_dim(local_tensor(parameter).shape, parts))


def _keep_nearby(job: Job, number: int) -> None:
    """Let all units keep their weights on so many neighbouring ranks after forward; collective over the world.

    Given the number, FSDP2 makes a mesh of its own for every unit, with its communicators (pytorch#178749), and where
    it shards over a part of the world, others' ranks do not take part in that.
    """
    assert job.shard_axis is not None
    mesh = mesh_of_parts(job.require_mesh(), axis_parts(job.shard_axis), number)
    for unit in job.model.modules():
        for group in parameter_groups(unit) if isinstance(unit, FSDPModule) else ():
            keep_nearby(group, mesh)


def _mesh(job: Job, others: tuple[str, ...] = AVERAGED) -> DeviceMesh:
    """Return the mesh of one dim (FSDP) or two (HSDP: replicated over the first, sharded over the second).

    Args:
        job: The job.
        others: The axes along which ranks have the same parameters, or shards of them.
    """
    assert job.shard_axis is not None
    together = axis_parts(job.shard_axis)
    replicated = [axis for axis in others if axis not in together and job.size(axis) > 1]
    shards = job.mesh_axes.shard_mesh
    return side_by_side([job.mesh_axes.flat_mesh(*replicated), shards]) if replicated else shards


def _precision(config: ZeroMethod, job: Job) -> MixedPrecisionPolicy:
    own, asked = config.mixed_precision, job.sharding.precision
    param = (own.param_dtype if own else None) or (asked.compute if asked else None)
    # Always named: torch's default is the compute dtype until 2.13, and the dtype of the weights later.
    reduce = (own.reduce_dtype if own else None) or (asked.reduce if asked else None) or param
    return MixedPrecisionPolicy(
        param_dtype=torch_dtype(param) if param else None, reduce_dtype=torch_dtype(reduce) if reduce else None
    )


def _offload_policy(job: Job, unit: str) -> OffloadPolicy:
    """Return the policy for the parameters of a block, or for those outside of blocks (``""``)."""
    asked = job.sharding
    return CPUOffloadPolicy(pin_memory=asked.pin_memory) if unit in asked.offloaded_units else OffloadPolicy()


def share_hooks(model: nn.Module) -> None:
    """Let hooks on the shards of FSDP2, registered before or later, see the gradients of gathered parameters.

    A user's hook on a parameter gets the same as under data parallelism: this rank's own whole gradient, before it is
    averaged. FSDP2 alone would never call it: FSDP2 computes with gathered parameters, and the hooks are on the shards.
    """
    for module in model.modules():
        for group in parameter_groups(module) if isinstance(module, FSDPModule) else ():
            for each in group.fsdp_params:
                if backward_hooks_of(each.sharded_param) is None:
                    setattr(each.sharded_param, BACKWARD_HOOKS, OrderedDict())  # to which later ones are added
                each.init_unsharded_param = functools.partial(_gathered, each, each.init_unsharded_param)


def _gathered(parameter: Any, gather: Callable[[], None]) -> None:
    gather()
    hooks = backward_hooks_of(parameter.sharded_param)
    if backward_hooks_of(unsharded_of(parameter)) is not hooks:
        setattr(unsharded_of(parameter), BACKWARD_HOOKS, hooks)


def _choose_collectives(job: Job) -> None:
    """Replace FSDP2's collectives: through shared memory on CPU hosts, and compressed where ``comm`` asks for it."""
    if job.device.type == "cpu":
        exchange_on_host(job.model)
    compression = job.sharding.compression
    if compression is not None and job.shard_axis is not None and job.size(job.shard_axis) > 1:
        group, axes = job.mesh_axes.shard_mesh.get_group(), axis_parts(job.shard_axis)
        alike = groups_along(job.require_mesh(), axes)
        way = route(group, compression.neighbours(job.axes, job.shard_axis), alike)
        quantise_units(job.model, compression, way)
    elif job.device.type == "cpu":
        # There is no stream for gathers that start ahead: they run in gloo's threads, or are waited for at once.
        set_async_unshard(job.model)


def _prefetch_forward(units: Units) -> None:
    for (_, module), (_, following) in itertools.pairwise(units.modules):
        if isinstance(module, FSDPModule) and isinstance(following, FSDPModule):
            module.set_modules_to_forward_prefetch([following])


def _average_unsharded(ignored: set[nn.Parameter], job: Job) -> None:
    """Move unsharded parameters to the device, cast under ``half``, and average their gradients, as FSDP2 does not.

    Under ``amp_native`` autocast reconciles the dtypes; under ``half`` inputs are in half precision, and CUDA's kernels
    mix no dtypes.
    """
    precision = job.sharding.precision
    dtype = torch_dtype(precision.compute) if precision is not None and precision.casts_whole else None
    for parameter in ignored:
        parameter.data = parameter.data.to(job.device, dtype if parameter.is_floating_point() else None)
    if ignored and dtype is not None:
        job.optimizer.master_weights = True
    ranks = job.mesh_axes.num_averaged, job.mesh_axes.averaging_group if ignored else None
    frozen = average_gradients(ignored, *ranks)

    def average_thawed(module: nn.Module, args: Any) -> None:
        frozen[:] = average_gradients(frozen, *ranks)

    if frozen:  # they may train later, and have no gradient to average before
        job.model.register_forward_pre_hook(average_thawed)


# --- Around a step


def _reshard_around_steps(job: Job) -> None:
    """Free gathered weights when their shards are updated, and after a forward that fails."""
    sharded = [module for module in job.model.modules() if isinstance(module, FSDPModule)]
    reshard_at_updates(sharded)
    # The hook above goes by the shards that an optimizer updates. One over master weights has others.
    job.optimizer.before_update_or_skip.append(functools.partial(reshard_units, sharded))
    if job.pipeline is None:  # a pipeline cleans up after itself
        recover_in_forward(job.model)


def _adapt_to_transformers(method: str, job: Job) -> None:
    """Keep transformers' models from running other layers, or generating longer, on one rank than on others."""
    model = job.model
    for module in model.modules():
        # transformers reads this flag: ranks then generate equally long and drop no layers of their own.
        setattr(module, MANAGED, True)
    if hasattr(type(model), "generate"):
        wrap_method(model, "generate", functools.partial(_generate_gathered, model))
    config = getattr(model, "config", None)
    for key in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        if getattr(config, key, 0):
            job.notices.append(
                f"{method}: config.{key}={getattr(config, key)} leaves out layers at random, on every rank others; "
                "ranks that gather layers together then wait for each other, or get each other's weights. Set it to 0, "
                "unless the model runs all layers where it is sharded"
            )


def _generate_gathered(model: nn.Module, generate: Callable[..., object], *args: object, **kwargs: object) -> object:
    # The encoder of T5, or the model inside peft's adapters, is called without the model around it, whose forward would
    # gather the root's parameters.
    with gathered_root(model):
        return generate(*args, **kwargs)


def _micro_batch_context(model: nn.Module, *, reduce_once: bool, keep: bool) -> MicroBatchContext:
    assert isinstance(model, FSDPModule)

    def switch(is_last: bool) -> None:
        model.set_is_last_backward(is_last)
        if reduce_once:
            model.set_requires_gradient_sync(is_last)
        else:
            model.set_requires_all_reduce(is_last)  # over the data axis of HSDP: once is enough
        if keep:
            model.set_reshard_after_backward(is_last)  # the next micro-batch needs them whole again

    @contextlib.contextmanager
    def context(is_last: bool) -> Iterator[None]:
        switch(is_last)
        try:
            yield
        finally:
            switch(True)

    return context


# --- [Note: gather-order check]
#
# Ranks pair their gathers and reductions by order alone. Ranks that run different layers get each other's weights and
# gradients, silently where the counts are equal; where they are not, ranks wait for each other or collectives fail. A
# ``CollectiveLog`` (nn/fsdp_units.py) notes what each rank exchanges in a step. ``GatherOrderCheck`` hashes the log
# into three small numbers, which are added up with the losses (``MeanLoss`` in training/accelerated.py): if the sum of
# a number is not the rank's own times the number of ranks, they differ. Only then do they exchange the logs to name the
# layer. (Sums of small integers are exact, and means are not: ``mean_over`` in methods/job.py.) The check is a guard,
# with the switch of all: [Note: cross-rank guards] in methods/job.py.

_NUM_HASHES = 3  # with many ranks each must be small, and a single one would sometimes be equal by chance


def _check_gather_order(job: Job, ignored: set[nn.Parameter], blocks: list[str]) -> None:
    if not guards_are_on() or not any(job.size(axis) > 1 for axis in STEP_AXES):
        return
    asked = job.sharding.offloaded_units
    offloaded = {p for name, p in job.model.named_parameters() if unit_of(name, blocks) in asked}
    experts = job.experts.parameters() if job.experts is not None else set()  # other ranks have other experts
    log = CollectiveLog(job.model, ignored | experts, offloaded, gathers=job.size(job.shard_axis) > 1)
    job.gather_order_check = check = GatherOrderCheck(job.mesh_axes, log)
    job.optimizer.before_update_or_skip.append(check.before_update)


class GatherOrderCheck:
    """Compares in every step what the ranks have gathered and reduced; see [Note: gather-order check].

    Args:
        ranks: The ranks to compare.
        log: What this rank gathers and reduces.
    """

    def __init__(self, ranks: MeshAxes, log: CollectiveLog) -> None:
        self._ranks, self._log = ranks, log
        self._num_ranks = math.prod(map(ranks.size, STEP_AXES))
        self._order = b""
        # On a GPU: the sums of the last step, and the order that this rank sent.
        self._sent: tuple[HostCopy, bytes] | None = None

    def forget(self) -> None:
        """Exclude from the comparison everything that has run until now."""
        self._log.take()

    def numbers(self) -> list[int]:
        """Return as many numbers as always, equal on ranks that have run the same layers since the last call."""
        self._order = self._log.take()
        return self._hashes(self._order)

    def check(self, sums: torch.Tensor) -> None:
        """Compare the sums of all ranks' numbers (1-dim); on a GPU those of the last step, to avoid waiting.

        Raises:
            ModelError: On every rank, when they have run different layers.
        """
        if sums.device.type != "cuda":
            self._compare(sums.tolist(), self._order, "in this step, which has changed no weight")
            return
        before, self._sent = self._sent, (HostCopy(sums), self._order)
        if before is not None:
            # They have arrived, or soon will, and the device computes this step meanwhile.
            self._compare(before[0].tolist(), before[1], "in the last step, after which weights are wrong")

    def before_update(self) -> None:
        """Compare the ranks in a loop written by hand, which adds up no losses; a collective of its own."""
        if self._log.is_any():
            device = self._ranks.require_mesh().device_type
            numbers = torch.tensor(self.numbers(), dtype=torch.float32).to(device, non_blocking=True)
            self.check(sum_over(self._ranks, numbers, STEP_AXES))

    def _hashes(self, order: bytes) -> list[int]:
        digest = hashlib.blake2b(order, digest_size=4 * _NUM_HASHES).digest()
        limit = MAX_EXACT_SUM // self._num_ranks  # so that the sum over the ranks is exact
        return [int.from_bytes(digest[at : at + 4]) % limit for at in range(0, len(digest), 4)]

    def _compare(self, sums: Sequence[float], order: bytes, when: str) -> None:
        if list(sums) == [number * self._num_ranks for number in self._hashes(order)]:
            return
        apart = self._where_apart(order)
        if apart is not None:
            raise ModelError(
                "The ranks have run different layers, and got each other's weights and gradients",
                expected="the same layers in the same order on every rank: all of them exchange each one together",
                got=f"{apart}, {when}",
                fix="let all ranks decide alike which layers run, by a torch.Generator of one seed (a transformers "
                "model: layerdrop=0 in its config); or leave the sharding method out, and set "
                "find_unused_parameters=True",
            )

    def _where_apart(self, order: bytes) -> str | None:
        """Describe the first exchange in which the ranks' layers differ; None if they are alike. Collective."""
        orders = {dist.get_rank(): order}
        for axis in STEP_AXES:
            if self._ranks.size(axis) > 1:
                parts: list[dict[int, bytes]] = [{}] * self._ranks.size(axis)
                dist.all_gather_object(parts, orders, group=self._ranks.require_mesh().get_group(axis))
                orders = {rank: each for part in parts for rank, each in part.items()}
        names = {rank: self._log.names(each) for rank, each in sorted(orders.items())}
        longest = max(map(len, names.values()))
        at = next((at for at in range(longest) if len({tuple(each[at : at + 1]) for each in names.values()}) > 1), None)
        if at is None:
            return None
        first = {(each[at] if at < len(each) else "nothing"): rank for rank, each in reversed(names.items())}
        found = [f"{name} on rank {rank}" for name, rank in sorted(first.items(), key=lambda each: each[1])]
        return " and ".join(found[:4]) + f" as exchange {at + 1}"
