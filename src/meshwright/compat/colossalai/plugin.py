"""Base of the plugins: a strategy under ColossalAI's keyword arguments, and the few options that no strategy has.

Arguments that mean something else here than in ColossalAI are declared by :func:`inert`, :func:`near` and :func:`only`,
from which notices and errors follow.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset

from meshwright.data import global_batch_loader
from meshwright.errors import ConfigError, MeshwrightError, did_you_mean, join_names
from meshwright.methods import SAMPLED, resolve
from meshwright.runtime import coordinate_of, make_group, rank, world_size
from meshwright.strategy import Strategy


def inert(default: Any, why: str) -> Any:
    """Declare an argument without effect; a notice says ``why`` if it is not the default."""
    return field(default=default, metadata={"inert": why})


def near(default: Any, what: str) -> Any:
    """Declare an argument that means nearly what it does in ColossalAI; a notice says ``what`` if it is given."""
    return field(default=default, metadata={"near": what})


def only(default: Any, what: str, fix: str) -> Any:
    """Declare an argument with one supported value; another would change the result, so it is an error."""
    return field(default=default, metadata={"only": what, "fix": fix})


_MESHES: weakref.WeakKeyDictionary[Plugin, DeviceMesh] = weakref.WeakKeyDictionary()  # plugins are frozen
_ALONE: list[dist.ProcessGroup] = []  # the world, and the group of this rank alone that was made in it


def _alone() -> dist.ProcessGroup:
    """Return the group of this rank alone."""
    world = dist.group.WORLD
    if not _ALONE or _ALONE[0] is not world:
        assert world is not None
        _ALONE[:] = world, make_group([rank()], use_local_synchronization=True)
    return _ALONE[1]


@dataclass(frozen=True)
class StageManager:
    """The place of a rank in its pipeline.

    Args:
        num_stages: Number of the pipeline's ranks.
        stage: Index of this rank among them.
        last: Index of the rank with the model's last blocks.
    """

    num_stages: int
    stage: int
    last: int

    def is_first_stage(self, ignore_chunk: bool = False) -> bool:
        """Return whether this rank has the model's first blocks."""
        return self.stage == 0

    def is_last_stage(self, ignore_chunk: bool = False) -> bool:
        """Return whether this rank has the last blocks, and with them the outputs; or is the last in line.

        Args:
            ignore_chunk: Ask for the last rank in line, which under ``zbv`` is another than that with the outputs.
        """
        return self.stage == (self.num_stages - 1 if ignore_chunk else self.last)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Plugin(ABC):
    """Base of all plugins. A plugin is immutable, so several boosters can use it.

    Args:
        methods: Methods to add to the plugin's strategy, such as ``["checkpoint"]``; in any form a Strategy reads.

    Raises:
        ConfigError: For a value that is not supported.
        TypeError: For an argument that does not exist.
    """

    as_fsdp: ClassVar[str] = "tp_size=1"
    """The arguments under which it is the method fsdp, for its advice."""

    methods: Sequence[Any] = ()

    def __post_init__(self) -> None:
        for option in fields(self):
            if "only" in option.metadata and not self._is_default(option):
                raise ConfigError(
                    f"{type(self).__name__}: {option.name} asks for {option.metadata['only']}, which it cannot do",
                    expected=repr(option.default),
                    got=repr(getattr(self, option.name)),
                    fix=option.metadata["fix"],
                )
        max_norm, norm_type = self.clipping
        if not (max_norm >= 0 and norm_type > 0):
            raise ConfigError(
                f"{type(self).__name__}: max_norm and norm_type are no norm to clip by",
                expected="max_norm of 0 (no clipping) or more, and norm_type above 0",
                got=f"{max_norm!r} and {norm_type!r}",
                fix="leave them out to train without clipping",
            )

    @abstractmethod
    def strategy(self, world: int) -> Strategy:
        """Return the strategy for a number of ranks.

        Raises:
            ConfigError: When the plugin's sizes do not fit the world.
        """

    def with_methods(self, methods: Sequence[Any]) -> Strategy:
        """Return a strategy of these methods and the user's own, which replace those of the same name."""
        strategy = Strategy(list(methods))
        for method in Strategy(list(self.methods)).methods:
            strategy = strategy.with_method(method)
        return strategy

    @property
    def controls_precision(self) -> bool:
        """Return whether the plugin decides the precision, and not ``Booster(mixed_precision=)``."""
        return True

    @property
    def clipping(self) -> tuple[float, float]:
        """Largest gradient norm (0: no clipping) and the p of the p-norm, applied in every optimizer step."""
        return 0.0, 2.0

    @property
    def ddp_options(self) -> Mapping[str, Any]:
        """Keyword arguments of DistributedDataParallel, for strategies that replicate parameters."""
        return {}

    @property
    def outputs_in_fp32(self) -> bool:
        """Return whether the model's outputs are cast to fp32."""
        return False

    @property
    def buffer_dtype(self) -> torch.dtype | None:
        """Return the type that the model's floating-point buffers are cast to; None leaves them."""
        return None

    def advise(self, error: MeshwrightError) -> None:
        """Add to the error of a method where the plugin takes what it advises."""
        if error.what.startswith("tensor_parallel"):
            plan = "methods=[('tensor_parallel', {'plan': {…}})]"
            error.add_fix(f"{type(self).__name__} takes a plan as {plan}, and is fsdp with {self.as_fsdp}")

    @property
    def dp_size(self) -> int:
        """Number of ranks, or groups of them, that take samples of their own."""
        return self._replica()[1]

    @property
    def tp_group(self) -> dist.ProcessGroup:
        """The ranks that divide layers with this one; known once a model is boosted."""
        return self._group("tensor")

    @property
    def pp_group(self) -> dist.ProcessGroup:
        """The ranks of this rank's pipeline; known once a model is boosted."""
        return self._group("pipeline")

    @property
    def dp_group(self) -> dist.ProcessGroup:
        """The ranks that stand where this one does in other replicas; known once a model is boosted."""
        return self._group(*SAMPLED)

    def _group(self, *axes: str) -> dist.ProcessGroup:
        """Return this rank's process group along the one of these axes that the plugin has.

        Raises:
            ConfigError: Before ``boost``, which makes the groups; or when there are two such axes.
        """
        mesh = _MESHES.get(self)
        names = [axis for axis in (mesh.mesh_dim_names or () if mesh else ()) if axis in axes]
        if mesh is None or len(names) > 1:
            raise ConfigError(
                f"{type(self).__name__} has no process group of the axes {join_names(axes)}",
                expected="a model that was boosted with the plugin, and one such axis",
                got="no model" if mesh is None else join_names(names),
                fix="ask after boost" if mesh is None else "use dp_size, and sum_loss to average over all of them",
            )
        if names:
            return mesh.get_group(names[0])
        return _alone()

    def note_mesh(self, mesh: DeviceMesh | None) -> None:
        """Remember the mesh of a boosted model; collective."""
        if mesh is not None:
            _MESHES[self] = mesh
            _alone()  # on every rank, so that all of them have made equally many groups

    @property
    def stage_manager(self) -> StageManager | None:
        """This rank's place in its pipeline; None without one."""
        method = self.strategy(world_size()).get("pipeline_parallel")
        if method is None:
            return None
        axes = resolve(self.strategy(world_size()), world_size()).axes
        size, stage = dict(axes)["pipeline"], coordinate_of(rank(), axes)["pipeline"]
        return StageManager(size, stage, last=0 if getattr(method, "schedule", "") == "zbv" else size - 1)

    def notices(self) -> list[str]:
        """Return a sentence for each given argument that has no effect, or another one than in ColossalAI."""
        effects = [
            (each, f" changes nothing; {each.metadata['inert']}" if "inert" in each.metadata else each.metadata["near"])
            for each in fields(self)
            if not self._is_default(each) and not {"inert", "near"}.isdisjoint(each.metadata)
        ]
        return [f"{type(self).__name__}: {each.name}={getattr(self, each.name)!r}{text}" for each, text in effects]

    def prepare_model(self, model: nn.Module, device: torch.device) -> list[str]:
        """Change modules of the plain model before its strategy is applied; return notices."""
        return []

    def num_micro_batches(self, batch_size: int) -> int:
        """Return the number of micro-batches that ``execute_pipeline`` cuts a batch of this rank into."""
        return 1

    def prepare_dataloader(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        pin_memory: bool = False,
        num_workers: int = 0,
        distributed_sampler_cls: type | None = None,
        **kwargs: Any,
    ) -> DataLoader[Any]:
        """Make a dataloader of this rank's share of the data; ranks of one replica get the same batches.

        Args:
            dataset: torch Dataset.
            batch_size: Samples per batch of one replica, not of all.
            shuffle: Shuffle, by ``seed`` and the loader's ``set_epoch``.
            seed: Seed of the order, equal on all ranks.
            drop_last: Drop the last incomplete batch.
            pin_memory: As in torch's DataLoader.
            num_workers: As in torch's DataLoader; workers are seeded by torch, each one differently.
            distributed_sampler_cls: Used instead of torch's DistributedSampler.
            **kwargs: Further arguments of torch's DataLoader.

        Raises:
            DataError, ConfigError: When the arguments do not fit together.
        """
        replica, num_replicas = self._replica()
        options = {"drop_last": drop_last, "pin_memory": pin_memory, "num_workers": num_workers, **kwargs}
        return global_batch_loader(
            dataset,
            loader_args={"batch_size": batch_size * num_replicas, "shuffle": shuffle, **options},
            replica=replica,
            num_replicas=num_replicas,
            sampler_cls=distributed_sampler_cls,
            sampler_seed=seed,
        )

    def _replica(self) -> tuple[int, int]:
        """Return the index of this rank's data-parallel replica, and the number of replicas."""
        axes = resolve(self.strategy(world_size()), world_size()).axes
        sizes, here = dict(axes), coordinate_of(rank(), axes)
        replica, replicas = 0, 1
        for axis in SAMPLED:
            replica = replica * sizes.get(axis, 1) + here.get(axis, 0)
            replicas *= sizes.get(axis, 1)
        return replica, replicas

    def _is_default(self, option: Field[Any]) -> bool:
        return bool(getattr(self, option.name) == option.default)

    def __repr__(self) -> str:
        shown = [option for option in fields(self) if option.default is MISSING or not self._is_default(option)]
        arguments = ", ".join(f"{option.name}={getattr(self, option.name)!r}" for option in shown)
        return f"{type(self).__name__}({arguments})"


