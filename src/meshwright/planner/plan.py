"""A plan: a strategy with its predictions for one model on one world."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.cost import Activations, Block, Boundary, Memory, Step, memory
from meshwright.errors import ModelError
from meshwright.methods import (
    Cut,
    PipelineParallel,
    Resolved,
    SampleRun,
    SequenceParallel,
    SequenceTrace,
    TensorParallel,
    cost_of,
    resolve,
)
from meshwright.methods.dtypes import torch_dtype
from meshwright.methods.tensor.trace import SplitTrace
from meshwright.planner.parameters import describe_blocks, describe_buffers
from meshwright.planner.pipeline import by_pipeline_rank, decide_cut, num_micro_batches
from meshwright.planner.saved import predict_saved
from meshwright.planner.states import StatesOf, probe_optimizer
from meshwright.strategy import Strategy

Trace = SplitTrace | SequenceTrace

Traced = tuple[Activations | None, int | None, tuple[Boundary, ...], tuple[str, ...]]
"""Activations, FLOPs and collectives over the tensor or sequence axis of a micro-batch, and what there is to say."""


@dataclass(frozen=True)
class Plan:
    """What a strategy will hold and send on the rank that holds most."""

    strategy: Strategy  # resolved
    step: Step
    memory: Memory
    limit_bytes: int | None  # what one rank may hold; None: unknown
    notices: tuple[str, ...]
    gaps: tuple[str, ...] = ()  # what could not be predicted, and why: matters to whoever reads the predictions
    cut: Cut | None = None  # where the mesh has a pipeline axis: which rank holds what
    steps: tuple[Step, ...] = ()  # then: the step of each of its ranks; ``step`` is that of the one that holds most

    @property
    def fits(self) -> bool:
        """Whether the predicted memory is within the limit."""
        return self.limit_bytes is None or self.needed_bytes <= self.limit_bytes

    @property
    def needed_bytes(self) -> int:
        """Bytes of the memory that is limited: the device's, with the host's where they are one."""
        return self.memory.total + (self.memory.host_total if self.step.on_cpu else 0)


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
        num_micro_batches: Micro-batches per step.
        world: Number of ranks.
        zero_level: See ``init_distributed``.
        limit_bytes: What one rank may hold.
    """

    model: nn.Module
    device: torch.device
    optim_func: Callable[[Any], Optimizer] | None
    inputs_of: Callable[[int], Any]
    forward: Callable[[nn.Module, Any], Any]
    batch_size: int | None
    num_micro_batches: int
    world: int
    zero_level: int
    limit_bytes: int | None
    optim_param_func: Callable[[nn.Module], Any] | None = None

    def plan(self, strategy: Strategy) -> Plan:
        """Predicts one strategy.

        Raises:
            StrategyError: When its methods do not fit together or do not fit the world.
        """
        resolved = resolve(strategy, self.world, self.zero_level)
        split = self._split(resolved)
        micro_batches = num_micro_batches(resolved.strategy, self.num_micro_batches)
        cut, gap = self._cut(resolved, micro_batches)
        samples = math.ceil((self.batch_size or 1) / (_replicas(resolved) * micro_batches))
        param_dtype, autocast_dtype = _precision_of(resolved)
        activations, flops, boundaries, gaps = self._activations(param_dtype, autocast_dtype, samples, split)
        step = Step(
            blocks=self._blocks(split, cut),
            axes=resolved.axes,
            shard_axis=resolved.shard_axis,
            buffers=describe_buffers(self.model, cut),
            num_micro_batches=micro_batches,
            on_cpu=self.device.type == "cpu",
            activations=activations,
            flops=flops,
            boundaries=boundaries,
        )
        every = [
            cost_of(resolved.strategy, each)
            for each in by_pipeline_rank(step, cut, samples, in_half=param_dtype is not None)
        ]
        most = max(every, key=lambda each: memory(each).total)
        return Plan(
            resolved.strategy,
            most,
            memory(most),
            self.limit_bytes,
            resolved.notices,
            (*gaps, *gap),
            cut,
            tuple(every) if cut is not None else (),
        )

    def _cut(self, resolved: Resolved, micro_batches: int) -> tuple[Cut | None, tuple[str, ...]]:
        """Where a pipeline axis cuts the model; each method and size is decided once."""
        method, ranks = resolved.strategy.get("pipeline_parallel"), dict(resolved.axes).get("pipeline", 1)
        if not isinstance(method, PipelineParallel) or ranks == 1:
            return None, ()
        if (method, ranks) not in self._cuts:
            self._cuts[method, ranks] = decide_cut(
                method, ranks, self.model, self.inputs_of, self.forward, micro_batches
            )
        return self._cuts[method, ranks]

    @functools.cached_property
    def _cuts(self) -> dict[tuple[PipelineParallel, int], tuple[Cut, tuple[str, ...]]]:
        return {}

    def _split(self, resolved: Resolved) -> Trace | None:
        """How a tensor or sequence axis divides the work; each plan and size is worked out once."""
        sequence, size = resolved.strategy.get("sequence_parallel"), dict(resolved.axes).get("sequence", 1)
        if isinstance(sequence, SequenceParallel) and size > 1:
            sequence.check_axes(dict(resolved.axes))
            if (sequence, size) not in self._splits:
                self._splits[sequence, size] = SequenceTrace(self.model, size)
            return self._splits[sequence, size]
        method, ranks = resolved.strategy.get("tensor_parallel"), dict(resolved.axes).get("tensor", 1)
        if not isinstance(method, TensorParallel):
            return None
        if (method, ranks) not in self._splits:
            sample = SampleRun(self.inputs_of, self.forward)
            self._splits[method, ranks] = method.trace(self.model, ranks, sample)
        return self._splits[method, ranks]

    def _blocks(self, split: Trace | None, cut: Cut | None) -> tuple[Block, ...]:
        if (split, cut) not in self._described:
            dims = split.dims if split else None
            self._described[split, cut] = describe_blocks(self.model, self._states_of, dims, cut)
        return self._described[split, cut]

    @functools.cached_property
    def _states_of(self) -> StatesOf:
        params = None if self.optim_param_func is None else self.optim_param_func(self.model)
        return probe_optimizer(self.optim_func, self.device, params)

    @functools.cached_property
    def _splits(self) -> dict[tuple[TensorParallel | SequenceParallel, int], Trace | None]:
        return {}

    @functools.cached_property
    def _described(self) -> dict[tuple[Trace | None, Cut | None], tuple[Block, ...]]:
        return {}

    @functools.cached_property
    def _known(self) -> dict[Any, Traced]:
        return {}

    def _activations(
        self, param_dtype: str | None, autocast_dtype: str | None, samples: int, split: Trace | None
    ) -> Traced:
        """Activations and FLOPs of a micro-batch; each precision and size is traced once."""
        key = (param_dtype, autocast_dtype, samples, split)
        if key not in self._known:
            self._known[key] = self._trace(*key)
        return self._known[key]

    def _trace(self, param_dtype: str | None, autocast_dtype: str | None, samples: int, split: Trace | None) -> Traced:
        try:
            inputs = self.inputs_of(samples)
            if inputs is None:
                return None, None, (), ("activations are not predicted: there is no sample to trace the model with",)
            activations, flops, boundaries = predict_saved(
                self.model,
                inputs,
                self.forward,
                param_dtype=torch_dtype(param_dtype) if param_dtype else None,
                autocast_dtype=torch_dtype(autocast_dtype) if autocast_dtype else None,
                split=split,
            )
        except Exception as error:  # a user's model may do anything; training does not depend on this prediction
            reason = (str(error).splitlines() or [""])[0][:160]
            if isinstance(split, SequenceTrace):
                if isinstance(error, ModelError):
                    raise  # training would fail in the same way
            elif split is not None and self._trace(param_dtype, autocast_dtype, samples, None)[0] is not None:
                raise _does_not_fit(f"{type(error).__name__} while tracing ({reason})") from error
            return None, None, (), (f"activations are not predicted: {type(error).__name__} while tracing ({reason})",)
        return activations, flops, boundaries, ()


def _does_not_fit(got: str) -> ModelError:
    """The model runs whole, and not as one rank of a tensor axis: training would fail in the same way."""
    return ModelError(
        "tensor_parallel: the model cannot run with its layers split by this plan",
        expected="layers split by columns that feed layers split by rows, in modules that name no number of features",
        got=got,
        fix="correct the plan: give both layers of a pair, or colwise_gather_output where whole features are needed",
    )


def _precision_of(resolved: Resolved) -> tuple[str | None, str | None]:
    """Precision of the computing parameters and of autocast."""
    amp, half = resolved.strategy.get("amp_native"), resolved.strategy.get("half")
    if half is not None:
        return half.dtype, None  # type: ignore[attr-defined]
    if amp is not None:
        dtype = amp.dtype  # type: ignore[attr-defined]
        return (dtype if resolved.shard_axis is not None else None), dtype
    return None, None


def _replicas(resolved: Resolved) -> int:
    sizes = dict(resolved.axes)
    return sizes.get("replica", 1) * sizes.get("data", 1) * sizes.get("zero", 1)
