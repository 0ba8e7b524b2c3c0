"""Shard with FSDP2: `zero1`, `zero2` and `fsdp`, and the check that all ranks gather in one order."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from meshwright.comm.compression import route
from meshwright.cost import Compression, Step
from meshwright.errors import ModelError, StrategyError
from meshwright.methods.base import Conflict, Phase, torch_dtype
from meshwright.methods.comm import quantise_units
from meshwright.methods.gradient_averaging import broadcast_states
from meshwright.methods.job import STEP_AXES, Job, MeshAxes, mean_over
from meshwright.methods.zero_config import Gathers, Units, ZeroMethod, not_beside, shard_cost, unit_of, units_of
from meshwright.nn import (
    CollectiveLog,
    average_gradients,
    exchange_on_host,
    find_blocks,
    gathered_root,
    parameter_groups,
    recover_in_forward,
    reshard_at_updates,
    reshard_units,
    wrap_method,
)

_EXACT = 2**24  # up to which fp32, in which numbers travel, has every integer
_HOW_MANY = 3  # of many ranks numbers are small, and one of them would be equal by chance now and then


class _Met(NamedTuple):
    """What the ranks' numbers were on average, on their way from the device to the host."""

    means: torch.Tensor
    arrived: torch.cuda.Event
    order: bytes


class GatherOrderCheck:
    """Compares the ranks by numbers that go along with the mean of their losses.

    They would get each other's weights and gradients, where the counts are equal, without a word. Where they are not,
    ranks wait for each other, or their collectives fail.

    Args:
        job: Its ranks.
        exchanges: What they gather and reduce.
    """

    def __init__(self, ranks: MeshAxes, exchanges: CollectiveLog) -> None:
        self._ranks, self._exchanges = ranks, exchanges
        self._num_ranks = math.prod(map(ranks.size, STEP_AXES))
        self._order = b""
        self._met: _Met | None = None  # on a GPU: of the last time

    def forget(self) -> None:
        """Leave out of the comparison what has been run until now."""
        self._exchanges.take()

    def numbers(self) -> list[int]:
        """Equal on ranks that have run the same layers since the last time; always as many."""
        self._order = self._exchanges.take()
        return self._numbers_of(self._order)

    def check(self, means: torch.Tensor) -> None:
        """Look at the means of all ranks' numbers (1-dim); on a GPU at those of last time, as not to wait for them.

        Raises:
            ModelError: On every rank, when they have run different layers.
        """
        if means.device.type != "cuda":
            self._compare(means.tolist(), self._order, "in this step, which has changed no weight")
            return
        before, self._met = self._met, _sent_to_host(means, self._order)
        if before is not None:
            before.arrived.synchronize()  # the device has all of this step to do meanwhile
            self._compare(before.means.tolist(), before.order, "in the last step, after which weights are wrong")

    def before_update(self) -> None:
        """Compare in loops written by hand, by an exchange of its own: they take no mean of the losses."""
        if self._exchanges.is_any():
            numbers = torch.tensor(self.numbers(), dtype=torch.float32, device=self._ranks.require_mesh().device_type)
            self.check(mean_over(self._ranks, numbers, STEP_AXES))

    def _numbers_of(self, order: bytes) -> list[int]:
        digest = hashlib.blake2b(order, digest_size=4 * _HOW_MANY).digest()
        limit = _EXACT // self._num_ranks  # the sum of equal ones is exact, and so is their mean
        return [int.from_bytes(digest[at : at + 4]) % limit for at in range(0, len(digest), 4)]

    def _compare(self, means: Sequence[float], order: bytes, when: str) -> None:
        if list(means) != self._numbers_of(order):
            raise ModelError(
                "The ranks have run different layers, and got each other's weights and gradients",
                expected="the same layers in the same order on every rank: all of them exchange each one together",
                got=f"{self._where_apart(order)}, {when}",
                fix="let all ranks decide alike which layers run, by a torch.Generator of one seed (a transformers "
                "model: layerdrop=0 in its config); or leave the sharding method out, and set "
                "find_unused_parameters=True",
            )

    def _where_apart(self, order: bytes) -> str:
        """Return the first exchange in which ranks had different things; collective."""
        every = {dist.get_rank(): order}
        for axis in STEP_AXES:
            if self._ranks.size(axis) > 1:
                given: list[dict[int, bytes]] = [{}] * self._ranks.size(axis)
                dist.all_gather_object(given, every, group=self._ranks.require_mesh().get_group(axis))
                every = {rank: each for part in given for rank, each in part.items()}
        names = {rank: self._exchanges.names(each) for rank, each in sorted(every.items())}
        at = 0
        while len({tuple(each[at : at + 1]) for each in names.values()}) == 1:
            at += 1
        first = {(each[at] if at < len(each) else "nothing"): rank for rank, each in reversed(names.items())}
        told = [f"{name} on rank {rank}" for name, rank in sorted(first.items(), key=lambda each: each[1])]
        return " and ".join(told[:4]) + f" as exchange {at + 1}"