# --- Arguments that several plugins share, and their methods.

PRECISIONS = ("fp32", "fp16", "bf16")
_FUSED = "PyTorch's scaled_dot_product_attention and torch.compile fuse what can be fused"


def compressed() -> Any:
    """Declare ``fp8_communication``."""
    return near(False, " is the method comm: gradients travel in int8, gathered weights in fp8, with a scale per block")


def fused() -> Any:
    """Declare a switch of ColossalAI's hand-written kernels, which changes speed and never results."""
    return inert(False, _FUSED)


def sequence_overlap() -> Any:
    """Declare ``enable_sequence_overlap`` as keyword-only, for ColossalAI has dropped it since."""
    return field(default=False, kw_only=True, metadata={"inert": "what overlaps is torch's to decide"})


class LossScaleArguments(Plugin):
    """Arguments of the dynamic loss scale, used when the precision is fp16.

    Each plugin declares them again, so that they have ColossalAI's positions and defaults.
    """

    initial_scale: float
    min_scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    hysteresis: int
    max_scale: float

    def check_precision(self, precision: str) -> None:
        """Check the precision and the numbers of the loss scale.

        Raises:
            ConfigError, StrategyError: When one of them is invalid.
        """
        Strategy(self.precision_methods(precision))

    def precision_methods(self, precision: str, *, master_weights: bool = True) -> list[Any]:
        """Return the methods of a precision: half for fp16 and bf16, none for fp32.

        Raises:
            ConfigError: When the precision is not one of the three.
        """
        check_choice(self, "precision", precision, PRECISIONS)
        if precision == "fp32":
            return []
        keys: dict[str, Any] = {"dtype": precision, "master_weights": master_weights}
        if precision == "fp16":
            keys["loss_scale"] = {name: getattr(self, name) for name in LossScaleArguments.__annotations__}
        return [("half", keys)]


