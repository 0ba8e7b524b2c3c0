"""Workload: a model, how it is trained and the cluster at hand, for which strategies are predicted."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.cost import Block, Calibration, Cluster, Step, find_cluster, find_device, make_cluster, memory
from meshwright.errors import ConfigError
from meshwright.methods import SAMPLED, Resolved, SampleRun, check_units, cost_of, replacement_of, resolve
from meshwright.methods.base import half_dtype
from meshwright.nn.batches import leaves_of
from meshwright.planner.memory_budget import fit_budget, taken_bytes, usable_host_bytes
from meshwright.planner.pipeline_cuts import (
    Decision,
    Pipeline,
    by_pipeline_rank,
    decide_cut,
    num_micro_batches,
    pipeline_of,
    trace_flow,
)
from meshwright.planner.plans import Plan, most_host_bytes, needed_bytes
from meshwright.planner.trace.fake_pass import Trace, trace_key, trace_of
from meshwright.planner.trace.model_state import (
    Described,
    Marks,
    OptimizerProbe,
    describe_buffers,
    describe_each,
    group_blocks,
)
from meshwright.planner.trace.tracer import Conditions, Tracer
from meshwright.runtime import host_share_bytes, machine_name

if TYPE_CHECKING:
    from meshwright.methods import Cut, Fp8
    from meshwright.methods.fp8_torchao import Fp8Trace
    from meshwright.methods.half_precision import HalfPrecisionMethod
    from meshwright.methods.pipeline.outer_parameters import Dataflow
    from meshwright.planner.plans import Forecast
    from meshwright.strategy import MethodConfig, Strategy


_IDS = ("input_ids", "decoder_input_ids")
_SAMPLES = 2  # one alone could be a dim of another meaning


def tokens_per_sample(inputs_of: Callable[[int], Any]) -> int | None:
    """Return the tokens of one sample: the second dim of ``input_ids``, or of the first integers ``[samples, tokens]``.

    None where there is no sample to be had, or none of tokens, as of images.

    Args:
        inputs_of: ``inputs_of(samples)`` returns the model input.
    """
    try:
        inputs = inputs_of(_SAMPLES)
    except Exception:  # a user's data may refuse; training will say so
        return None
    named = [inputs[name] for name in _IDS if isinstance(inputs, Mapping) and name in inputs]
    for leaf in (*named, *leaves_of(inputs)):
        if isinstance(leaf, torch.Tensor) and not leaf.is_floating_point() and leaf.dim() == 2:
            return leaf.shape[1] if leaf.shape[0] == _SAMPLES else None
    return None


# --- The cluster that a job runs on, as far as its processes can tell, or as it was described.


def cluster_at_hand(device: torch.device, world: int, local_world: int) -> Cluster | None:
    """Return what a job runs on, with the links that are usual for its devices, and the host memory that is free.

    None for a CPU, and for unknown devices.

    Args:
        device: Of this rank; all ranks are taken to have one like it.
        world: Number of ranks.
        local_world: Of them on this node.
    """
    if device.type != "cuda":
        return None
    try:
        known = make_cluster(torch.cuda.get_device_name(device), world, max(local_world, 1))
    except ConfigError:
        return None
    return dataclasses.replace(known, host_memory_bytes=host_share_bytes(local_world))


def described_cluster(
    given: str | os.PathLike[str] | Cluster, device: torch.device, world: int, local_world: int
) -> tuple[Cluster, tuple[str, ...]]:
    """Return what a job runs on as it was described, with the job's ranks; and what of it may not hold here.

    Args:
        given: A cluster, a preset's name, or a file such as ``meshwright calibrate`` writes.
        device: Of this rank.
        world: Number of ranks.
        local_world: Of them on this node.

    Raises:
        ConfigError: For a file that cannot be used, and one of other devices.
    """
    known = given if isinstance(given, Cluster) else find_cluster(os.fspath(given))
    here = machine_name(device)
    on_host = device.type == "cpu"
    others = not on_host and _preset(known.device.name) not in (None, _preset(here))
    if others or known.device.is_host != on_host:
        raise ConfigError(
            "cluster describes other devices than those that train",
            expected=f"the one at hand, {here}",
            got=known.device.name,
            fix="name a file that meshwright calibrate has written here, or leave cluster out",
        )
    told, measured = [], known.calibration
    if measured is not None and measured.machine not in (None, here):
        told.append(f"cluster was measured on {measured.machine}, and this is {here}: seconds are that one's")
    if measured is not None and on_host and known.num_devices != world:
        told.append(
            f"cluster was measured with {known.num_devices} ranks, and these are {world}: ranks share the cores of a "
            f"CPU, so measure it with meshwright calibrate --processes {world}"
        )
    known = dataclasses.replace(known, num_devices=world, devices_per_node=max(local_world, 1))
    if device.type == "cuda":
        known = dataclasses.replace(known, host_memory_bytes=host_share_bytes(local_world))
    return known, tuple(told)


def _preset(name: str) -> str | None:
    try:
        return find_device(name).name
    except ConfigError:
        return None


# --- A model and how it is trained, for which strategies are predicted.


@dataclass
class Workload:
    """A model and how it is trained, before any strategy: what every plan for it starts from.

    Args:
        model: Plain module.
        device: Where it trains.
        optim_func: Builds the optimizer from a list of parameters.
        optim_param_func: Chooses these parameters, or groups of them, from the model; None takes all.
        inputs_of: ``inputs_of(samples)`` returns the model input of a micro-batch of that many samples, or None when
            there is no sample to be had.
        forward: ``forward(model, inputs)`` computes the loss.
        batch_size: Samples per step over all ranks; None when unknown.
        num_micro_batches: Micro-batches per step; None: 1, or as many as a pipeline takes.
        world: Number of ranks.
        zero_level: See ``init_distributed``.
        limit_bytes: What one rank may hold.
        cluster: What it runs on; None: seconds are not predicted.
        calibration: What kernels and links of the cluster reach; None: those of the cluster.
        one_host: Whether all ranks are on one, where no cluster says so.
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

    @property
    def half_dtype(self) -> str:
        """Return what half precision is on its devices; CPUs that have no bf16 multiply it in fp32."""
        return half_dtype(self.device) if self.cluster is None else self.cluster.device.half_dtype

    def plan(self, strategy: Strategy, num_micro_batches: int | None = None) -> Plan:
        """Predict one strategy.

        Args:
            strategy: What is asked for.
            num_micro_batches: Micro-batches per step; None: as many as the workload has.

        Raises:
            StrategyError: When its methods do not fit together or do not fit the world.
        """
        where = self.device if self.cluster is None else self.cluster.device
        resolved = resolve(strategy, self.world, self.zero_level, where)
        replacement = replacement_of(resolved.strategy, self.model, resolved.axes, self.device)
        with replacement.tried(self.model):
            known = self._with(resolved.strategy.get("module_replace"))
            return known._plan(resolved, num_micro_batches or self.num_micro_batches)

    def on(self, num_devices: int) -> Workload:
        """Return the same on more of the same devices, or fewer; of a known cluster."""
        assert self.cluster is not None
        return self.elsewhere(self.cluster.resized(num_devices), self.batch_size, self.limit_bytes)

    def of_batch(self, samples: int) -> Workload:
        """Return the same with so many samples per step."""
        return self.elsewhere(self.cluster, samples, self.limit_bytes)

    def elsewhere(self, cluster: Cluster | None, batch_size: int | None, limit_bytes: int | None) -> Workload:
        """Return the same model on another cluster of the same kind of device; what was traced of it is taken over."""
        world = self.world if cluster is None else cluster.num_devices
        other = replace(self, cluster=cluster, world=world, batch_size=batch_size, limit_bytes=limit_bytes)
        own = {field.name for field in fields(self)} | {"_replaced"}
        vars(other).update({name: value for name, value in vars(self).items() if name not in own})
        return other

    def _with(self, method: MethodConfig | None) -> Workload:
        """Return the workload of the model with its modules replaced, whose predictions are its own."""
        if method is not None and method not in self._replaced:
            self._replaced[method] = replace(self)
        return self if method is None else self._replaced[method]

    @functools.cached_property
    def _replaced(self) -> dict[MethodConfig, Workload]:
        return {}

    def _plan(self, resolved: Resolved, wanted_micro_batches: int | None) -> Plan:
        micro_batches = num_micro_batches(resolved, wanted_micro_batches)
        self._check_units(resolved)
        pipeline = pipeline_of(resolved, self.model, micro_batches)
        flow = self._flow(pipeline) if pipeline is not None else None
        split, fp8 = self._split(resolved), self._fp8(resolved)
        samples = math.ceil((self.batch_size or 1) / (_replicas(resolved) * micro_batches))
        precision, on_cpu = _precision_of(resolved), self.device.type == "cpu"
        blocks = pipeline.blocks if pipeline is not None else ()
        traced = self._tracer.of(Conditions(*precision, samples, split, blocks, fp8, _widens(resolved)))
        step = Step(
            blocks=(),
            axes=resolved.axes,
            shard_axis=resolved.shard_axis,
            num_micro_batches=micro_batches,
            on_cpu=on_cpu,
            on_one_host=on_cpu and (self.one_host if self.cluster is None else self.cluster.is_one_node),
            activations=traced.activations,
            flops=traced.flops,
            fp8_flops=traced.fp8_flops,
            boundaries=traced.boundaries,
        )
        decided = Decision()
        if pipeline is not None and flow is not None:
            describe = functools.partial(self._blocks, split, fp8)
            limit = self.limit_bytes if self.device.type == "cuda" else None
            decided = decide_cut(pipeline, self.model, flow, step, resolved.strategy, describe, limit)
        cut = decided.cut
        described = self._described(split, fp8, cut)
        step = step.replace(blocks=group_blocks(described, cut, traced.ops), buffers=describe_buffers(self.model, cut))
        ranks = by_pipeline_rank(step, cut, samples, in_half=precision[0] is not None)
        fitted = fit_budget(resolved.strategy, ranks)
        every = [cost_of(fitted.strategy, each) for each in ranks]
        most = max(every, key=lambda each: needed_bytes(each, memory(each)))
        forecasted = self._forecast(every, samples * _replicas(resolved) * micro_batches)
        return Plan(
            strategy=fitted.strategy,
            step=most,
            memory=memory(most),
            limit_bytes=self.limit_bytes,
            notices=(*resolved.notices, *traced.notices, *decided.notices, *fitted.notices),
            gaps=(*traced.gaps, *decided.gaps),
            cut=cut,
            steps=tuple(every) if cut is not None else (),
            micro_batch=samples,
            forecast=forecasted,
            taken_bytes=_taken_bytes(forecasted, every),
            host_bytes=most_host_bytes(every),
            host_limit_bytes=None if self.cluster is None else usable_host_bytes(self.cluster),
        )

    def _check_units(self, resolved: Resolved) -> None:
        """Refuse what the sharding method would; what it has allowed once is not asked about again."""
        sharding = tuple(method for method in resolved.strategy.methods if getattr(method, "shards", False))
        key = sharding, resolved.strategy.names, tuple(axis for axis, size in resolved.axes if size > 1)
        if key not in self._shardable:
            check_units(resolved, self.model)
            self._shardable.add(key)

    @functools.cached_property
    def _shardable(self) -> set[tuple[object, ...]]:
        return set()

    def _forecast(self, steps: list[Step], samples: int) -> Forecast | None:
        if self.cluster is None:
            return None
        from meshwright.planner.plans import forecast

        tokens = self._tokens_per_sample
        return forecast(steps, self.cluster, samples=samples, tokens_per_sample=tokens, calibration=self.calibration)

    @functools.cached_property
    def _tokens_per_sample(self) -> int | None:
        return tokens_per_sample(self.inputs_of)

    def _flow(self, pipeline: Pipeline) -> tuple[Dataflow | None, str]:
        """Return what the blocks depend on; each list of blocks is traced once."""
        if pipeline.blocks not in self._flows:
            self._flows[pipeline.blocks] = trace_flow(pipeline, self.model, self.inputs_of, self.forward)
        return self._flows[pipeline.blocks]

    @functools.cached_property
    def _flows(self) -> dict[tuple[nn.Module, ...], tuple[Dataflow | None, str]]:
        return {}

    def _split(self, resolved: Resolved) -> Trace | None:
        """Return how axes divide layers, tokens and experts; each plan and size is worked out once."""
        key = trace_key(resolved)
        if key not in self._splits:
            self._splits[key] = trace_of(resolved, self.model, SampleRun(self.inputs_of, self.forward))
        return self._splits[key]

    def _fp8(self, resolved: Resolved) -> Fp8Trace | None:
        """Return which layers multiply in 8 bits; each choice is made once."""
        method = cast("Fp8 | None", resolved.strategy.get("fp8"))
        if method is None:
            return None
        key = (method, resolved.shard_axis is not None, dict(resolved.axes).get("tensor", 1))
        if key not in self._fp8s:
            self._fp8s[key] = method.trace(self.model, sharded=key[1], tensor_ranks=key[2])
        return self._fp8s[key]

    def _blocks(self, split: Trace | None, fp8: Fp8Trace | None, cut: Cut | None) -> tuple[Block, ...]:
        return group_blocks(self._described(split, fp8, cut), cut)

    def _described(self, split: Trace | None, fp8: Fp8Trace | None, cut: Cut | None) -> Described:
        """Return the parameters of every block; each division is described once."""
        key = (split, fp8, cut)
        if key not in self._descriptions:
            marks = Marks(
                tensor_dims=split.dims if split else {},
                experts=getattr(split, "experts", {}),
                num_fp8=fp8.num_weights if fp8 else {},
                updating=self._probe.updating,
            )
            self._descriptions[key] = describe_each(self.model, self._probe, marks, cut)
        return self._descriptions[key]

    @functools.cached_property
    def _probe(self) -> OptimizerProbe:
        params = None if self.optim_param_func is None else self.optim_param_func(self.model)
        return OptimizerProbe(self.optim_func, self.device, params)

    @functools.cached_property
    def _splits(self) -> dict[tuple[object, ...], Trace | None]:
        return {}

    @functools.cached_property
    def _fp8s(self) -> dict[tuple[Fp8, bool, int], Fp8Trace]:
        return {}

    @functools.cached_property
    def _descriptions(self) -> dict[tuple[Trace | None, Fp8Trace | None, Cut | None], Described]:
        return {}

    @functools.cached_property
    def _tracer(self) -> Tracer:
        return Tracer(self.model, self.inputs_of, self.forward, self.device)


