"""Define what a method is, how methods may go together, and the real job that they change."""

from __future__ import annotations

import contextlib
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

import torch
import torch.distributed as dist
from pydantic import BeforeValidator
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from meshwright.cost import AVERAGING, Device, Step
from meshwright.errors import ConfigError, ModelError
from meshwright.methods.planner_hooks import PlannerHooks
from meshwright.nn import abandon_units, class_name, rank_orders
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
from meshwright.store.entries import unwrapped

if TYPE_CHECKING:
    from meshwright.cost import Compression
    from meshwright.methods.expert.divided_experts import Experts
    from meshwright.methods.expert.expert_layers import ExpertLayer
    from meshwright.methods.pipeline.execution import PipelineEngine
    from meshwright.methods.pipeline.stage_cut import Cut
    from meshwright.methods.replace.model_changes import Replacement
    from meshwright.methods.tensor.block_trials import SampleRun
    from meshwright.methods.tensor.model_split import Split
    from meshwright.methods.weight_vote import Voter
    from meshwright.methods.zero import GatherOrderCheck
    from meshwright.strategy import Strategy


SHARDING = ("zero1", "zero2", "fsdp")
"""The methods that shard parameters."""

INNER_AXES = ("tensor", "sequence", "context", "expert")
"""The axes that divide a sample's work or a layer's weights, innermost first; data parallelism lies around them."""

SHARD_AXES = ("zero", "data", "sequence", "context", "expert")
"""The axes that parameters can be sharded over: the first that the mesh has."""


def _always(*methods: Any) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """Why a method does not go together with another."""

    other: str
    """The other's name."""
    reason: str
    """A clause that follows "a does not go together with b:"."""
    fix: str
    when: Callable[[Any, Any], bool] = _always
    """Whether two configs, the method's own and the other's, are in conflict."""
    own_keys: str = ""
    """Which configs of the method ``when`` picks, as a user writes them; empty: all."""
    other_keys: str = ""
    """Which of the other."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """Methods of which one must be beside a method."""

    any_of: tuple[str, ...]
    reason: str
    """A clause that follows "a needs one of …:"."""
    fix: str
    when: Callable[[Any], bool] = _always
    """Whether a config of the method needs it."""
    own_keys: str = ""
    """Which configs ``when`` picks, as a user writes them; empty: all."""


# --- What a method is: one file with a validated config, ``check``, and the twins ``apply`` and ``cost``.


class Phase(IntEnum):
    """The order in which methods are applied, whatever order a strategy lists them in."""

    MESH = 0
    REPLACE = 1  # modules are exchanged while the model is whole: what the cut frees could not be taken over
    PIPELINE = 2  # the model is cut: all that follows sees one rank's part
    FP8 = 3  # the layers of one rank's part
    TENSOR = 4
    SEQUENCE = 5
    CONTEXT = 6  # around what sequence does
    RECOMPUTE = 7  # inside the sharding hooks, so that recomputation finds gathered parameters
    COMPILE = 8
    PRECISION = 9  # before sharding, which must know the precision it gathers in
    OFFLOAD = 10  # around recomputation, and before sharding, which must know what lives on the host
    SHARD = 11
    REPLICATE = 12
    OPTIMIZER = 13
    WATCH = 14  # over the optimizer as all others have finished it


class Method(PlannerHooks):
    """One optimisation. Its fields are its config; it changes a real job and a simulated step in the same way."""

    phase: ClassVar[Phase]
    shards: ClassVar[bool] = False  # whether it shards parameters: at most one such method in a strategy
    summary: ClassVar[str]  # one line on what it does
    effect: ClassVar[str] = ""  # one line on what that does to memory, time and communication
    seed_name: ClassVar[str | None] = None  # "system: its name there"; None: it is Meshwright's own
    axis: ClassVar[str | None] = None  # the mesh axis that is its own: nothing else works on it
    needs: ClassVar[tuple[Need, ...]] = ()
    conflicts: ClassVar[tuple[Conflict, ...]] = ()  # each is declared by one of the two methods

    def at_work(self, sizes: Mapping[str, int]) -> bool:
        """Return whether it changes anything on a mesh: the method of an axis does where the axis has several ranks."""
        return self.axis is None or sizes.get(self.axis, 1) > 1

    @property
    def of_state(self) -> bool:
        """Return whether it changes what becomes of parameters and their states alone.

        What blocks compute and save stays.
        """
        return False

    def check(self, job: Job) -> None:
        """Refuse a job it cannot work on, before anything is changed.

        Raises:
            MeshwrightError: Saying what, expected, got, and what to do.
        """

    def left_out_on(self, device: torch.device | Device) -> str | None:
        """Return why a strategy is applied without it on such a device, as a sentence for the user.

        None where it works.
        """
        return None

    def check_mesh(self, sizes: Mapping[str, int], shard_axis: str | None) -> None:
        """Refuse a mesh on which it cannot do what its keys ask for; search pass such strategies over.

        Args:
            sizes: Ranks along every axis.
            shard_axis: The axis that parameters are sharded over; None: they are not.

        Raises:
            StrategyError: Naming the key.
        """

    @abstractmethod
    def apply(self, job: Job) -> None:
        """Change the real job."""

    @abstractmethod
    def cost(self, step: Step) -> Step:
        """Change the simulated step in the same way."""


# --- Class references in configs: users write classes or names, strategies keep qualified names.


def _to_names(value: Any) -> Any:
    """A class, a name, or a tuple, list or set of them -> a tuple of names."""
    if value is None:
        return None
    listed = [value] if isinstance(value, str | type) else value
    if not isinstance(listed, tuple | list | set | frozenset):
        return value
    names = [class_name(item) if isinstance(item, type) else item for item in listed]
    return sorted(names) if isinstance(listed, set | frozenset) else names


ClassReferences = Annotated[tuple[str, ...], BeforeValidator(_to_names)]
"""Classes or class names, bare or qualified, stored as names."""


# --- Precisions by name: ``fp32``, ``bf16``, ``fp16`` in configs, whatever a user wrote.

_NAMES = {
    "fp16": "fp16", "float16": "fp16", "half": "fp16", "torch.float16": "fp16",
    "bf16": "bf16", "bfloat16": "bf16", "torch.bfloat16": "bf16",
    "fp32": "fp32", "float32": "fp32", "torch.float32": "fp32",
}  # fmt: skip
_TORCH = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def dtype_name(value: Any) -> Any:
    """Return the name of a precision in any of its spellings; what is none of them stays as it is."""
    return _NAMES.get(str(value), value)


DType = Annotated[Literal["fp16", "bf16", "fp32"], BeforeValidator(dtype_name)]
HalfDType = Annotated[Literal["fp16", "bf16"], BeforeValidator(dtype_name)]


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a precision's name."""
    return _TORCH[name]


