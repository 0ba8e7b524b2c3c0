"""Turn a plain module into one that trains on every rank.

:func:`accelerate` is the table of contents: ask, agree, plan, apply, build the optimizer, hand over. The helpers of
each step follow it in the same order. A :class:`~meshwright.training.request.Request` holds what the caller asks for;
:mod:`meshwright.methods` has the methods that change the model, and the reasons for the order of their phases.
"""

from __future__ import annotations

import itertools
import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from meshwright.cost import Cluster
from meshwright.errors import LaunchError, ModelError, join_names
from meshwright.methods import Job, apply_strategy, check_strategy
from meshwright.methods.birth import Birth, birth_of
from meshwright.methods.job import KnownParameters, guards_are_on
from meshwright.nn import check_initialized, check_model, check_no_renorm, is_on_meta, without_caches
from meshwright.nn.initial_values import record, remembered
from meshwright.optim import Stages, clip_gradients
from meshwright.optim.guarded_step import inner_optimizer, may_keep_copies
from meshwright.optim.loaded_weights import follow_loads
from meshwright.planner import Plan
from meshwright.runtime import (
    Difference,
    Settings,
    agreed,
    any_rank,
    broadcast_object,
    check_all_equal,
    check_equal,
    difference_between_ranks,
    memory_limit_bytes,
    own_versions,
    print_rank,
    rank,
    same_on_every_rank,
    seed_replica,
    settings,
    smallest,
    world_size,
)
from meshwright.runtime.agreement import gather_distinct
from meshwright.runtime.lazy import paused_collection

# Optimizers, DDP and predictions import dynamo in any case. Imported here, it loads with the garbage collector paused.
from meshwright.runtime.torch_internals.compilers import dynamo as dynamo
from meshwright.strategy import read_size
from meshwright.training.accelerated import Accelerated, LossWeight
from meshwright.training.request import Request, check_lr_scheduler, check_rates, optimizer_text

if TYPE_CHECKING:
    from meshwright.planner.measure import Measured


# The optimizers that clip_grad_norm finds by their models. References are weak: no model is kept alive by them.
_OPTIMIZERS: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[Optimizer], Stages | None]]
_OPTIMIZERS = weakref.WeakKeyDictionary()
_CHANGED: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models that methods have been applied to