def _sent_to_host(means: torch.Tensor, order: bytes) -> _Met:
    there = torch.empty_like(means, device="cpu", pin_memory=True)
    there.copy_(means, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return _Met(there, arrived, order)


# --- Sharding with FSDP2: the ``apply`` that zero1, zero2 and fsdp share. Its twin is ``cost``.


def shard(config: ZeroMethod, job: Job, *, reshard_after_forward: bool | int, reduce_once: bool) -> None:
    """Shard the model's parameters over ``job.shard_axis``, unit by unit, and replicates over ``data`` beside it.

    Args:
        config: The method's keys.
        job: The job; its model is changed in place.
        reshard_after_forward: Whether units are freed after forward and gathered again in backward; an integer keeps
            them sharded over that many ranks (within a node) in between.
        reduce_once: Whether gradients of several micro-batches accumulate whole and are reduced once.
    """
    if job.pipeline is not None:  # torch's schedules reduce once, and split backward while weights are whole
        reshard_after_forward, reduce_once = False, True
    units = units_of(config, job.model, job.strategy, dict(job.axes))
    if config.sync_module_states and not job.is_split and job.pipeline is None:
        broadcast_states(job.model, job.device)
    _make_contiguous(job.model)
    apart = _shard_experts(config, job, reshard_after_forward) if job.experts is not None else set()
    inside = job.experts.inside() if job.experts is not None else set()
    ignored = units.ignored | apart
    options = {"mesh": _mesh(job), "mp_policy": _precision(config, job), "ignored_params": ignored or None}
    if units.trainable:
        fully_shard(  # type: ignore[call-overload]
            units.trainable, reshard_after_forward=False, offload_policy=_offload(job, ""), **options
        )
    blocks = [path for path, _ in find_blocks(job.model)]
    for path, module in reversed(units.modules):  # inner before outer
        if not isinstance(module, FSDPModule) and module not in inside:
            offload = _offload(job, unit_of(f"{path}.", blocks))
            fully_shard(  # type: ignore[call-overload]
                module, reshard_after_forward=reshard_after_forward, offload_policy=offload, **options
            )
    # The root is needed first in backward: freeing it in between would only gather it twice.
    fully_shard(  # type: ignore[call-overload]
        job.model, reshard_after_forward=False, offload_policy=_offload(job, ""), **options
    )
    share_hooks(job.model)
    if job.device.type == "cpu":
        exchange_on_host(job.model)
    if job.sharding.compression is not None and job.size(job.shard_axis) > 1:
        _quantise(job, job.sharding.compression)
    elif job.device.type == "cpu":
        # A stream would carry the gathers that are started ahead; without one they run in gloo's threads, or are
        # waited for where they start.
        job.model._set_unshard_async_op(True)  # type: ignore[operator]
    if config.forward_prefetch and reshard_after_forward is not False:
        _prefetch_forward(units)
    _keep_whole(units.ignored, job)
    # FSDP2 leaves them different on every rank.
    average_gradients(
        units.ignored, job.mesh_axes.num_averaged, job.mesh_axes.averaging_group if units.ignored else None
    )
    sharded = [module for module in job.model.modules() if isinstance(module, FSDPModule)]
    reshard_at_updates(sharded)
    job.optimizer.before_update.append(
        functools.partial(reshard_units, sharded)
    )  # of any optimizer, over master weights too
    if job.pipeline is None:  # which clears away after itself
        recover_in_forward(job.model)
    for module in job.model.modules():
        # Transformers asks it: ranks then generate as long, and drop no layers of their own, as all gather weights.
        module._is_fsdp_managed_module = True  # type: ignore[assignment]
    if hasattr(type(job.model), "generate"):
        _let_generate(job.model)
    _compare_layers(job, ignored, blocks)
    job.notices += _dropped_layers(config.method_name, job.model)
    job.micro_batch = _micro_batch_context(job.model, reduce_once=reduce_once, keep=reshard_after_forward is False)


def _make_contiguous(model: nn.Module) -> None:
    """Put transposed weights, and convolutions in channels_last, in the order of their dims, as FSDP2 wants them."""
    for parameter in model.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def _shard_experts(config: ZeroMethod, job: Job, reshard_after_forward: bool | int) -> set[nn.Parameter]:
    """Shards experts over the ranks that hold the same ones; where there are none, returns their parameters."""
    assert job.experts is not None
    assert job.shard_axis is not None
    policy = _precision(config, job)
    if job.shard_axis == "expert":
        job.experts.compute_in(policy.param_dtype)
        return job.experts.parameters()
    job.experts.run_always()
    replicated = job.shard_axis != "data" and job.size("data") > 1
    mesh = job.require_mesh()[("data", job.shard_axis) if replicated else job.shard_axis]
    policy = dataclasses.replace(policy, cast_forward_inputs=False)  # among them are the router's weights
    for module in job.experts.modules:
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)  # type: ignore[arg-type]
    return set()