def half_dtype(device: torch.device) -> str:
    """Return what half precision is on a device: ``bf16``.

    ``fp16`` on CUDA devices that only emulate it (before Ampere).
    """
    # CPUs without bf16 instructions multiply it in fp32; of fp16 they have no fast way.
    has_bf16 = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16" if has_bf16 else "fp16"


def itemsize(name: str) -> int:
    """Return the bytes per element of a precision."""
    return _TORCH[name].itemsize


# --- The real training job that methods change, phase by phase, until it can train.

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


class OffloadedBytes(Protocol):
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
    compression: Compression | None = None  # set by comm for the method that shards, or for data parallelism
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
    offloaded_units: frozenset[str] = frozenset()  # offload: paths of blocks whose sharded parameters live on the host
    pin_memory: bool = False  # offload: whether they are page-locked there
    activations: OffloadedBytes | None = None  # offload: what forward copies to the host
    stages: Stages | None = None  # for norms, where the parameters are one pipeline rank's
    micro_batch: MicroBatchContext = _no_context  # entered around forward and backward; True on the last micro-batch
    gather_order_check: GatherOrderCheck | None = (
        None  # set by the method that shards: what compares the ranks in every step
    )
    notices: list[str] = field(default_factory=list)  # what the user is told once, on rank 0

    def size(self, axis: str | None) -> int:
        """Ranks along an axis; 1 where the mesh has none of that name."""
        return dict(self.axes).get(axis, 1) if axis is not None else 1

    def index(self, axis: str) -> int:
        """This rank's place along an axis; 0 where the mesh has none of that name."""
        return self.coordinate.get(axis, 0)

    def require_mesh(self) -> DeviceMesh:
        """Return the mesh, for methods that run after the mesh phase."""
        assert self.mesh is not None, "parallel_mode applies first"
        return self.mesh

    @property
    def num_replicas(self) -> int:
        """Return how many ranks, or groups of ranks, train on different samples."""
        return math.prod(self.size(axis) for axis in SAMPLED)

    @property
    def num_averaged(self) -> int:
        """Return how many ranks, or groups of ranks, average their gradients in every step."""
        return math.prod(self.size(axis) for axis in AVERAGED)

    @property
    def averaging_group(self) -> dist.ProcessGroup | None:
        """Return the ranks that average gradients in every step; None for the world. Collective."""
        if self.num_averaged == math.prod(size for _, size in self.axes):
            return None
        return self.flat_mesh(*AVERAGED).get_group()

    def flat_mesh(self, *names: str) -> DeviceMesh:
        """Return those of these axes that have several ranks, as a mesh of one dim; at least one has. Collective."""
        axes = tuple(axis for axis in names if self.size(axis) > 1)
        mesh = self.require_mesh()
        return mesh[axes]._flatten() if len(axes) > 1 else mesh[axes]

    @property
    def replica(self) -> int:
        """Return which of them this rank belongs to."""
        place = 0
        for axis in SAMPLED:
            place = place * self.size(axis) + self.index(axis)
        return place

    def build_optimizer(self) -> Optimizer | None:
        """Build the optimizer over the model as it is now, with its guards; ``finish_optimizer`` comes after it."""
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
    """Refuse groups that are to treat the parts of fused projections apart: these lie in the order of ranks."""
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
    """Refuse torch's fused SGD over shards, which would be an error of torch in the first step."""
    for group in optimizer.param_groups if isinstance(optimizer, SGD) else ():
        if group["fused"] and any(isinstance(parameter, DTensor) for parameter in group["params"]):
            raise ConfigError(
                "torch's fused SGD cannot update sharded parameters",
                expected="fused=None (torch's own choice) or foreach=True under a strategy that shards",
                got="fused=True",
                fix="leave fused out of optim_args",
            )