def accelerate(
    model: nn.Module | Callable[[], nn.Module],
    optim_func: Callable[..., Optimizer] | Optimizer | None = None,
    dataset: Dataset | None = None,
    loss_func: Callable[[Any, Any], Any] | None = None,
    *,
    strategy: Any = None,
    prepare_input: Callable[[Any, torch.device], Any] | None = None,
    model_input_format: str | None = None,
    optim_args: Mapping[str, Any] | None = None,
    optim_param_func: Callable[[nn.Module], Any] | None = None,
    dataloader_args: Mapping[str, Any] | None = None,
    distributed_sampler_cls: type | None = None,
    lr_scheduler_cls: Callable[..., Any] | None = None,
    lr_scheduler_args: Mapping[str, Any] | None = None,
    weights: str | os.PathLike[str] | None = None,
    allow_missing_weights: bool = False,
    excluded: Sequence[str] = (),
    included: Sequence[Any] = (),
    max_grad_norm: float | None = None,
    num_micro_batches: int | None = None,
    loss_weight: LossWeight | None = None,
    find_unused_parameters: bool = False,
    ddp_options: Mapping[str, Any] | None = None,
    sample_batch: Any = None,
    batch_size: int | None = None,
    sampler_seed: int = 0,
    memory_limit: int | str | None = None,
    time_limit: float | None = None,
    cluster: str | os.PathLike[str] | Cluster | None = None,
    finetune_strategy: bool = False,
    dry_run: bool = False,
    verbose: bool = False,
) -> Accelerated:
    """Make a plain model train on all ranks, under a given strategy or one that is chosen; collective.

    Everything is checked before anything changes. Then the methods of the strategy change the model in place, in one
    fixed order. On return, random generators are seeded per data-parallel replica, so that dropout differs where
    samples differ.

    Args:
        model: A plain ``nn.Module`` with its parameters initialised, equal on every rank. Or one that no device can
            hold: built under ``torch.device("meta")``, or a function without arguments that builds it, which is called
            under meta. Each rank then gets memory for its own part alone, with the values of the ordinary build after
            the same ``torch.manual_seed``. A function gives exactly these; of a model that is on meta already,
            transformers' are built again from their config, and others initialised by their ``init_weights`` or their
            modules' ``reset_parameters``.
        optim_func: Optimizer class, or a function called as ``optim_func(parameters, **optim_args)``, with the
            parameters of the sharded model. Or an optimizer that was built over the plain model and has not stepped:
            the same object, with its groups, goes on with the parameters of the sharded model.
        dataset: torch Dataset; None makes no dataloader.
        loss_func: ``loss_func(model_input, model_output)`` returns the loss, or a list or tuple with the loss first.
            None takes the loss in the model's output.
        strategy: A Strategy, or anything it can be made from. None chooses one. If the devices are known, by name
            (CUDA) or by ``cluster``, a search takes the strategy with the fastest predicted step among those that fit
            into a rank's memory; the caller's precision and number of micro-batches stay. Otherwise (on the CPU) step
            times cannot be predicted, and the first of data, zero2, fsdp and fsdp with checkpoint that fits is taken.
        prepare_input: ``(data, device) -> model input``; None moves the tensors of a batch to the device.
        model_input_format: None for ``model(x)``, ``"unpack_sequence"`` for ``model(*x)``, ``"unpack_dict"`` for
            ``model(**x)``.
        optim_args: Keyword arguments of ``optim_func``.
        optim_param_func: ``f(model)`` returns parameters or groups of them, from the model that the methods have
            changed.
        dataloader_args: Keyword arguments of torch's DataLoader; ``batch_size`` is over all ranks.
        distributed_sampler_cls: Used instead of torch's DistributedSampler.
        lr_scheduler_cls: ``lr_scheduler_cls(optimizer, **lr_scheduler_args)``, stepped once per optimizer step. Build
            one that needs a metric, such as ReduceLROnPlateau, over the result's optimizer, and step it by hand.
        lr_scheduler_args: Its keyword arguments.
        weights: Trained weights to start from: a folder that ``save_pretrained`` wrote, a safetensors file, a
            checkpoint of Meshwright, or a folder of ``torch.distributed.checkpoint``. Each rank reads its own part.
        allow_missing_weights: Let the model's own initialisation fill what ``weights`` lacks, such as a new head over a
            pretrained base; a notice names it. False refuses such weights.
        excluded: Methods that an automatic choice must not use.
        included: Methods that an automatic choice must use: names, or ``(name, config)`` with keys that stay as they
            are. Half precision without a dtype takes the one in which the device is fastest.
        max_grad_norm: Largest gradient norm; None measures it without clipping.
        num_micro_batches: Parts into which ``step`` cuts a batch. None takes ``init_distributed``'s number, or else 1;
            a pipeline takes one per rank, or one per stage if the schedule needs as many.
        loss_weight: ``loss_weight(model_input)`` returns the number of items that the loss of a micro-batch is the mean
            over (a number, or a tensor of one), such as its labels that are not -100. ``step`` and ``evaluate`` then
            take the mean over the items of the whole batch; None averages the losses of ranks and micro-batches
            equally. On a GPU the host reads it when backward has been issued.
        find_unused_parameters: For DDP, if some parameters are not used in every step.
        ddp_options: Further keyword arguments of DistributedDataParallel, for strategies without a sharding method.
        sample_batch: A batch for predictions without a dataset, of any number of samples.
        batch_size: Samples per step over all ranks, for predictions without a dataset. None: each replica takes as many
            as ``sample_batch`` has.
        sampler_seed: Seed of the order of samples.
        memory_limit: Predicted memory that a chosen strategy may need on a rank: bytes, or text such as ``"40 GiB"``.
            None takes the memory of the device. Allocations are not limited.
        time_limit: Seconds for measuring candidates, if a strategy is chosen: the best few by prediction run for a few
            steps each, on copies of the model, and the fastest is taken. None chooses by prediction. A candidate that
            fails on every rank is passed over; one that fails on some, or ends a rank, ends the program. A running
            step is not interrupted: the last one may end later.
        cluster: Cluster that predictions and the choice are made for: a file that ``meshwright calibrate`` wrote, in
            which the runs of ``time_limit`` are noted, another cluster file, or a Cluster, which stays as it is. None
            takes usual figures for devices that are known by name.
        finetune_strategy: Let a search decide again about the methods that ``strategy`` names: recomputation,
            offloading, schedules, and how ranks are grouped. Everything else in it stays.
        dry_run: Run forward and backward once before returning, without changing anything.
        verbose: Print the plan.

    Raises:
        MeshwrightError: On every rank, if the arguments, the model and the ranks do not fit together.
    """
    world = settings()

    # Born sharded: a function, or a model on meta, has no values yet. [Note: models born sharded]
    model, birth = _conceive(model, weights, allow_missing=allow_missing_weights)

    # Ask: the arguments become one value. What cannot work is refused before anything changes.
    if num_micro_batches is None:
        num_micro_batches = world.num_micro_batches
    request = Request(
        model=model, birth=birth, optim_func=optim_func, dataset=dataset, loss_func=loss_func, strategy=strategy,
        prepare_input=prepare_input, model_input_format=model_input_format, optim_args=optim_args,
        optim_param_func=optim_param_func, dataloader_args=dataloader_args,
        distributed_sampler_cls=distributed_sampler_cls, lr_scheduler_cls=lr_scheduler_cls,
        lr_scheduler_args=lr_scheduler_args, excluded=excluded, included=included, max_grad_norm=max_grad_norm,
        num_micro_batches=num_micro_batches, loss_weight=loss_weight, find_unused_parameters=find_unused_parameters,
        ddp_options=ddp_options, sample_batch=sample_batch, batch_size=batch_size, sampler_seed=sampler_seed,
        time_limit=time_limit, cluster=cluster, finetune_strategy=finetune_strategy, dry_run=dry_run,
    )  # fmt: skip
    memory_bytes = _smallest_memory(memory_limit, world)
    _check_request(request, world)

    # Agree: ranks that differ would wait for each other for ever, or train different models without an error.
    check_alike(request.strategy_digest(), request.model_digest(), request.parameter_lines(), request.training_claims())
    born = _share_birth(model, birth)
    difference = difference_between_ranks({**dict(model.named_parameters()), **dict(model.named_buffers())})

    # Plan: rank 0 predicts for all ranks. Candidates that are measured run on all of them.
    plan, reason = _decide(request, world, memory_bytes, weights_are_equal=difference is None)
    notices = describe_difference(difference, plan)

    # Apply: the methods change the model in place, in the order of their phases.
    job, dataloader = _apply(request, plan, world.device, weights_are_equal=difference is None)

    # Build the optimizer over the parameters as the methods have left them, and the scheduler over the optimizer.
    optim, lr_scheduler = _build_optimizer(request, job)

    # Hand over.
    accelerated = _hand_over(request, plan, job, dataloader, optim, lr_scheduler)
    job.notices += [*born, *notices]
    _announce(job, plan, reason, verbose)
    if dry_run:
        _dry_run(request, accelerated)
    # Everything above drew from generators that are equal on every rank. Dropout must differ where samples differ.
    seed_replica(world.seed, job.mesh_axes.replica)
    if optim is not None:
        _OPTIMIZERS[job.model] = (weakref.ref(optim), job.stages)
        if may_keep_copies(optim):  # most runs need none of it
            follow_loads(job.model, optim)
    return accelerated