def _mesh(job: Job) -> DeviceMesh:
    mesh = job.require_mesh()
    assert job.shard_axis is not None
    others = ("context", "sequence", "expert", "data")
    replicated = [axis for axis in others if axis != job.shard_axis and job.size(axis) > 1]
    if len(replicated) > 1:
        name = job.mesh_axes.flat_mesh(*replicated).mesh_dim_names[0]  # type: ignore[index]
        return mesh[name, job.shard_axis]
    if replicated:
        return mesh[replicated[0], job.shard_axis]  # HSDP: replicated over one axis, sharded over the other
    return mesh[job.shard_axis]


def _quantise(job: Job, compression: Compression) -> None:
    assert job.shard_axis is not None
    group = job.require_mesh()[job.shard_axis].get_group()
    quantise_units(job.model, compression, route(group, compression.neighbours(job.axes, job.shard_axis)))


def _precision(config: ZeroMethod, job: Job) -> MixedPrecisionPolicy:
    asked = config.mixed_precision
    param = (asked.param_dtype if asked else None) or (
        job.sharding.precision.compute if job.sharding.precision else None
    )
    # Left to torch, gradients are reduced in the type of computing until torch 2.13, and later in that of the weights.
    reduce = (
        (asked.reduce_dtype if asked else None)
        or (job.sharding.precision.reduce if job.sharding.precision else None)
        or param
    )
    return MixedPrecisionPolicy(
        param_dtype=torch_dtype(param) if param else None, reduce_dtype=torch_dtype(reduce) if reduce else None
    )


def _offload(job: Job, unit: str) -> OffloadPolicy:
    """For the parameters of a block, or for those outside of blocks (``""``)."""
    return (
        CPUOffloadPolicy(pin_memory=job.sharding.pin_memory)
        if unit in job.sharding.offloaded_units
        else OffloadPolicy()
    )


def _prefetch_forward(units: Units) -> None:
    for (_, module), (_, following) in itertools.pairwise(units.modules):
        if isinstance(module, FSDPModule) and isinstance(following, FSDPModule):
            module.set_modules_to_forward_prefetch([following])


