"""Sharding with FSDP2: the ``apply`` that zero1, zero2 and fsdp share. Its twin is ``cost``."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from meshwright.cost import Wire
from meshwright.distributed.two_level import route
from meshwright.methods.dtypes import torch_dtype
from meshwright.methods.gradient_hooks import share_hooks
from meshwright.methods.job import Job
from meshwright.methods.means import STEP_AXES
from meshwright.methods.replicas import broadcast_states
from meshwright.methods.wire.sharded import quantise_units
from meshwright.methods.zero.config import ZeroMethod
from meshwright.methods.zero.same_layers import SameLayers
from meshwright.methods.zero.units import Units, unit_of, units_of
from meshwright.nn import (
    Exchanges,
    average_gradients,
    exchange_on_host,
    find_blocks,
    gathered_root,
    recover_in_forward,
    reshard_at_updates,
    reshard_units,
    wrap_method,
)


def shard(config: ZeroMethod, job: Job, *, reshard_after_forward: bool | int, reduce_once: bool) -> None:
    """Shards the model's parameters over ``job.shard_axis``, unit by unit, and replicates over ``data`` beside it.

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
    if job.wire is not None and job.size(job.shard_axis) > 1:
        _quantise(job, job.wire)
    elif job.device.type == "cpu":
        # A stream would carry the gathers that are started ahead; without one they run in gloo's threads, or are
        # waited for where they start.
        job.model._set_unshard_async_op(True)  # type: ignore[operator]
    if config.forward_prefetch and reshard_after_forward is not False:
        _prefetch_forward(units)
    _keep_whole(units.ignored, job)
    # FSDP2 leaves them different on every rank.
    average_gradients(units.ignored, job.num_averaged, job.averaging_group if units.ignored else None)
    sharded = [module for module in job.model.modules() if isinstance(module, FSDPModule)]
    reshard_at_updates(sharded)
    job.before_update.append(functools.partial(reshard_units, sharded))  # of any optimizer, over master weights too
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
    """Puts transposed weights, and convolutions in channels_last, in the order of their dims, as FSDP2 wants them."""
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
        name = job.flat_mesh(*replicated).mesh_dim_names[0]  # type: ignore[index]
        return mesh[name, job.shard_axis]
    if replicated:
        return mesh[replicated[0], job.shard_axis]  # HSDP: replicated over one axis, sharded over the other
    return mesh[job.shard_axis]


def _quantise(job: Job, wire: Wire) -> None:
    assert job.shard_axis is not None
    group = job.require_mesh()[job.shard_axis].get_group()
    quantise_units(job.model, wire, route(group, wire.neighbours(job.axes, job.shard_axis)))


def _precision(config: ZeroMethod, job: Job) -> MixedPrecisionPolicy:
    asked = config.mixed_precision
    param = (asked.param_dtype if asked else None) or (job.precision.compute if job.precision else None)
    # Left to torch, gradients are reduced in the type of computing until torch 2.13, and later in that of the weights.
    reduce = (asked.reduce_dtype if asked else None) or (job.precision.reduce if job.precision else None) or param
    return MixedPrecisionPolicy(
        param_dtype=torch_dtype(param) if param else None, reduce_dtype=torch_dtype(reduce) if reduce else None
    )


def _offload(job: Job, unit: str) -> OffloadPolicy:
    """For the parameters of a block, or for those outside of blocks (``""``)."""
    return CPUOffloadPolicy(pin_memory=job.pin_memory) if unit in job.hosted_units else OffloadPolicy()


def _prefetch_forward(units: Units) -> None:
    for (_, module), (_, following) in itertools.pairwise(units.modules):
        if isinstance(module, FSDPModule) and isinstance(following, FSDPModule):
            module.set_modules_to_forward_prefetch([following])


def _keep_whole(ignored: set[nn.Parameter], job: Job) -> None:
    """Moves what nobody gathers to the device, cast like what is gathered where ``half`` asks for that.

    Under ``amp_native`` autocast brings the two together; here inputs come in half, and CUDA's kernels mix no types.
    """
    precision = job.precision
    dtype = torch_dtype(precision.compute) if precision is not None and precision.casts_whole else None
    for parameter in ignored:
        parameter.data = parameter.data.to(job.device, dtype if parameter.is_floating_point() else None)
    if ignored and dtype is not None:
        job.master_weights = True


def _compare_layers(job: Job, ignored: set[nn.Parameter], blocks: list[str]) -> None:
    if any(job.size(axis) > 1 for axis in STEP_AXES):
        hosted = {p for name, p in job.model.named_parameters() if unit_of(name, blocks) in job.hosted_units}
        experts = job.experts.parameters() if job.experts is not None else set()  # other ranks have others of them
        exchanges = Exchanges(job.model, ignored | experts, hosted, gathers=job.size(job.shard_axis) > 1)
        job.same_layers = SameLayers(job, exchanges)
        job.before_update.append(job.same_layers.before_update)


def _dropped_layers(method: str, model: nn.Module) -> list[str]:
    """What transformers' models with LayerDrop are told: ranks draw apart, and would gather different layers."""
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
