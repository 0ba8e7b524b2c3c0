"""The real training job that methods change: its ranks, its model, and what runs around every step."""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, call, is_
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from meshwright.cost import AVERAGING, axis_parts
from meshwright.errors import ConfigError, ModelError, StrategyError, UnsoundStepError
from meshwright.methods.birth import Birth
from meshwright.nn import abandon_units, rank_orders
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
from meshwright.optim.guarded_step import call_around
from meshwright.runtime import flat_mesh, mesh_order, world_size
from meshwright.runtime.torch_internals.c10d import reset_reducer
from meshwright.runtime.torch_internals.modules import children_of, parameters_of
from meshwright.store.entries import stored_name, unwrapped

if TYPE_CHECKING:
    from meshwright.cost import Compression
    from meshwright.methods.expert.balance import ExpertLoad
    from meshwright.methods.expert.divided_experts import Experts
    from meshwright.methods.expert.expert_layers import ExpertLayer
    from meshwright.methods.pipeline.execution import PipelineEngine
    from meshwright.methods.pipeline.stage_cut import Cut
    from meshwright.methods.replace.model_changes import Replacement
    from meshwright.methods.tensor.block_trials import SampleRun
    from meshwright.methods.tensor.model_split import Split
    from meshwright.strategy import Strategy

STEP_AXES = ("data", "zero", "expert")
"""The axes whose ranks take different samples of one step."""

SAMPLED = ("replica", *STEP_AXES)
"""The axes along which ranks take different samples, replicas of ``outer`` included, outermost first."""

AVERAGED = ("expert", "context", "sequence", "data", "zero")
"""The axes over which gradients are averaged in every step, but those of experts over ``expert``."""

SAME_EXPERTS = ("context", "sequence", "data", "zero")
"""The axes along which ranks have the same experts, if no method shards over them."""

MAX_EXACT_SUM = 2**24
"""Integers that ranks add up in fp32 to compare them: their sum must not be larger, to be exact."""

OptimizerFactory = Callable[[Any], Optimizer]
MicroBatchContext = Callable[[bool], contextlib.AbstractContextManager[None]]


# --- Ranks: the axes of the mesh


@dataclass(frozen=True)
class MeshAxes:
    """The named axes of the mesh, and where this rank is on them."""

    sizes: tuple[tuple[str, int], ...] = ()
    coordinate: Mapping[str, int] = field(default_factory=dict)  # this rank's index along every axis
    shard_axis: str | None = None  # the axis a ZeRO method shards over; None: parameters are replicated
    mesh: DeviceMesh | None = None  # built by parallel_mode, in the first phase

    def size(self, axis: str | None) -> int:
        """Return the number of ranks along an axis; 1 if the mesh has no axis of that name."""
        if axis is None or "_" not in axis:  # the usual case, in every step
            return dict(self.sizes).get(axis or "", 1)
        return math.prod(map(self.size, axis_parts(axis)))

    def index(self, axis: str) -> int:
        """Return this rank's index along an axis; 0 if the mesh has no axis of that name."""
        return self.coordinate.get(axis, 0)

    def require_mesh(self) -> DeviceMesh:
        """Return the mesh, for methods that are applied after the mesh phase."""
        assert self.mesh is not None, "parallel_mode applies first"
        return self.mesh

    def flat_mesh(self, *names: str) -> DeviceMesh:
        """Return the named axes as a mesh of one dim; collective. At least one of them has several ranks."""
        axes = tuple(axis for axis in mesh_order(self.sizes) if axis in names and self.size(axis) > 1)
        return flat_mesh(self.require_mesh(), axes)

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The ranks over which a ZeRO method shards, as a mesh of one dim; collective."""
        assert self.shard_axis is not None
        axes = axis_parts(self.shard_axis)
        return self.flat_mesh(*axes) if len(axes) > 1 else self.require_mesh()[self.shard_axis]

    @property
    def num_replicas(self) -> int:
        """Number of ranks, or groups of ranks, that train on different samples."""
        return math.prod(map(self.size, SAMPLED))

    @property
    def replica(self) -> int:
        """Index of this rank's replica among ``num_replicas``."""
        place = 0
        for axis in SAMPLED:
            place = place * self.size(axis) + self.index(axis)
        return place

    @property
    def num_averaged(self) -> int:
        """Number of ranks, or groups of ranks, that average their gradients in every step."""
        return math.prod(map(self.size, AVERAGED))

    @property
    def averaging_group(self) -> dist.ProcessGroup | None:
        """The ranks that average gradients in every step; None for the world. Collective."""
        if self.num_averaged == math.prod(size for _, size in self.sizes):
            return None
        return self.flat_mesh(*AVERAGED).get_group()

    @property
    def averaging_axis(self) -> str:
        """The axis over which gradients are averaged if no method shards: the first with several ranks."""
        return next((axis for axis in AVERAGING if self.size(axis) > 1), AVERAGING[0])