def _taken_bytes(known: Forecast | None, steps: Sequence[Step]) -> int | None:
    """Of a device's memory, by its allocator; None where that is not known, or memory is the host's."""
    if known is None or known.cluster.device.is_host or any(step.activations is None for step in steps):
        return None
    return max(taken_bytes(peak.reserved_bytes, known.cluster.device) for peak in known.peaks)


def _precision_of(resolved: Resolved) -> tuple[str | None, str | None]:
    """Precision of the computing parameters and of autocast."""
    amp, half = resolved.strategy.get("amp_native"), resolved.strategy.get("half")
    if half is not None:
        return half.dtype, None  # type: ignore[attr-defined]
    if amp is not None:
        dtype = amp.dtype  # type: ignore[attr-defined]
        return (dtype if resolved.shard_axis is not None else None), dtype
    return None, None


def _widens(resolved: Resolved) -> bool:
    """Return whether bf16 products may be made in fp32: of plain tensors, as they are not where layers are divided."""
    divided = dict(resolved.axes).get("tensor", 1) > 1
    half = (resolved.strategy.get(name) for name in ("amp_native", "half"))
    return not divided and any(cast("HalfPrecisionMethod", each).widens(resolved.strategy) for each in half if each)


def _replicas(resolved: Resolved) -> int:
    sizes = dict(resolved.axes)
    return math.prod(sizes.get(axis, 1) for axis in SAMPLED)