def _keep_whole(ignored: set[nn.Parameter], job: Job) -> None:
    """Move what nobody gathers to the device, cast like what is gathered where ``half`` asks for that.

    Under ``amp_native`` autocast brings the two together; here inputs come in half, and CUDA's kernels mix no types.
    """
    precision = job.sharding.precision
    dtype = torch_dtype(precision.compute) if precision is not None and precision.casts_whole else None
    for parameter in ignored:
        parameter.data = parameter.data.to(job.device, dtype if parameter.is_floating_point() else None)
    if ignored and dtype is not None:
        job.optimizer.master_weights = True


def _compare_layers(job: Job, ignored: set[nn.Parameter], blocks: list[str]) -> None:
    if any(job.size(axis) > 1 for axis in STEP_AXES):
        offloaded = {
            p for name, p in job.model.named_parameters() if unit_of(name, blocks) in job.sharding.offloaded_units
        }
        experts = job.experts.parameters() if job.experts is not None else set()  # other ranks have others of them
        exchanges = CollectiveLog(job.model, ignored | experts, offloaded, gathers=job.size(job.shard_axis) > 1)
        job.gather_order_check = GatherOrderCheck(job.mesh_axes, exchanges)
        job.optimizer.before_update.append(job.gather_order_check.before_update)