def sum_over(ranks: MeshAxes, value: torch.Tensor, axes: tuple[str, ...]) -> torch.Tensor:
    """Return the sum of a tensor over the ranks along these axes; collective."""
    total = value.detach().clone()
    for axis in axes:
        if ranks.size(axis) > 1:
            dist.all_reduce(total, group=ranks.require_mesh().get_group(axis))
    return total


def mean_over(ranks: MeshAxes, value: torch.Tensor, axes: tuple[str, ...]) -> torch.Tensor:
    """Return the mean of a tensor over the ranks along these axes; collective.

    Not for what is compared: a GPU divides by a number as it multiplies by its rounded inverse, and the mean of equal
    integers is none of them then. Compare the :func:`sum_over` the ranks.
    """
    mean = value.detach().clone()
    for axis in axes:
        if ranks.size(axis) > 1:
            dist.all_reduce(mean, group=ranks.require_mesh().get_group(axis))
            mean /= ranks.size(axis)
    return mean


# --- [Note: cross-rank guards]
#
# Three guards compare the ranks in every step, so that a training loop in which they diverge ends in an error instead
# of wrong weights: the gather-order check (methods/zero.py), the check that gradients were averaged
# (methods/parallel_mode.py), and the comparison of epochs (``MeanLoss`` in training/accelerated.py). They use
# collectives that a step has anyway, or hooks that cost microseconds. One switch turns off all of them: the environment
# variable MESHWRIGHT_GUARDS=0, on every rank. ``accelerate`` refuses ranks that differ in it.


def guards_are_on() -> bool:
    """Return whether steps compare the ranks; see [Note: cross-rank guards]."""
    return os.environ.get("MESHWRIGHT_GUARDS", "1") != "0"


# --- Requests: what methods ask of the method that shards, and of the optimizer


@dataclass(frozen=True)
class Precision:
    """The precisions in which a sharding method gathers parameters and reduces gradients (``fp32``, ``bf16``, …)."""

    compute: str
    reduce: str
    casts_whole: bool = False  # unsharded parameters are kept in ``compute`` too, beside fp32 masters


@dataclass
class ShardingRequests:
    """Requests of precision, compression and offload methods to the method that shards, which is applied later."""

    precision: Precision | None = None
    compression: Compression | None = None  # of comm; data parallelism follows it too
    offloaded_units: frozenset[str] = frozenset()  # paths of blocks whose sharded parameters live on the host
    pin_memory: bool = False  # whether they are page-locked there


@dataclass
class OptimizerRequests:
    """Requests of methods to the optimizer and its steps; read once, when the optimizer is built."""

    loss_scaling: bool = False  # fp16: gradients would underflow
    loss_scale: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of LossScaler
    skip_nonfinite: bool = False
    stop_nonfinite: bool = False  # an error instead of a skipped step
    spikes: SpikeWatch | None = None  # of loss_spike: decides before every update
    max_grad_norm: float | None = None  # for every step; None measures without clipping
    grad_norm_type: float = 2.0  # p of that norm
    master_weights: bool = False
    make_host_weights: Callable[[], MasterWeights] | None = None  # offload: in place of master weights
    before_update: list[Callable[[], None]] = field(default_factory=list)  # called before each step of the optimizer
    # Called before each step, perhaps also one that is skipped: a device may decide so without the host.
    before_update_or_skip: list[Callable[[], None]] = field(default_factory=list)
    after_update: list[Callable[[], None]] = field(default_factory=list)  # and after it; never for a skipped step
    wrappers: list[Callable[[Optimizer], Optimizer]] = field(default_factory=list)  # wrap it, the first innermost

    def finish(self, optimizer: Optimizer) -> Optimizer:
        """Put the methods' wrappers around the built optimizer; may communicate."""
        for wrap in self.wrappers:
            optimizer = wrap(optimizer)
        return optimizer


# --- The job


class OffloadedBytes(Protocol):
    """A method that counts what it copies to the host."""

    num_bytes: int