def check_choice(plugin: Plugin, name: str, value: object, choices: tuple[Any, ...]) -> None:
    """Check that a value is one of the choices.

    Raises:
        ConfigError: When it is not.
    """
    if value not in choices:
        known = [each for each in choices if isinstance(each, str)]
        raise ConfigError(
            f"{type(plugin).__name__}: {name} is none of its values{did_you_mean(str(value), known)}",
            expected=" or ".join(map(repr, choices)),
            got=repr(value),
            fix=f"choose another {name}",
        )


def in_fp8(products: bool, communication: bool, *, gathers: bool) -> list[Any]:
    """Return the methods of ``use_fp8`` and ``fp8_communication``.

    Args:
        products: ``use_fp8``: as in ColossalAI, each tensor is scaled by its own largest value.
        communication: ``fp8_communication``.
        gathers: Whether weights are sharded, so that their gathers are compressed, too.
    """
    compression = ("comm", {"all_gather": "fp8" if gathers else None, "reduce": "int8"})
    return [*([("fp8", "tensorwise")] if products else []), *([compression] if communication else [])]


def offloaded(cpu_offload: bool) -> list[Any]:
    """Return the methods of ``cpu_offload``: master weights and states in host memory, which visit a GPU."""
    return [("offload", "optimizer")] if cpu_offload else []


def mesh_of(plugin: Plugin, world: int, sizes: Mapping[str, int], rest: str) -> dict[str, Any]:
    """Return the ``parallel_mode`` config of a mesh with one axis as large as the world allows.

    Args:
        plugin: Name of the plugin, for the error.
        world: Number of ranks.
        sizes: Given sizes by mesh axis, innermost first.
        rest: The axis whose size follows.

    Raises:
        ConfigError: When they do not divide the world.
    """
    product = 1
    for axis, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ConfigError(
                f"{type(plugin).__name__}: the size of the {axis} axis is not a number of ranks",
                expected="1 or more",
                got=repr(size),
                fix="use 1 for an axis that is not split",
            )
        product *= size
    if world % product:
        raise ConfigError(
            f"{type(plugin).__name__}: the sizes do not divide the world",
            expected=f"a divisor of {world} ranks",
            got=" x ".join(f"{axis} {size}" for axis, size in sizes.items()) + f" = {product}",
            fix=f"start a multiple of {product} processes, or change the sizes",
        )
    axes = {axis: size for axis, size in sizes.items() if size > 1 and axis != "data"}
    axes[rest] = world // product
    if sizes.get("data", 1) > 1 and rest != "data":
        axes["data"] = sizes["data"]
    return {"axes": list(axes.items())}