def _dropped_layers(method: str, model: nn.Module) -> list[str]:
    """Return what transformers' models with LayerDrop are told: ranks draw apart, and would gather different layers."""
    asked = getattr(model, "config", None)
    keys = [each for each in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop") if getattr(asked, each, 0)]
    return [
        f"{method}: config.{key}={getattr(asked, key)} leaves out layers at random, on every rank others; ranks that "
        "gather layers together then wait for each other, or get each other's weights. Set it to 0, unless the model "
        "runs all layers where it is sharded"
        for key in keys
    ]


def _let_generate(model: nn.Module) -> None:
    """The encoder of T5, or the model that peft's adapters are in, is called without the model around it."""

    def around(generate: Callable[..., object], *args: object, **kwargs: object) -> object:
        with gathered_root(model):
            return generate(*args, **kwargs)

    wrap_method(model, "generate", around)


def _micro_batch_context(
    model: nn.Module, *, reduce_once: bool, keep: bool
) -> Callable[[bool], contextlib.AbstractContextManager[None]]:
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


# --- ``zero1``: optimizer states are sharded (ZeRO stage 1, Rajbhandari et al. 2020). Seed: ATorch.


class Zero1(ZeroMethod):
    """Each rank updates its shard of the weights; weights and gradients are whole while a step runs.

    Gradients of all micro-batches accumulate locally and are reduced once: the least communication of the three.
    """

    method_name: ClassVar[str] = "zero1"
    phase: ClassVar[Phase] = Phase.SHARD
    summary: ClassVar[str] = "shards optimizer states; gradients are reduced once per step"
    effect: ClassVar[str] = "memory: optimizer states / n. Communication: as data parallelism, once per step"
    seed_name: ClassVar[str | None] = "ATorch: zero1"
    conflicts: ClassVar[tuple[Conflict, ...]] = not_beside("zero2", "fsdp")

    def check(self, job: Job) -> None:
        """Refuse models that FSDP2 cannot shard."""
        units_of(self, job.model, job.strategy, dict(job.axes))

    def apply(self, job: Job) -> None:
        """Shard with FSDP2; parameters stay gathered and gradients whole until the last micro-batch."""
        shard(self, job, reshard_after_forward=False, reduce_once=True)

    def cost(self, step: Step) -> Step:
        """One gather and one reduction of everything per step."""
        return shard_cost(self, step, gathers="once", reduce_once=True)


# --- ``zero2``: optimizer states and gradients are sharded (ZeRO stage 2). Seed: ATorch.


class Zero2(ZeroMethod):
    """Weights are gathered once per step and kept through backward; gradients are reduced as they come.

    FSDP's SHARD_GRAD_OP.
    """

    method_name: ClassVar[str] = "zero2"
    phase: ClassVar[Phase] = Phase.SHARD
    summary: ClassVar[str] = "shards gradients and optimizer states; weights stay whole through a step"
    effect: ClassVar[str] = (
        "memory: gradients, optimizer states / n. Communication: one gather, one reduction per micro-batch"
    )
    seed_name: ClassVar[str | None] = "ATorch: zero2"
    conflicts: ClassVar[tuple[Conflict, ...]] = not_beside("fsdp")

    def check(self, job: Job) -> None:
        """Refuse models that FSDP2 cannot shard."""
        units_of(self, job.model, job.strategy, dict(job.axes))

    def apply(self, job: Job) -> None:
        """Shard with FSDP2; parameters stay gathered until the last backward."""
        shard(self, job, reshard_after_forward=False, reduce_once=False)

    def cost(self, step: Step) -> Step:
        """One gather per step, one reduction per micro-batch."""
        return shard_cost(self, step, gathers="once", reduce_once=False)


# --- ``fsdp``: parameters, gradients and optimizer states are sharded (ZeRO stage 3). Seed: ATorch.


class Fsdp(ZeroMethod):
    """A block's weights are whole only while it computes: gathered in forward, freed, gathered again in backward."""

    method_name: ClassVar[str] = "fsdp"
    phase: ClassVar[Phase] = Phase.SHARD
    summary: ClassVar[str] = "shards weights, gradients and optimizer states; gathers block by block"
    effect: ClassVar[str] = (
        "memory: weights, gradients, optimizer states / n. Communication: two gathers, one reduction per micro-batch"
    )
    seed_name: ClassVar[str | None] = "ATorch: fsdp"

    reshard_after_forward: bool | int = True
    """True frees weights after forward; False keeps them (that is zero2); n keeps them sharded over n ranks."""

    def check(self, job: Job) -> None:
        """Refuse models that FSDP2 cannot shard, and a group of ranks that does not divide the axis."""
        units_of(self, job.model, job.strategy, dict(job.axes))
        group, ranks = self.reshard_after_forward, job.size(job.shard_axis)
        if not isinstance(group, bool) and (group < 1 or ranks % group):
            raise StrategyError(
                "fsdp: reshard_after_forward is not a number of ranks that divides the sharding axis",
                expected=f"True, False or a divisor of {ranks}",
                got=repr(group),
                fix="use True, or the number of ranks within a node",
            )

    def apply(self, job: Job) -> None:
        """Shard with FSDP2."""
        shard(self, job, reshard_after_forward=self.reshard_after_forward, reduce_once=False)

    def cost(self, step: Step) -> Step:
        """Return two gathers and one reduction per micro-batch."""
        return shard_cost(self, step, gathers=self._gathers(step.size(step.shard_axis)), reduce_once=False)

    def _gathers(self, ranks: int) -> Gathers:
        group = self.reshard_after_forward
        if not group:
            return "once"
        return "nearby" if not isinstance(group, bool) and 1 < group < ranks else "twice"


# --- Hooks on the gradients of parameters, where a method puts other parameters in their place.
#
# Who has registered one on a parameter expects it to be called. torch would drop it without a word: methods make new
# parameters, and FSDP2 computes with a third kind, which it gathers, while the hooks are on the shards.


def share_hooks(model: nn.Module) -> None:
    """Let hooks on the shards of FSDP2, registered before or later, see the gradients of gathered parameters.

    They get what they get under data parallelism: a rank's own whole gradient, before it is averaged.
    """
    for module in model.modules():
        for group in parameter_groups(module) if isinstance(module, FSDPModule) else ():
            for each in group.fsdp_params:
                if each.sharded_param._backward_hooks is None:
                    each.sharded_param._backward_hooks = OrderedDict()  # to which later ones are added
                each.init_unsharded_param = functools.partial(_gathered, each, each.init_unsharded_param)


def _gathered(parameter: Any, gather: Callable[[], None]) -> None:
    gather()
    hooks = parameter.sharded_param._backward_hooks
    if parameter._unsharded_param._backward_hooks is not hooks:
        parameter._unsharded_param._backward_hooks = hooks