class StepCheck(Protocol):
    """A comparison of the ranks in every step, by numbers that are added up together with their losses."""

    def forget(self) -> None:
        """Exclude from the comparison everything that has run until now."""

    def numbers(self) -> list[int]:
        """Return numbers, always the same count, that are equal on ranks that have done the same."""

    def check(self, sums: torch.Tensor) -> None:
        """Raise on every rank when the sums of all ranks' numbers show that they have done different things."""


def _no_context(is_last: bool) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


@dataclass
class Job:
    """Everything that a method may look at (``check``) and change (``apply``) on its way to an ``Accelerated``."""

    model: nn.Module
    strategy: Strategy  # resolved: its parallel_mode fits the world
    device: torch.device
    loss_func: Callable[[Any, Any], Any]
    prepare_input: Callable[[Any, torch.device], Any]
    prepare_output: Callable[[Any], Any] | None = None  # before the loss sees it; what it replaces need not stay
    mesh_axes: MeshAxes = field(default_factory=MeshAxes)
    find_unused_parameters: bool = False
    ddp_options: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of DDP, where it averages
    optim_func: OptimizerFactory | None = None  # builds the optimizer from parameters or groups
    optim_param_func: Callable[[nn.Module], Any] | None = None
    sample: SampleRun | None = None  # runs the model once, for methods that must see its data flow
    num_micro_batches: int = 1
    cut: Cut | None = None  # the plan's, where the mesh has a pipeline axis
    weights_are_equal: bool = False  # on all ranks, parameters and buffers; if not, ``apply`` sends those of rank 0

    birth: Birth | None = None  # how the parameters get their values; None: they have them

    # Found by ``check`` on the whole model, for ``apply``.
    replacement: Replacement | None = None  # of module_replace
    split: tuple[Split, str] | None = None  # of tensor_parallel, with its description
    expert_layers: tuple[list[tuple[ExpertLayer, int | None]], str] | None = None  # of expert_parallel, described
    recomputed: Mapping[str, frozenset[str]] | None = None  # of checkpoint: operators kept, by paths

    # How the methods have changed the model.
    pipeline: PipelineEngine | None = None  # pipeline_parallel: the model is one rank's part, and runs in stages
    experts: Experts | None = None  # expert_parallel: those of this rank
    expert_load: ExpertLoad | None = None  # the tokens of all experts
    is_split: bool = False  # by tensor_parallel or expert_parallel: parts are DTensors, and all values are rank 0's
    stages: Stages | None = None  # for norms, where the parameters are one pipeline rank's

    # Requests of methods to others that are applied after them.
    sharding: ShardingRequests = field(default_factory=ShardingRequests)
    optimizer: OptimizerRequests = field(default_factory=OptimizerRequests)

    # Run around every step.
    micro_batch: MicroBatchContext = _no_context  # entered around forward and backward; True on the last micro-batch
    gather_order_check: StepCheck | None = None  # of the method that shards
    check_unchanged: Callable[[], None] | None = None  # refuses parameters that came later than the optimizer
    activations: OffloadedBytes | None = None  # offload: what forward copies to the host
    voter: object | None = None  # weight_vote: counts the steps of the built optimizer
    notices: list[str] = field(default_factory=list)  # messages to the user, printed once, on rank 0

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the mesh axes."""
        return self.mesh_axes.sizes

    @property
    def coordinate(self) -> Mapping[str, int]:
        """This rank's index along every axis."""
        return self.mesh_axes.coordinate

    @property
    def shard_axis(self) -> str | None:
        """The axis that parameters are sharded over; None: they are replicated."""
        return self.mesh_axes.shard_axis

    def size(self, axis: str | None) -> int:
        """Return the number of ranks along an axis; 1 if the mesh has no axis of that name."""
        return self.mesh_axes.size(axis)

    def index(self, axis: str) -> int:
        """Return this rank's index along an axis; 0 if the mesh has no axis of that name."""
        return self.mesh_axes.index(axis)

    def require_mesh(self) -> DeviceMesh:
        """Return the mesh, for methods that are applied after the mesh phase."""
        return self.mesh_axes.require_mesh()

    def require_optimizer(self, method: str, purpose: str, fix: str = "") -> None:
        """Refuse a job without ``optim_func`` for a method that needs the optimizer's steps or states.

        Raises:
            StrategyError: Naming the method and what it needs the optimizer for.
        """
        if self.optim_func is None:
            raise StrategyError(
                f"{method} has no optimizer {purpose}",
                expected="optim_func",
                got="None",
                fix=fix or f"pass the class of the optimizer, or leave {method} out",
            )

    def build_optimizer(self) -> Optimizer | None:
        """Build the optimizer with its guards over the model as it is now; call ``optimizer.finish`` on the result."""
        return None if self.optim_func is None else self._guarded_optimizer(self.optim_func)

    def _guarded_optimizer(self, optim_func: OptimizerFactory) -> Optimizer:
        asked = self.optimizer
        # DDP and torch.compile prefix the names in a model, and users group parameters by the original names.
        bare = unwrapped(self.model)
        params = bare.parameters() if self.optim_param_func is None else self.optim_param_func(bare)
        if self.pipeline is not None:  # a stage may have none of them, and torch refuses an empty list
            params = list(params) or [{"params": []}]
        master = self._make_master()
        inner = optim_func(params) if master is None else master.optimizer(optim_func, params)
        call_around(inner, asked.before_update_or_skip, may_be_skipped=True)
        call_around(inner, asked.before_update, asked.after_update)
        if self.stages is not None and master is not None:
            self.stages = self.stages.with_masters(master.of)
        if self.is_split:
            _check_fused(self.model, inner)
        step_by_layouts(inner_optimizer(inner))
        _check_fused_kernel(inner_optimizer(inner))
        step_on_local_tensors(inner_optimizer(inner))
        if not (asked.loss_scaling or asked.skip_nonfinite or asked.spikes or master):
            return inner
        return GuardedOptimizer(
            inner,
            scaler=LossScaler(self.device.type, **asked.loss_scale) if asked.loss_scaling else None,
            master=master,
            skip_nonfinite=asked.skip_nonfinite,
            stop_nonfinite=asked.stop_nonfinite,
            stages=self.stages,
        )

    def _make_master(self) -> MasterWeights | None:
        if self.optimizer.make_host_weights is not None:
            return self.optimizer.make_host_weights()
        return MasterWeights(self.model.parameters()) if self.optimizer.master_weights else None


