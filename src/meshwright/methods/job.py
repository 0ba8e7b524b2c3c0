"""The real training job that methods change, phase by phase, until it can train."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from meshwright.methods.dtypes import DType
from meshwright.methods.pipeline_cut import Cut
from meshwright.methods.pipeline_engine import PipelineEngine
from meshwright.optim import GuardedOptimizer, LossScaler, MasterWeights, Stages, separate_layouts
from meshwright.strategy import Strategy

OptimizerFactory = Callable[[Any], Optimizer]
MicroBatchContext = Callable[[bool], contextlib.AbstractContextManager[None]]


def _no_context(is_last: bool) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


@dataclass(frozen=True)
class Precision:
    """How a method that shards is to compute: gathered parameters in ``compute``, gradients reduced in ``reduce``."""

    compute: DType
    reduce: DType


@dataclass
class Job:
    """Everything a method may look at (``check``) and change (``apply``). Becomes an ``Accelerated``."""

    model: nn.Module
    strategy: Strategy  # resolved: its parallel_mode fits the world
    device: torch.device
    loss_func: Callable[[Any, Any], Any]
    prepare_input: Callable[[Any, torch.device], Any]
    mesh: DeviceMesh | None = None  # set by parallel_mode, in the first phase
    shard_axis: str | None = None  # the axis a ZeRO method shards over; None: parameters are replicated
    axes: tuple[tuple[str, int], ...] = ()
    coordinate: dict[str, int] = field(default_factory=dict)  # this rank's index along every axis
    find_unused_parameters: bool = False
    ddp_options: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of DDP, where it averages
    optim_func: OptimizerFactory | None = None  # builds the optimizer from parameters or groups
    optim_param_func: Callable[[nn.Module], Any] | None = None

    num_micro_batches: int = 1
    cut: Cut | None = None  # the plan's, where the mesh has a pipeline axis

    pipeline: PipelineEngine | None = None  # pipeline_parallel: the model is one rank's part, and runs in stages
    is_split: bool = False  # tensor_parallel: some parameters are DTensors already, all values are rank 0's
    precision: Precision | None = None  # set by a precision method for the method that shards
    loss_scaling: bool = False  # fp16: gradients would underflow
    loss_scale: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of LossScaler
    skip_nonfinite: bool = False
    master_weights: bool = False
    stages: Stages | None = None  # for norms, where the parameters are one pipeline rank's
    micro_batch: MicroBatchContext = _no_context  # entered around forward and backward; True on the last micro-batch
    notices: list[str] = field(default_factory=list)  # what the user is told once, on rank 0

    def size(self, axis: str | None) -> int:
        """Ranks along an axis; 1 where the mesh has none of that name."""
        return dict(self.axes).get(axis, 1) if axis is not None else 1

    def index(self, axis: str) -> int:
        """This rank's place along an axis; 0 where the mesh has none of that name."""
        return self.coordinate.get(axis, 0)

    def require_mesh(self) -> DeviceMesh:
        """The mesh, for methods that run after the mesh phase."""
        assert self.mesh is not None, "parallel_mode applies first"
        return self.mesh

    @property
    def num_replicas(self) -> int:
        """How many ranks, or groups of ranks, train on different samples."""
        return self.size("data") * self.size("zero")

    @property
    def replica(self) -> int:
        """Which of them this rank belongs to."""
        return self.index("data") * self.size("zero") + self.index("zero")

    def build_optimizer(self) -> Optimizer | None:
        """Builds the optimizer over the model as it is now, with the guards that the methods asked for."""
        if self.optim_func is None:
            return None
        params = self.model.parameters() if self.optim_param_func is None else self.optim_param_func(self.model)
        master = MasterWeights(self.model.parameters()) if self.master_weights else None
        inner = self.optim_func(params) if master is None else master.optimizer(self.optim_func, params)
        if self.stages is not None and master is not None:
            self.stages = self.stages.with_masters(master.of)
        if self.is_split:
            separate_layouts(inner)
        if not (self.loss_scaling or self.skip_nonfinite or master):
            return inner
        scaler = LossScaler(self.device.type, **self.loss_scale) if self.loss_scaling else None
        return GuardedOptimizer(
            inner, scaler=scaler, master=master, skip_nonfinite=self.skip_nonfinite, stages=self.stages
        )