# --- Born sharded


def _conceive(
    model: nn.Module | Callable[[], nn.Module], weights: str | os.PathLike[str] | None, *, allow_missing: bool
) -> tuple[nn.Module, Birth | None]:
    """Return the model, and where its values come from if it lacks them; collective."""
    found = None
    if any_rank(weights is not None):
        from meshwright.store.pretrained import StoredWeights, find_together  # what only stored weights need

        found = find_together(weights)
    with same_on_every_rank():
        values = None
        if not isinstance(model, nn.Module) and callable(model):
            model, values = record(model)
        if not isinstance(model, nn.Module):
            return model, None  # refused later, with all other arguments
        check_initialized(model)
        if values is None and is_on_meta(model):
            values = remembered(model)
        check_model(model, settings().device)
        stored = None
        if weights is not None:
            stored = StoredWeights.open(weights, model, allow_missing=allow_missing, found=found)
        is_built = values is None and stored is None and not is_on_meta(model)
        return model, None if is_built else birth_of(model, values, stored)


def _share_birth(model: nn.Module, birth: Birth | None) -> list[str]:
    """Let all ranks start from the same values, and give buffers theirs; return notices. Collective."""
    if birth is None:
        return []
    notices = []
    if birth.weights is not None:
        missing = birth.weights.missing
        some = f"; initialised: {join_names(missing, limit=3)}" if missing else ""  # adapters have a hundred
        notices.append(f"weights from {birth.weights}{some}")
    notices += [notice] if (notice := birth.share_seed()) is not None else []
    if is_on_meta(model):
        with same_on_every_rank():
            birth.give_buffers(model)
    return notices