def _check_fused(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse ``split`` for fused projections that are split over ranks: their parts are in the order of ranks."""
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
    """Refuse torch's fused SGD over shards, on which torch would fail in the first step."""
    for group in optimizer.param_groups if isinstance(optimizer, SGD) else ():
        if group["fused"] and any(isinstance(parameter, DTensor) for parameter in group["params"]):
            raise ConfigError(
                "torch's fused SGD cannot update sharded parameters",
                expected="fused=None (torch's own choice) or foreach=True under a strategy that shards",
                got="fused=True",
                fix="leave fused out of optim_args",
            )


# --- Failed steps: nothing of a failed forward or backward may reach the next step

_SETTLING = "_meshwright_settling"  # attribute of a DDP module: the handle of the hook ``_settle``


@contextlib.contextmanager
def abandoned_if_it_fails(job: Job, optim: Optimizer | None) -> Iterator[None]:
    """Leave the job ready for another step if forward or backward inside the context fails.

    This does not wait for other ranks: if only this one has failed, its error must show at once.
    """
    if job.gather_order_check is not None:
        job.gather_order_check.forget()
    try:
        yield
    except Exception:
        abandon(job, optim)
        raise


def abandon(job: Job, optim: Optimizer | None) -> None:
    """Free the gathered weights and the gradients of a failed forward or backward, and reset all engines.

    Every rank that goes on must have failed at the same place, and calls this.
    """
    abandon_units(job.model)
    for module in job.model.modules():
        if isinstance(module, DistributedDataParallel):
            _reset(module)
    if job.pipeline is not None:
        job.pipeline.abandon()
    if job.gather_order_check is not None:
        job.gather_order_check.forget()
    job.model.zero_grad()
    if optim is not None:
        optim.zero_grad()  # some gradients may be on the host


def _reset(replicas: DistributedDataParallel) -> None:
    # DDP takes the failed pass for one that still reduces, and would refuse the next.
    reset_reducer(replicas.reducer)
    if _SETTLING not in replicas.__dict__:
        replicas.__dict__[_SETTLING] = replicas.register_forward_pre_hook(_settle)


def _settle(replicas: nn.Module, args: Any) -> None:
    """Wait until all averages of the failed pass have ended: the next pass writes to the buffers that they use."""
    assert isinstance(replicas, DistributedDataParallel)
    if torch.is_grad_enabled():  # all ranks are here
        replicas.__dict__.pop(_SETTLING).remove()
        dist.barrier(replicas.process_group)


# --- The parameters of a model, again in every step; and those that came after the optimizer

# By model: its modules, and the identities of their children, as of the last walk.
_walks: weakref.WeakKeyDictionary[nn.Module, tuple[list[weakref.ref[nn.Module]], list[int]]] = (
    weakref.WeakKeyDictionary()
)


def parameters_in(model: nn.Module) -> list[nn.Parameter]:
    """Return ``list(model.parameters())`` in less than a third of the time, and with a few calls.

    torch composes every module's name. Here modules are walked again only after one was put in, taken out or exchanged,
    which the children of those known tell; and everything that is done for each of them is a loop that runs in C.
    """
    known, identities = _walks.get(model, ([], []))
    modules: list[nn.Module | None] = [*map(call, known)]
    if not modules or None in modules or [*map(id, _members(children_of, modules))] != identities:
        walked = [*model.modules()]
        _walks[model] = [*map(weakref.ref, walked)], [*map(id, _members(children_of, walked))]
        modules = [*walked]
    found = [*_members(parameters_of, modules)]
    each_once = dict(zip(map(id, found), found, strict=True))  # tensors are slow to hash
    each_once.pop(id(None), None)
    return [*each_once.values()]


def _members(kind: Callable[[Any], dict[str, Any]], modules: list[Any]) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, map(kind, modules)))