# --- Means over the ranks of a job.

STEP_AXES = ("data", "zero", "expert")
"""The axes whose ranks take different samples of one step."""

ALL_AXES = ("replica", *STEP_AXES)
"""With the replicas of ``outer``, which train on their own."""


def mean_over(job: Job, value: torch.Tensor, axes: tuple[str, ...]) -> torch.Tensor:
    """Return the mean of a tensor over the ranks along these axes; collective."""
    mean = value.detach().clone()
    for axis in axes:
        if job.size(axis) > 1:
            dist.all_reduce(mean, group=job.require_mesh().get_group(axis))
            mean /= job.size(axis)
    return mean


# --- A step whose forward or backward failed: nothing of it may reach the next one.

_SETTLING = "_meshwright_settling"  # in the __dict__ of a DDP: the hook that will


@contextlib.contextmanager
def abandoned_if_it_fails(job: Job, optim: Optimizer | None) -> Iterator[None]:
    """Around forward and backward of a step: an error leaves the job as a loop may go on with it.

    Nothing waits for another rank here: where only this one has failed, its error is to be seen at once.
    """
    if job.gather_order_check is not None:
        job.gather_order_check.forget()
    try:
        yield
    except Exception:
        abandon(job, optim)
        raise


def abandon(job: Job, optim: Optimizer | None) -> None:
    """Free what a failed forward or backward has gathered and its gradients; all engines are ready for the next one.

    Every rank that goes on calls it, having failed at the same place.
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
    """DDP believes until then that the failed pass still reduces, and refuses the next."""
    replicas.reducer._reset_state()
    if _SETTLING not in replicas.__dict__:
        replicas.__dict__[_SETTLING] = replicas.register_forward_pre_hook(_settle)


def _settle(replicas: nn.Module, args: Any) -> None:
    """Wait until no average of the failed pass is under way: the next pass writes where these read and write."""
    assert isinstance(replicas, DistributedDataParallel)
    if torch.is_grad_enabled():  # all ranks are here
        replicas.__dict__.pop(_SETTLING).remove()
        dist.barrier(replicas.process_group)


# --- ``parallel_mode``: the named mesh, and plain data parallelism over its ``data`` axis. Seed: ATorch.


def averaging_axis(job: Job) -> str:
    """Return the axis over which gradients are averaged where no method shards: the first of several."""
    return next((axis for axis in AVERAGING if job.size(axis) > 1), AVERAGING[0])