# --- Ask


def _smallest_memory(memory_limit: int | str | None, world: Settings) -> int:
    """Return the least limit, or memory of a device, on any rank in bytes; collective."""
    given = read_size(memory_limit, "memory_limit")
    return smallest([given or memory_limit_bytes(world.device, world.local_world_size)])[0]


def _check_request(request: Request, world: Settings) -> None:
    """Refuse arguments that cannot work, alike on every rank; collective."""
    with same_on_every_rank():
        request.check(world.device)
        if request.model in _CHANGED:
            raise ModelError(
                "This model has been accelerated before",
                expected="a plain nn.Module",
                got=f"a {type(request.model).__name__} that a strategy has changed",
                fix="build the model anew; its weights can be taken over with state_dict and load_state_dict",
            )
        check_no_renorm(request.model, world_size())
        _check_dense(request.model)


def _check_dense(model: nn.Module) -> None:
    """Refuse sparse parameters and buffers, which ranks can neither compare nor send."""
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    found = next((f"{name} ({each.layout})" for name, each in tensors if each.layout != torch.strided), None)
    if found is not None and world_size() > 1:
        raise ModelError(
            "A tensor of the model is sparse, and ranks compare and exchange dense ones",
            expected="dense parameters and buffers",
            got=found,
            fix="keep it as an attribute that is no buffer, on the device of the forward, or make it dense",
        )


# --- Agree


def check_alike(
    strategy: str, model: str, parameters: Sequence[str] = (), further: Sequence[tuple[str, str, str]] = ()
) -> None:
    """Refuse ranks that differ in their code, strategy, guards, model or how they train it; collective.

    Args:
        strategy: The requested strategy, as text.
        model: A short text that differs for different models.
        parameters: A line for each parameter of the model; gathered only if models differ.
        further: What else must be equal, its value, and what to do if it differs.

    Raises:
        LaunchError: On every rank, naming two ranks and the first difference.
    """
    check_all_equal(
        ("The installed code", own_versions(), "install the same Meshwright and torch on every machine"),
        ("The strategy", strategy, "pass the same strategy on every rank"),
        ("The switch of cross-rank guards", f"{guards_are_on()}", "set MESHWRIGHT_GUARDS alike on every rank"),
        *further,
    )
    (_, (first_model, first_lines)), *others = gather_distinct((model, list(parameters)), model)
    if not others:
        return
    (other, *_), (other_model, other_lines) = others[0]
    pairs = itertools.zip_longest(first_lines, other_lines, fillvalue="no further parameter")
    ours, theirs = next((pair for pair in pairs if pair[0] != pair[1]), (first_model, other_model))
    raise agreed(
        LaunchError(
            "The model differs between ranks",
            expected=f"{ours} (rank 0)",
            got=f"{theirs} (rank {other})",
            fix="build the same model on every rank",
        )
    )