_shape = attrgetter("shape")


class KnownParameters:
    """The parameters of a model as its strategy has left it: the optimizer updates these, and ranks average them.

    A layer that is put into the model later would never train, or train differently on every rank.

    Args:
        model: The model, after all methods were applied.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        parameters = parameters_in(model)
        self._every, self._shapes = [*map(weakref.ref, parameters)], [*map(_shape, parameters)]
        self._known = {id(each): index for index, each in enumerate(parameters)}
        self._optimizer: Callable[[], Optimizer | None] = lambda: None

    def follow(self, optimizer: Optimizer) -> None:
        """Note the optimizer of the model: on one rank it may be given further parameters."""
        self._optimizer = weakref.ref(optimizer)

    def __call__(self) -> None:
        """Refuse a model with gradients, or shapes, that it did not have before.

        Gathered weights of FSDP2, which are others than its shards, have no gradients of their own.

        Raises:
            ModelError: Naming the first such parameter.
        """
        model = self._model()
        if model is None:
            return
        parameters = parameters_in(model)
        known = [*map(call, self._every)]
        # In every step, so by loops that run in C.
        same = len(known) == len(parameters) and all(map(is_, known, parameters))
        if same and [*map(_shape, parameters)] == self._shapes:
            return
        for parameter in parameters:
            index = self._known.get(id(parameter))
            if index is not None and known[index] is parameter:
                if parameter.shape != self._shapes[index]:
                    raise _late(model, parameter, self._shapes[index])
            elif parameter.grad is not None and not self._is_added(parameter):
                raise _late(model, parameter, None)

    def _is_added(self, parameter: torch.Tensor) -> bool:
        optimizer = self._optimizer()
        if optimizer is None or world_size() > 1:
            return False
        return any(parameter is each for group in optimizer.param_groups for each in group["params"])


def _late(model: nn.Module, parameter: torch.Tensor, before: torch.Size | None) -> ModelError:
    named = unwrapped(model).named_parameters()
    name = next((stored_name(name) for name, each in named if each is parameter), "a parameter")
    got = f"{name} of shape {tuple(parameter.shape)}"
    return ModelError(
        "The model has changed since accelerate, and its optimizer and gradient averages know the parameters of then",
        expected="the parameters that the model had in accelerate"
        if before is None
        else f"{name} of shape {tuple(before)}, as in accelerate",
        got=f"{got}, put into the model later" if before is None else got,
        fix="replace or resize layers before accelerate; for a model that trains already, save its weights, build it "
        "anew with the change, load them, and accelerate that",
    )


# --- Steps that must not reach the weights


@contextlib.contextmanager
def restored_buffers(model: nn.Module, needed: bool = True) -> Iterator[Callable[[], None]]:
    """Copy buffers, and yield a function that restores them: running statistics never lose a nan again.

    An :class:`UnsoundStepError` restores them, too.

    Args:
        model: Its buffers are copied on entry.
        needed: False copies nothing.
    """
    copies = {name: buffer.clone() for name, buffer in model.named_buffers()} if needed else {}

    @torch.no_grad()
    def restore() -> None:
        now = dict(model.named_buffers())
        for name, before in copies.items():
            now[name].copy_(before)

    try:
        yield restore
    except UnsoundStepError:
        restore()
        raise
