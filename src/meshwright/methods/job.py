"""The real training job that methods change, phase by phase, until it can train."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer

from meshwright.errors import ConfigError, ModelError
from meshwright.nn import rank_orders
from meshwright.optim import (
    GuardedOptimizer,
    LossScaler,
    MasterWeights,
    SpikeWatch,
    Stages,
    inner_optimizer,
    step_by_layouts,
    step_on_local_tensors,
)
from meshwright.optim.wrapped import call_around
from meshwright.store.entries import unwrapped

if TYPE_CHECKING:
    from meshwright.cost import Wire
    from meshwright.methods.dtypes import DType
    from meshwright.methods.expert.engine import Experts
    from meshwright.methods.expert.layers import ExpertLayer
    from meshwright.methods.pipeline.cut import Cut
    from meshwright.methods.pipeline.engine import PipelineEngine
    from meshwright.methods.replace.changes import Replacement
    from meshwright.methods.sample import SampleRun
    from meshwright.methods.tensor.split import Split
    from meshwright.methods.vote.voter import Voter
    from meshwright.methods.zero.same_layers import SameLayers
    from meshwright.strategy import Strategy

OptimizerFactory = Callable[[Any], Optimizer]
AVERAGED = ("context", "sequence", "expert", "data", "zero")
"""The axes over which gradients are averaged in every step, in the order of the mesh."""

SAMPLED = ("replica", "data", "zero", "expert")
"""The axes along which ranks take different samples, as they number replicas: outermost first."""

MicroBatchContext = Callable[[bool], contextlib.AbstractContextManager[None]]


def _no_context(is_last: bool) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _as_it_is(optimizer: Optimizer) -> Optimizer:
    return optimizer


class HostedBytes(Protocol):
    """Counts what it copies to the host."""

    num_bytes: int


@dataclass(frozen=True)
class Precision:
    """How a method that shards is to compute: gathered parameters in ``compute``, gradients reduced in ``reduce``."""

    compute: DType
    reduce: DType
    casts_whole: bool = False  # what is left whole is kept in ``compute`` too, beside fp32 masters


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

    sample: SampleRun | None = None  # runs the model once, for methods that must see its data flow
    num_micro_batches: int = 1
    cut: Cut | None = None  # the plan's, where the mesh has a pipeline axis

    replacement: Replacement | None = None  # of module_replace, found before the checks
    pipeline: PipelineEngine | None = None  # pipeline_parallel: the model is one rank's part, and runs in stages
    split: tuple[Split, str] | None = None  # of tensor_parallel's check, over the whole model, and what is said of it
    expert_layers: list[tuple[ExpertLayer, int | None]] = field(default_factory=list)  # of expert_parallel's check
    experts: Experts | None = None  # expert_parallel: those of this rank
    is_split: bool = False  # by tensor_parallel or expert_parallel: parts are DTensors, and all values are rank 0's
    recomputed: Mapping[str, frozenset[str]] | None = None  # of checkpoint's check: operators kept, by paths
    precision: Precision | None = None  # set by a precision method for the method that shards
    wire: Wire | None = None  # set by comm for the method that shards, or for data parallelism
    loss_scaling: bool = False  # fp16: gradients would underflow
    loss_scale: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of LossScaler
    skip_nonfinite: bool = False
    stop_nonfinite: bool = False  # an error instead of a skipped step
    spikes: SpikeWatch | None = None  # of loss_spike: asked before every update
    voter: Voter | None = None  # of weight_vote, when the optimizer is built
    max_grad_norm: float | None = None  # of every step; None measures without clipping
    grad_norm_type: float = 2.0  # p of that norm
    master_weights: bool = False
    finish_optimizer: Callable[[Optimizer], Optimizer] = _as_it_is  # last change of the optimizer; may communicate
    before_update: list[Callable[[], None]] = field(default_factory=list)  # called before each step of the optimizer
    after_update: list[Callable[[], None]] = field(default_factory=list)  # and after it; never for a skipped step
    make_host_weights: Callable[[], MasterWeights] | None = None  # offload: in place of master weights
    hosted_units: frozenset[str] = frozenset()  # offload: paths of blocks whose sharded parameters live on the host
    pin_memory: bool = False  # offload: whether they are page-locked there
    activations: HostedBytes | None = None  # offload: what forward copies to the host
    stages: Stages | None = None  # for norms, where the parameters are one pipeline rank's
    micro_batch: MicroBatchContext = _no_context  # entered around forward and backward; True on the last micro-batch
    same_layers: SameLayers | None = None  # set by the method that shards: what compares the ranks in every step
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
        return math.prod(self.size(axis) for axis in SAMPLED)

    @property
    def num_averaged(self) -> int:
        """How many ranks, or groups of ranks, average their gradients in every step."""
        return math.prod(self.size(axis) for axis in AVERAGED)

    @property
    def averaging_group(self) -> dist.ProcessGroup | None:
        """The ranks that average gradients in every step; None for the world. Collective."""
        if self.num_averaged == math.prod(size for _, size in self.axes):
            return None
        return self.flat_mesh(*AVERAGED).get_group()

    def flat_mesh(self, *names: str) -> DeviceMesh:
        """Those of these axes that have several ranks, as a mesh of one dim; at least one has. Collective."""
        axes = tuple(axis for axis in names if self.size(axis) > 1)
        mesh = self.require_mesh()
        return mesh[axes]._flatten() if len(axes) > 1 else mesh[axes]

    @property
    def replica(self) -> int:
        """Which of them this rank belongs to."""
        place = 0
        for axis in SAMPLED:
            place = place * self.size(axis) + self.index(axis)
        return place

    def build_optimizer(self) -> Optimizer | None:
        """Builds the optimizer over the model as it is now, with its guards; ``finish_optimizer`` comes after it."""
        return None if self.optim_func is None else self._guarded_optimizer(self.optim_func)

    def _guarded_optimizer(self, optim_func: OptimizerFactory) -> Optimizer:
        # What DDP and torch.compile put around a model changes the names in it; whoever groups by name wrote his own.
        bare = unwrapped(self.model)
        params = bare.parameters() if self.optim_param_func is None else self.optim_param_func(bare)
        if self.pipeline is not None:  # a stage may have none of them, and torch refuses an empty list
            params = list(params) or [{"params": []}]
        master = self._make_master()
        inner = optim_func(params) if master is None else master.optimizer(optim_func, params)
        call_around(inner, self.before_update, self.after_update)
        if self.stages is not None and master is not None:
            self.stages = self.stages.with_masters(master.of)
        if self.is_split:
            _check_fused(self.model, inner)
        step_by_layouts(inner_optimizer(inner))
        _check_fused_kernel(inner_optimizer(inner))
        step_on_local_tensors(inner_optimizer(inner))
        if not (self.loss_scaling or self.skip_nonfinite or self.spikes or master):
            return inner
        scaler = LossScaler(self.device.type, **self.loss_scale) if self.loss_scaling else None
        return GuardedOptimizer(
            inner,
            scaler=scaler,
            master=master,
            skip_nonfinite=self.skip_nonfinite,
            stop_nonfinite=self.stop_nonfinite,
            stages=self.stages,
        )

    def _make_master(self) -> MasterWeights | None:
        if self.make_host_weights is not None:
            return self.make_host_weights()
        return MasterWeights(self.model.parameters()) if self.master_weights else None


def _check_fused(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuses groups that are to treat the parts of fused projections apart: these lie in the order of ranks."""
    fused = rank_orders(model)
    for group in optimizer.param_groups:
        if group.get("split", 1) not in (1, None) and any(id(parameter) in fused for parameter in group["params"]):
            raise ModelError(
                "An optimizer cannot tell the parts of a fused projection apart that tensor_parallel has split",
                expected="split=1 for such parameters: whole matrices are updated as on one device",
                got=f"split={group['split']!r}",
                fix="leave split out for them, or use separate projections for queries, keys and values",
            )


def _check_fused_kernel(optimizer: Optimizer) -> None:
    """Refuses torch's fused SGD over shards, which would be an error of torch in the first step."""
    for group in optimizer.param_groups if isinstance(optimizer, SGD) else ():
        if group["fused"] and any(isinstance(parameter, DTensor) for parameter in group["params"]):
            raise ConfigError(
                "torch's fused SGD cannot update sharded parameters",
                expected="fused=None (torch's own choice) or foreach=True under a strategy that shards",
                got="fused=True",
                fix="leave fused out of optim_args",
            )
