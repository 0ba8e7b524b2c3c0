"""Predict strategies for a real module: the workload, and modules to plan for.

Every plan for a module starts from a :class:`Workload`. It takes a strategy through resolving, tracing, the pipeline
cut, the memory budget and the methods' ``cost`` twins, and caches whatever other strategies can use again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.cost import FP8, Block, Calibration, Cluster, Step, memory
from meshwright.cost.peak_memory import averages_in_buckets
from meshwright.errors import ConfigError, ModelError, StrategyError
from meshwright.methods import (
    SAMPLED,
    Method,
    Resolved,
    Role,
    SampleRun,
    StepCut,
    axes_that_divide,
    check_units,
    cost_of,
    cut_step,
    find_method,
    in_phase_order,
    replacement_of,
    resolve,
)
from meshwright.methods.base import INNER_AXES, half_dtype, parts_between_layers
from meshwright.methods.planner_hooks import ComputeDtypes
from meshwright.nn import check_initialized
from meshwright.nn.batches import call_model, first_loss, leaves_of, loss_of_output, resized
from meshwright.optim import check_steps_alone, fused_where_possible
from meshwright.planner.memory_budget import Fitted, fit_budget
from meshwright.planner.model_shapes import Shape
from meshwright.planner.pipeline_cuts import (
    Decision,
    Pipeline,
    by_pipeline_rank,
    decide_cut,
    pipeline_of,
    trace_flow,
)
from meshwright.planner.plans import (
    Plan,
    Subject,
    communicator_bytes,
    forecast,
    most_host_bytes,
    needed_bytes,
    taken_bytes,
    usable_bytes,
    usable_host_bytes,
)
from meshwright.planner.trace.fake_pass import Trace, flowing, trace_key, trace_of
from meshwright.planner.trace.model_state import (
    Described,
    Marks,
    OptimizerProbe,
    describe_buffers,
    describe_each,
    group_blocks,
)
from meshwright.planner.trace.tracer import Conditions, Traced, Tracer
from meshwright.runtime import preserved_rng

if TYPE_CHECKING:
    from meshwright.cost import Activations
    from meshwright.methods import Cut
    from meshwright.methods.fp8_torchao import Fp8Trace
    from meshwright.methods.pipeline.outer_parameters import Dataflow
    from meshwright.planner.plans import Forecast
    from meshwright.strategy import MethodConfig, Strategy

_FSDP = 3  # the ZeRO stage that a mesh axis ``zero`` implies
_IDS = ("input_ids", "decoder_input_ids")
_SAMPLES = 2  # a dim of size 1 may be no batch dim


# --- The workload: one model, for any strategy


class NeverTracedError(Exception):
    """A model cannot be traced. No strategy is to blame, so that a search ends with this."""


@dataclass
class Workload:
    """A model and how it is trained, before any strategy.

    Args:
        model: Plain module.
        device: Where it trains.
        optim_func: Builds the optimizer from a list of parameters.
        optim_param_func: Chooses these parameters, or groups of them, from the model; None takes all.
        inputs_of: ``inputs_of(samples)`` returns the model input of a micro-batch of that many samples; None without
            a sample.
        forward: ``forward(model, inputs)`` computes the loss.
        batch_size: Samples per step over all ranks; None if unknown.
        num_micro_batches: Micro-batches per step; None takes 1, or as many as a pipeline needs.
        world: Number of ranks.
        zero_level: See ``init_distributed``.
        limit_bytes: Bytes that one rank may hold.
        cluster: Cluster that it runs on; with None, step times are not predicted.
        calibration: Efficiencies of kernels and links; None takes the cluster's own.
        one_host: Whether all ranks share one host, if there is no cluster to tell.
        copies_input: Whether the model input is made anew from each micro-batch, also where no device needs a copy.
        limit_is_free: Whether ``limit_bytes`` is what is free, of which communicators of the mesh will take some.
        finds_unused: Whether replicas are averaged by a DDP that looks for parameters that a step does not use.
        static_graph: Whether it takes the graph of the first step for that of all.
        must_fit: Whether a pipeline of which no cut fits is refused; otherwise it is planned as it is, too large.
        must_trace: Whether plans are of no use without activations; otherwise they say that these are missing.
    """

    model: nn.Module
    device: torch.device
    optim_func: Callable[[Any], Optimizer] | None
    inputs_of: Callable[[int], Any]
    forward: Callable[[nn.Module, Any], Any]
    batch_size: int | None
    num_micro_batches: int | None
    world: int
    zero_level: int
    limit_bytes: int | None
    optim_param_func: Callable[[nn.Module], Any] | None = None
    cluster: Cluster | None = None
    calibration: Calibration | None = None
    one_host: bool = True
    copies_input: bool = False
    limit_is_free: bool = False
    must_fit: bool = True
    must_trace: bool = False
    finds_unused: bool = False
    static_graph: bool = False

    @property
    def half_dtype(self) -> str:
        """Return the half precision of its devices; CPUs without bf16 multiply it in fp32."""
        return half_dtype(self.device) if self.cluster is None else self.cluster.device.half_dtype

    @property
    def follows_graph(self) -> bool:
        """Return whether replicas are averaged by a DDP that follows the graph of what the model returns."""
        return self.finds_unused or self.static_graph

    def plan(self, strategy: Strategy, num_micro_batches: int | None = None) -> Plan:
        """Predict one strategy.

        Args:
            strategy: As a user wrote it.
            num_micro_batches: Micro-batches per step; None takes the workload's number.

        Raises:
            StrategyError: When its methods do not fit together or do not fit the world.
            NeverTracedError: When the model cannot be traced with any strategy, and must be.
        """
        resolved = self._resolved(strategy)
        replacement = replacement_of(resolved.strategy, self.model, resolved.axes, self.device)
        with replacement.tried(self.model):
            known = self._with(find_method(resolved.strategy, lambda each: each.replaces_modules))
            return known._plan(resolved, num_micro_batches or self.num_micro_batches)

    def num_replicas(self, strategy: Strategy) -> int:
        """Return the number of ranks, or groups of ranks, that take samples of their own under a strategy."""
        return _replicas(self._resolved(strategy))

    def _resolved(self, strategy: Strategy) -> Resolved:
        return resolve(
            strategy, self.world, self.zero_level, self.device if self.cluster is None else self.cluster.device
        )

    def on(self, num_devices: int) -> Workload:
        """Return the workload on another number of the same devices; the cluster must be known."""
        assert self.cluster is not None
        return self.elsewhere(self.cluster.resized(num_devices), self.batch_size, self.limit_bytes)

    def of_batch(self, samples: int) -> Workload:
        """Return the workload with another number of samples per step."""
        return self.elsewhere(self.cluster, samples, self.limit_bytes)

    def elsewhere(
        self,
        cluster: Cluster | None,
        batch_size: int | None,
        limit_bytes: int | None,
        limit_is_free: bool | None = None,
    ) -> Workload:
        """Return the workload on another cluster of the same kind of device; it shares all traces of the model."""
        _ = self._findings, self._probe, self._tracer  # made now, so that both have them
        world = self.world if cluster is None else cluster.num_devices
        is_free = self.limit_is_free if limit_is_free is None else limit_is_free
        other = replace(
            self, cluster=cluster, world=world, batch_size=batch_size, limit_bytes=limit_bytes, limit_is_free=is_free
        )
        own = {field.name for field in fields(self)} | {"_replaced"}
        vars(other).update({name: value for name, value in vars(self).items() if name not in own})
        return other

    @functools.cached_property
    def _may_stand_in(self) -> bool:
        """Return whether methods may stand in for layers that cannot run without data, as for experts."""
        return bool(axes_that_divide(self.model))

    def _with(self, method: MethodConfig | None) -> Workload:
        """Return the workload of the model with its modules replaced, which has traces of its own."""
        if method is not None and method not in self._replaced:
            self._replaced[method] = replace(self)
        return self if method is None else self._replaced[method]

    @functools.cached_property
    def _replaced(self) -> dict[MethodConfig, Workload]:
        return {}

    def _plan(self, resolved: Resolved, wanted_micro_batches: int | None) -> Plan:
        batch = cut_step(resolved, wanted_micro_batches, self.batch_size)
        self._check_units(resolved)
        pipeline = self._pipeline(resolved, batch.asked)
        # Trace what a rank computes and saves. It depends on the strategy only through these conditions.
        conditions = self._conditions(resolved, batch.samples, pipeline)
        traced = self._tracer.of(conditions)
        if self.must_trace and traced.activations is None and self._tracer.never_runs and not self._may_stand_in:
            raise NeverTracedError("; ".join(traced.gaps))
        divides = any(axis in INNER_AXES and size > 1 for axis, size in resolved.axes)
        if self.must_trace and traced.activations is None and divides:
            raise _untraced_in_parts("; ".join(traced.gaps))
        step = self._traced_step(resolved, batch.micro_batches, traced).replace(
            activations=_with_inputs(traced.activations, pipeline, batch),
            smaller=self._smaller(pipeline, batch, conditions),
        )
        on_limit = functools.partial(self._on_limit, resolved, batch, pipeline, conditions, traced, step)
        plan = on_limit(self.limit_bytes)
        # A cut is chosen by the sum of what tensors take, without the gaps that an allocator leaves.
        needed, summed = plan.needed_bytes, max((memory(each).total for each in plan.steps), default=0)
        limit = plan.limit_bytes
        if pipeline is None or pipeline.method.split is not None or limit is None or not summed <= limit < needed:
            return plan
        try:
            other = on_limit(limit - (needed - summed))
        except StrategyError:  # no cut fits
            return plan
        return other if other.fits_device else plan

    def _on_limit(
        self,
        resolved: Resolved,
        batch: StepCut,
        pipeline: Pipeline | None,
        conditions: Conditions,
        traced: Traced,
        step: Step,
        limit_bytes: int | None,
    ) -> Plan:
        """Predict a traced step, with a pipeline cut so that the tensors of each rank fit into a limit."""
        # Describe parameters and states for each rank of a pipeline; they share the trace.
        decided = Decision()
        if pipeline is not None:
            decided = self._decide_cut(pipeline, step, resolved, conditions, limit_bytes)
        cut, described = decided.cut, self._described(conditions, decided.cut)
        step = step.replace(blocks=group_blocks(described, cut, traced.ops), buffers=describe_buffers(self.model, cut))
        in_half = conditions.param_dtype is not None
        parts = _token_parts(resolved)
        ranks = [step] if cut is None else by_pipeline_rank(step, cut, conditions.samples, parts, in_half=in_half)
        # The methods' twins do the rest, once their configs leave nothing open.
        has_budget = any(method.has_memory_budget for method in in_phase_order(resolved.strategy))
        fitted = fit_budget(resolved.strategy, ranks) if has_budget else Fitted(resolved.strategy)
        every = [cost_of(fitted.strategy, each) for each in ranks]
        most = max(every, key=lambda each: needed_bytes(each, memory(each)))
        forecasted = self._forecast(every, self.batch_size or _replicas(resolved) * batch.local)
        return Plan(
            strategy=fitted.strategy,
            step=most,
            memory=memory(most),
            limit_bytes=self.limit_bytes,
            notices=(*resolved.notices, *batch.notices, *traced.notices, *decided.notices, *fitted.notices),
            gaps=(*traced.gaps, *decided.gaps),
            in_vain=traced.in_vain,
            cut=cut,
            steps=tuple(every) if cut is not None else (),
            micro_batch=conditions.samples,
            forecast=forecasted,
            taken_bytes=_taken_bytes(forecasted, every),
            communicator_bytes=communicator_bytes(most) if self.limit_is_free else 0,
            host_bytes=most_host_bytes(every),
            host_limit_bytes=None if self.cluster is None else usable_host_bytes(self.cluster),
        )

    def _pipeline(self, resolved: Resolved, micro_batches: int) -> Pipeline | None:
        if dict(resolved.axes).get("pipeline", 1) == 1:
            return None
        pipeline = pipeline_of(resolved, self.model, micro_batches)
        if pipeline is not None:
            self._flow(pipeline, self._split(resolved))  # refuses a model that cannot be cut, before the long trace
        return pipeline

    def _conditions(self, resolved: Resolved, samples: int, pipeline: Pipeline | None) -> Conditions:
        split, fp8 = self._split(resolved), self._fp8(resolved)
        blocks = pipeline.blocks if pipeline is not None else ()
        in_parts = any(getattr(each, "splits_backward", False) for each in resolved.strategy.methods)
        replicated = Step((), resolved.axes, resolved.shard_axis)
        copies_output = self.finds_unused and pipeline is None and averages_in_buckets(replicated)
        dtypes, widens = _compute_dtypes(resolved), _widens(resolved)
        return Conditions(*dtypes, samples, split, blocks, fp8, in_parts, widens, copies_output)

    def _smaller(self, pipeline: Pipeline | None, batch: StepCut, conditions: Conditions) -> Activations | None:
        """Trace a micro-batch of one sample less, if all but the first have so many; None if several are as large.

        What the first holds most of, others hold beside the gradients that it leaves.
        """
        samples = batch.samples - 1
        if (
            pipeline is not None
            or not samples
            or batch.micro_batches == 1
            or batch.local != samples * batch.micro_batches + 1
        ):
            return None
        traced = self._tracer.of(replace(conditions, samples=samples))
        return _with_inputs(traced.activations, pipeline, batch._replace(samples=samples))

    def _traced_step(self, resolved: Resolved, micro_batches: int, traced: Traced) -> Step:
        on_cpu = self.device.type == "cpu"
        return Step(
            blocks=(),
            axes=resolved.axes,
            shard_axis=resolved.shard_axis,
            num_micro_batches=micro_batches,
            on_cpu=on_cpu,
            on_one_host=on_cpu and (self.one_host if self.cluster is None else self.cluster.is_one_node),
            flops=traced.flops,
            fp8_flops=traced.fp8_flops,
            boundaries=traced.boundaries,
            updates_elements=self._probe.updates_elements,
        )

    def _decide_cut(
        self, pipeline: Pipeline, step: Step, resolved: Resolved, conditions: Conditions, limit_bytes: int | None
    ) -> Decision:
        def describe(cut: Cut) -> tuple[Block, ...]:
            return group_blocks(self._described(conditions, cut), cut)

        limit = limit_bytes if self.device.type == "cuda" else None
        flow = self._flow(pipeline, conditions.split)
        return decide_cut(pipeline, self.model, flow, step, resolved.strategy, describe, limit, must_fit=self.must_fit)

    def _check_units(self, resolved: Resolved) -> None:
        """Refuse a model that the sharding method would refuse."""
        sharding = tuple(method for method in resolved.strategy.methods if getattr(method, "shards", False))
        key = sharding, resolved.strategy.names, tuple(axis for axis, size in resolved.axes if size > 1)
        self._once("units", key, lambda: check_units(resolved, self.model))

    def _forecast(self, steps: list[Step], samples: int) -> Forecast | None:
        if self.cluster is None:
            return None
        tokens = self.tokens_per_sample
        return forecast(steps, self.cluster, samples=samples, tokens_per_sample=tokens, calibration=self.calibration)

    @functools.cached_property
    def tokens_per_sample(self) -> int | None:
        """Return the tokens of a sample; None where a sample has no number of them."""
        return tokens_per_sample(self.inputs_of)

    def _flow(self, pipeline: Pipeline, split: Trace | None) -> tuple[Dataflow | None, str]:
        """Find the parameters outside the blocks that each block depends on."""

        def run() -> tuple[Dataflow | None, str]:
            with flowing(split):
                return trace_flow(pipeline, self.model, self.inputs_of, self.forward)

        return self._once("flow", (pipeline.blocks, hasattr(split, "experts")), run)

    def _split(self, resolved: Resolved) -> Trace | None:
        """Build the trace of one rank of the axes that divide layers, tokens and experts; None without such axes."""
        sample = SampleRun(self.inputs_of, self.forward)
        return self._once("split", trace_key(resolved), lambda: trace_of(resolved, self.model, sample))

    def _fp8(self, resolved: Resolved) -> Fp8Trace | None:
        """Choose the layers that multiply in 8 bits; None if the strategy has no method for that."""
        method = find_method(resolved.strategy, lambda each: each.product_dtype == FP8)
        if method is None:
            return None
        sharded, ranks = resolved.shard_axis is not None, dict(resolved.axes).get("tensor", 1)
        choose = functools.partial(method.traced_narrow, self.model, sharded=sharded, tensor_ranks=ranks)
        return self._once("fp8 layers", (method, sharded, ranks), choose)

    def _described(self, conditions: Conditions, cut: Cut | None) -> Described:
        """Describe the parameters of every block."""
        split, fp8 = conditions.split, conditions.fp8
        marks = Marks(
            tensor_dims=split.dims if split else {},
            experts=getattr(split, "experts", {}),
            num_fp8=fp8.num_weights if fp8 else {},
            updating=self._probe.updating,
        )
        return self._once("blocks", (split, fp8, cut), lambda: describe_each(self.model, self._probe, marks, cut))

    def _once(self, what: str, key: Hashable, find: Callable[[], Any]) -> Any:
        """Call ``find`` once for all plans with equal keys, and return its result."""
        if (what, key) not in self._findings:
            self._findings[what, key] = find()
        return self._findings[what, key]

    @functools.cached_property
    def _findings(self) -> dict[tuple[str, Hashable], Any]:
        return {}

    @functools.cached_property
    def _probe(self) -> OptimizerProbe:
        params = None if self.optim_param_func is None else self.optim_param_func(self.model)
        return OptimizerProbe(self.optim_func, self.device, params)

    @functools.cached_property
    def _tracer(self) -> Tracer:
        views_batch = self.device.type == "cpu" and not self.copies_input
        return Tracer(self.model, self.inputs_of, self.forward, self.device, views_batch=views_batch)


def _taken_bytes(known: Forecast | None, steps: Sequence[Step]) -> int | None:
    """Return the memory that the fullest rank needs, gaps between tensors included; None if unknown, and on CPUs."""
    if known is None or known.cluster.device.is_host or any(step.activations is None for step in steps):
        return None
    return max(taken_bytes(peak.reserved_bytes, known.cluster.device) for peak in known.peaks)


def _with_inputs(traced: Activations | None, pipeline: Pipeline | None, batch: StepCut) -> Activations | None:
    """Return the activations of a micro-batch beside the inputs of a step's; a pipeline prepares all of them.

    Args:
        traced: Activations of a micro-batch.
        pipeline: The pipeline, if there is one.
        batch: How the batch is cut; ``samples`` are those of this micro-batch.
    """
    if traced is None:
        return None
    copies = batch.micro_batches if pipeline is not None else 1
    return traced.given(traced.inputs._replace(samples=batch.samples, step_samples=batch.local, copies=copies))


def _compute_dtypes(resolved: Resolved) -> ComputeDtypes:
    method: Method | None = find_method(resolved.strategy, lambda each: each.role is Role.PRECISION)
    return method.compute_dtypes(sharded=resolved.shard_axis is not None) if method is not None else ComputeDtypes()


def _widens(resolved: Resolved) -> bool:
    """Return whether bf16 products may be computed in fp32, which divided layers do not support."""
    divided = dict(resolved.axes).get("tensor", 1) > 1
    return not divided and any(method.widens(resolved.strategy) for method in in_phase_order(resolved.strategy))


def _untraced_in_parts(gap: str) -> StrategyError:
    return StrategyError(
        "The model cannot be traced with its layers or tokens divided",
        expected="a forward pass and a loss that run on a rank's part",
        got=gap,
        fix="divide samples or blocks alone, or name the strategy to predict it all the same",
    )


def _token_parts(resolved: Resolved) -> int:
    """Return the number of ranks that divide the tokens of a sample between blocks."""
    sizes = dict(resolved.axes)
    within = parts_between_layers(resolved.strategy, lambda axis: sizes.get(axis, 1))
    return within * sizes.get("sequence", 1) * sizes.get("context", 1)


def _replicas(resolved: Resolved) -> int:
    return math.prod(size for axis, size in resolved.axes if axis in SAMPLED)


def tokens_per_sample(inputs_of: Callable[[int], Any]) -> int | None:
    """Count the tokens of one sample: the second dim of ``input_ids``, or of the first integers ``[samples, tokens]``.

    The result is None without a sample, and for samples without tokens, such as images.

    Args:
        inputs_of: ``inputs_of(samples)`` returns the model input.
    """
    try:
        inputs = inputs_of(_SAMPLES)
    except Exception:  # a user's data may raise anything; training will show the error
        return None
    named = [inputs[name] for name in _IDS if isinstance(inputs, Mapping) and name in inputs]
    for leaf in (*named, *leaves_of(inputs)):
        if isinstance(leaf, torch.Tensor) and not leaf.is_floating_point() and leaf.dim() == 2:
            return leaf.shape[1] if leaf.shape[0] == _SAMPLES else None
    return None


# --- A module to plan for on any cluster, before there is a job


@dataclass(frozen=True)
class ModuleModel:
    """A real module, best on ``meta``, and how it is trained.

    Args:
        name: Name for reports.
        module: Plain module; parameters on ``meta`` need no values.
        sample_batch: A batch of any number of samples, as the model takes it.
        loss_func: ``loss_func(model_input, model_output)``; None takes the loss in the output, or the next-token loss.
        model_input_format: See ``accelerate``.
        optim_func: Builds the optimizer from parameters; torch's own with fused kernels on GPUs, as in a run.
        seq: Tokens per sample, if it has any.
        shape: Its dimensions, if it is of a known family: a search then finds candidates by formulas.
    """

    name: str
    module: nn.Module
    sample_batch: Any
    loss_func: Callable[[Any, Any], Any] | None = None
    model_input_format: str | None = None
    optim_func: Callable[[Any], Optimizer] | None = torch.optim.AdamW
    seq: int | None = None
    shape: Shape | None = None

    def describe(self) -> dict[str, Any]:
        """See :class:`~meshwright.planner.plans.PlannedModel`."""
        count = sum(parameter.numel() for parameter in self.module.parameters())
        found = {"name": self.name, "class": type(self.module).__name__, "num_parameters": count}
        return found | ({"seq": self.seq} if self.seq is not None else {})

    def subject(self, cluster: Cluster, samples: int, limit_bytes: int | None, limit_is_free: bool = False) -> Subject:
        """See :class:`~meshwright.planner.plans.PlannedModel`. The module is traced once for CPUs and once for GPUs."""
        is_free = limit_bytes is None or limit_is_free  # otherwise it is for tensors alone
        limit_bytes, on_host = limit_bytes or usable_bytes(cluster.device), cluster.device.is_host
        if on_host not in self._traced:
            self._traced[on_host] = self._workload(cluster, samples, limit_bytes)
        return self._traced[on_host].elsewhere(cluster, samples, limit_bytes, is_free)

    @functools.cached_property
    def _traced(self) -> dict[bool, Workload]:
        """Return the cache of workloads, by whether they train on CPUs."""
        return {}

    def _workload(self, cluster: Cluster, samples: int, limit_bytes: int) -> Workload:
        check_initialized(self.module)
        self._check_trains()
        device = torch.device("cpu" if cluster.device.is_host else "cuda")
        return Workload(
            model=self.module,
            device=device,
            optim_func=None if self.optim_func is None else functools.partial(self._optimizer, device),
            inputs_of=functools.partial(_inputs, self.sample_batch),
            forward=self._forward,
            batch_size=samples,
            num_micro_batches=None,
            world=cluster.num_devices,
            zero_level=_FSDP,
            limit_bytes=limit_bytes,
            cluster=cluster,
            must_trace=True,
        )

    def _check_trains(self) -> None:
        count = sum(1 for _ in self.module.parameters())
        if not any(parameter.requires_grad for parameter in self.module.parameters()):
            raise ModelError(
                f"Nothing of the model {self.name} trains",
                expected="at least one parameter that requires a gradient",
                got=f"{count} parameters, all of them frozen" if count else "a model without parameters",
                fix="call requires_grad_(True) on what shall train" if count else "give it parameters",
            )

    def _optimizer(self, device: torch.device, params: Any) -> Optimizer:
        assert self.optim_func is not None
        return check_steps_alone(fused_where_possible(self.optim_func, device)(params))

    def _forward(self, module: nn.Module, inputs: Any) -> torch.Tensor:
        output = call_model(module, inputs, self.model_input_format)
        loss = self.loss_func or _usual_loss
        return first_loss(loss(inputs, output), trains=torch.is_grad_enabled())


def _inputs(sample_batch: Any, samples: int) -> Any:
    with preserved_rng():
        return resized(sample_batch, samples)


def _usual_loss(inputs: Any, output: Any) -> Any:
    """Return the loss in the output, or the next-token loss of its logits."""
    try:
        return loss_of_output(inputs, output)
    except ConfigError:
        from meshwright.loss import next_token_loss

        return next_token_loss(inputs, output)


def token_batch(seq: int) -> torch.Tensor:
    """Return two samples of token ids, ``[2, seq]``: zeros, since a pass without data reads no values."""
    return torch.zeros(2, seq, dtype=torch.long)