def describe_difference(difference: Difference | None, plan: Plan) -> list[str]:
    """Describe weights that differ between ranks, if applying the plan gives every rank those of rank 0.

    Raises:
        ModelError: On every rank, if each would keep its own weights.
    """
    if difference is None:
        return []
    if not _broadcasts_weights(plan):
        raise agreed(
            ModelError(
                "The weights differ between ranks, and nothing in the strategy makes them equal",
                expected="equal values on every rank",
                got=str(difference),
                fix="seed every rank alike before building the model, and load the same file on all",
            )
        )
    return [f"the weights differ between ranks: {difference}; those of rank 0 are taken over"]


def _broadcasts_weights(plan: Plan) -> bool:
    """Return whether applying the plan gives every rank the weights of rank 0."""
    sizes = dict(plan.step.axes)
    if any(sizes.get(axis, 1) > 1 for axis in ("pipeline", "tensor", "expert")):
        return True
    sharding = [method for method in plan.strategy.methods if getattr(method, "shards", False)]
    # Without a sharding method, DDP and replicas of an outer method start from the weights of rank 0.
    return not sharding or bool(getattr(sharding[0], "sync_module_states", False))


# --- Plan


def _decide(
    request: Request, world: Settings, memory_bytes: int, *, weights_are_equal: bool
) -> tuple[Plan, str | None]:
    """Return the plan and the reason for choosing it, which is None if the strategy was given; collective."""
    if not (request.chooses and request.time_limit is not None):
        with same_on_every_rank(), paused_collection():
            decided = request.plan(world, memory_bytes) if rank() == 0 else None
        plan, reason = broadcast_object(decided)
        return plan, reason
    from meshwright.planner.measure import measured_best
    from meshwright.training.trials import run_live

    with same_on_every_rank():
        ranked = request.ranked(world, memory_bytes) if rank() == 0 else None

    def build(trial: Request, plan: Plan) -> Accelerated:
        job, dataloader = _apply(trial, plan, world.device, weights_are_equal=weights_are_equal)
        return _hand_over(trial, plan, job, dataloader, *_build_optimizer(trial, job))

    run = run_live(request, build, world.device)
    plan, reason, results = measured_best(broadcast_object(ranked), run, request.time_limit)
    noted = _note_runs(request, results, world)
    return plan, f"{reason}; {noted}" if noted else reason


def _note_runs(request: Request, results: Sequence[Measured], world: Settings) -> str:
    """Note measured runs in the cluster's file, if the caller named one, and describe the result; collective."""
    if request.cluster is None or isinstance(request.cluster, Cluster) or not Path(request.cluster).suffix:
        return ""
    from meshwright.planner.measure import note_runs

    return note_runs(Path(request.cluster), results, world)


# --- Apply


def _apply(
    request: Request, plan: Plan, device: torch.device, *, weights_are_equal: bool
) -> tuple[Job, DataLoader[Any] | None]:
    """Apply the plan's methods to the request's model.

    They are applied in the order of their phases: mesh, module replacement, pipeline, fp8, tensor, sequence and
    context, recomputation, compilation, precision, offload, sharding, replication, and what changes the optimizer.
    :class:`~meshwright.methods.base.Phase` has the reasons.
    """
    with same_on_every_rank():
        job = request.job(plan, device)
        job.weights_are_equal = weights_are_equal
        dataloader = request.dataloader(job)
    if dataloader is not None:
        dataloader.read_once_per_host()
    # Every method checks the job before the first one changes it.
    check_strategy(job)
    _CHANGED.add(request.model)
    if without_caches(request.model):
        job.notices.append("config.use_cache was set to False: training fills key-value caches and never reads them")
    apply_strategy(job)
    return job, dataloader


# --- Build the optimizer


def _build_optimizer(request: Request, job: Job) -> tuple[Optimizer | None, LRScheduler | None]:
    """Build optimizer and scheduler over the model as the methods have left it; collective."""
    job.check_unchanged = known = KnownParameters(job.model)
    job.optimizer.before_update_or_skip.append(known)
    with same_on_every_rank():
        optim = job.build_optimizer()
    # Ranks that hold different layers, or different experts, may have different groups.
    text = optimizer_text(optim, groups=job.pipeline is None and job.experts is None)
    check_equal("The optimizer", text, "build it with equal arguments on every rank")
    if optim is not None:
        known.follow(optim)
        inner = inner_optimizer(optim)
        # A ShardedOptimizer: its module is not imported for all others.
        if hasattr(inner, "make_groups") and job.mesh_axes.mesh is not None:
            inner.make_groups(job.mesh_axes.mesh)
        optim = job.optimizer.finish(optim)
    with same_on_every_rank():
        if request.lr_scheduler_cls is None:
            return optim, None
        check_rates(optim)
        lr_scheduler = request.lr_scheduler_cls(optim, **(request.lr_scheduler_args or {}))
        check_lr_scheduler(lr_scheduler)
    return optim, lr_scheduler


# --- Hand over


def _hand_over(
    request: Request,
    plan: Plan,
    job: Job,
    dataloader: DataLoader[Any] | None,
    optim: Optimizer | None,
    lr_scheduler: LRScheduler | None,
) -> Accelerated:
    return Accelerated(
        job,
        plan,
        optim=optim,
        dataloader=dataloader,
        lr_scheduler=lr_scheduler,
        has_loss_func=request.loss_func is not None,
        model_input_format=request.model_input_format,
        loss_weight=request.loss_weight,
    )


def _announce(job: Job, plan: Plan, reason: str | None, verbose: bool) -> None:
    gaps = plan.gaps if reason or verbose else ()
    for line in (*([reason] if reason else []), *plan.notices, *gaps, *job.notices):
        print_rank(f"meshwright: {line}", file=sys.stderr, flush=True)
    if verbose and rank() == 0:
        from meshwright.planner import plan_table
        from meshwright.runtime.terminal import PlainConsole

        PlainConsole(stderr=True).print(plan_table(plan))


def _dry_run(request: Request, accelerated: Accelerated) -> None:
    batch = request.sample_batch if accelerated.dataloader is None else next(iter(accelerated.dataloader))
    report = accelerated.dry_run(batch)
    print_rank(
        f"meshwright: dry run: {report.step_time_s:.3f} s forward and backward, "
        f"peak {report.peak_memory_bytes / 2**20:.0f} MiB on rank 0",
        file=sys.stderr,
    )


def clip_grad_norm(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, optimizer: Optimizer | None = None
) -> torch.Tensor:
    """Clip the gradients of a model that ``accelerate`` returned, after removing the loss scale if there is one.

    Args:
        model: ``result.model``.
        max_norm: Largest norm allowed.
        norm_type: p of the p-norm.
        optimizer: ``result.optim``; None finds it by the model.

    Returns:
        The norm before clipping, 0-dim, equal on every rank.
    """
    known, stages = _OPTIMIZERS.get(model, (None, None))
    if optimizer is None and known is not None:
        optimizer = known()
    return clip_gradients(model.parameters(), optimizer, max_norm, norm_type, stages)
