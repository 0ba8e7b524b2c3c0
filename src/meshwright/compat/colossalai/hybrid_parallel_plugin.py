"""`HybridParallelPlugin`: tensor, sequence, pipeline and data parallelism, replicated or sharded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch

from meshwright.compat.colossalai.data_parallel_plugins import ddp_options, zero_keys
from meshwright.compat.colossalai.plugin import (
    LossScaleArguments,
    Plugin,
    check_choice,
    compressed,
    fused,
    in_fp8,
    inert,
    mesh_of,
    offloaded,
    only,
    sequence_overlap,
)
from meshwright.errors import ConfigError
from meshwright.strategy import Strategy

STYLES = ("1f1b", "interleaved", "zbv")
_IN_TENSOR_GROUPS = ("split_gather", "ring")
# Modes over ranks of an axis of their own.
_OWN_AXES = {"all_to_all": "sequence", "ring_attn": "context"}
_MODES = (*_IN_TENSOR_GROUPS, *_OWN_AXES)


class AxisArguments(Plugin):
    """Arguments of a plugin that decide mesh axes; the plugin declares them with defaults."""

    tp_size: int
    pp_size: int
    sp_size: int | None
    enable_sequence_parallelism: bool
    sequence_parallelism_mode: str | None
    num_microbatches: int | None
    microbatch_size: int | None
    pp_style: str
    num_model_chunks: int
    num_layers_per_stage: Sequence[int] | None


def sequence_mode(plugin: AxisArguments) -> str | None:
    """Return the mode that divides tokens, by default ColossalAI's ``all_to_all``; None divides none."""
    mode = plugin.sequence_parallelism_mode or "all_to_all"
    is_off = not plugin.enable_sequence_parallelism or (mode in _OWN_AXES and plugin.sp_size == 1)
    return None if is_off else mode


def check_axes(plugin: AxisArguments) -> None:
    """Check that pipeline and sequence arguments fit together.

    Raises:
        ConfigError: When they do not.
    """
    check_choice(plugin, "pp_style", plugin.pp_style, STYLES)
    check_choice(plugin, "sequence_parallelism_mode", plugin.sequence_parallelism_mode, (None, *_MODES))
    _check_pipeline(plugin)
    _check_sequence(plugin)


def _check_pipeline(plugin: AxisArguments) -> None:
    chunks = plugin.num_model_chunks
    if plugin.pp_size == 1:
        return
    if plugin.num_microbatches is None and plugin.microbatch_size is None:
        _refuse(
            plugin,
            "a pipeline cuts batches into micro-batches",
            expected="num_microbatches or microbatch_size",
            got="neither",
            fix="give num_microbatches, best several times pp_size",
        )
    if plugin.pp_style == "interleaved" and chunks < 2:
        _refuse(
            plugin,
            "pp_style='interleaved' divides each rank's blocks into several stages",
            expected="num_model_chunks of 2 or more",
            got=repr(chunks),
            fix="give num_model_chunks=2, or use pp_style='1f1b'",
        )
    if plugin.pp_style == "zbv" and chunks not in (1, 2):
        _refuse(
            plugin,
            "pp_style='zbv' has two stages on every rank",
            expected="num_model_chunks=2",
            got=repr(chunks),
            fix="leave num_model_chunks out",
        )


def _check_sequence(plugin: AxisArguments) -> None:
    mode, size = sequence_mode(plugin), plugin.sp_size
    if mode is None and size not in (1, None):
        _refuse(
            plugin,
            "sp_size is given and sequence parallelism is not enabled",
            expected="enable_sequence_parallelism=True beside it",
            got=f"sp_size={size}",
            fix="enable it, or leave sp_size out",
        )
    if mode in _IN_TENSOR_GROUPS and (plugin.tp_size == 1 or size not in (1, None, plugin.tp_size)):
        _refuse(
            plugin,
            f"sequence_parallelism_mode={mode!r} divides tokens over the ranks of a tensor group",
            expected="tp_size of 2 or more, and no other sp_size",
            got=f"tp_size={plugin.tp_size}, sp_size={size}",
            fix="leave sp_size out, and raise tp_size; or use 'all_to_all', which has ranks of its own",
        )
    if mode in _OWN_AXES and (size is None or size < 2):
        _refuse(
            plugin,
            f"sequence_parallelism_mode={mode!r} divides tokens over ranks of its own",
            expected="sp_size of 2 or more",
            got=f"sp_size={size}",
            fix="give sp_size, or use 'split_gather' with tp_size",
        )


def _refuse(plugin: AxisArguments, what: str, **parts: str) -> NoReturn:
    raise ConfigError(f"{type(plugin).__name__}: {what}", **parts)


def axis_methods(plugin: AxisArguments) -> list[Any]:
    """Return the methods of the axes tensor, sequence, context and pipeline."""
    mode, methods = sequence_mode(plugin), list[Any]()
    if plugin.tp_size > 1:
        methods.append(("tensor_parallel", {"sequence": True} if mode in _IN_TENSOR_GROUPS else {}))
    if mode in _OWN_AXES:
        methods.append(f"{_OWN_AXES[mode]}_parallel")
    if plugin.pp_size > 1:
        methods.append(("pipeline_parallel", _pipeline_keys(plugin)))
    return methods


def _pipeline_keys(plugin: AxisArguments) -> dict[str, Any]:
    stages = {"1f1b": 1, "interleaved": plugin.num_model_chunks, "zbv": 2}[plugin.pp_style]
    keys: dict[str, Any] = {"schedule": plugin.pp_style, "num_stages_per_rank": stages}
    # With microbatch_size the number follows from the batch; until then as many as stages, which suit every schedule.
    keys["num_micro_batches"] = plugin.num_microbatches or plugin.pp_size * stages
    if plugin.num_layers_per_stage is not None:
        keys["split"] = list(plugin.num_layers_per_stage)
    return keys


def axis_sizes(plugin: AxisArguments) -> dict[str, int]:
    """Return the sizes of all axes but ``data``, innermost first."""
    sizes, mode = {"tensor": plugin.tp_size}, sequence_mode(plugin)
    if mode in _OWN_AXES:
        sizes[_OWN_AXES[mode]] = plugin.sp_size or 1
    return sizes if plugin.pp_size == 1 else {**sizes, "pipeline": plugin.pp_size}


def axis_notices(plugin: AxisArguments) -> list[str]:
    """Return notices of arguments without effect under the given strategy."""
    name, found = type(plugin).__name__, []
    if plugin.pp_size > 1 and plugin.pp_style == "1f1b" and plugin.num_model_chunks > 1:
        found.append(f"{name}: num_model_chunks changes nothing; pp_style='1f1b' has one stage on every rank")
    if plugin.pp_size == 1 and plugin.pp_style != "1f1b":
        found.append(f"{name}: pp_style changes nothing; there is one pipeline stage")
    if plugin.enable_sequence_parallelism and sequence_mode(plugin) is None:
        found.append(f"{name}: enable_sequence_parallelism changes nothing; sp_size is 1")
    if sequence_mode(plugin) == "ring":
        found.append(f"{name}: sequence_parallelism_mode='ring' is 'split_gather'; the order of sending is torch's")
    return found


# --- The plugin, and its form for models with experts.

_ZERO = {1: "zero1", 2: "zero2", 3: "fsdp"}
_TORCHS_ENGINE = "the schedules and their sends and receives are torch's"


@dataclass(frozen=True, eq=False, repr=False)
class HybridParallelPlugin(LossScaleArguments, AxisArguments):
    """Tensor, sequence and pipeline parallelism, data parallelism over the rest of the ranks. Seed: ColossalAI.

    ``pp_size`` stages need ``num_microbatches`` or ``microbatch_size``; ``Booster.execute_pipeline`` runs them by the
    schedule ``pp_style``. ``num_model_chunks`` is the number of stages per rank for ``interleaved``, and
    ``num_layers_per_stage`` cuts the model by hand. ``enable_sequence_parallelism`` divides tokens over the tensor
    group (``split_gather``, ``ring``) or over ``sp_size`` ranks of their own (``all_to_all``, ``ring_attn``).

    Parameters are replicated over the data ranks (``zero_stage`` 0), or sharded with zero1, zero2 or fsdp (1, 2, 3).
    Half precision keeps fp32 master weights. ``cpu_offload`` keeps optimizer states in host memory (the method
    offload), with any stage. Unlike in ColossalAI, ZeRO works with fp32 as well, there is a stage 3, and ``no_sync``
    works with all stages.
    """

    as_fsdp: ClassVar[str] = "tp_size=1 and zero_stage=3"

    tp_size: int = 1
    pp_size: int = 1
    sp_size: int | None = None
    precision: str = "fp16"
    zero_stage: int = 0
    enable_all_optimization: bool = fused()
    enable_fused_normalization: bool = fused()
    enable_flash_attention: bool = fused()
    enable_jit_fused: bool = fused()
    enable_sequence_parallelism: bool = False
    sequence_parallelism_mode: str | None = None
    parallel_output: bool = inert(True, "outputs are whole on every tensor-parallel rank")
    num_microbatches: int | None = None
    microbatch_size: int | None = None
    initial_scale: float = 2.0**16
    min_scale: float = 1.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    max_scale: float = 2.0**32
    max_norm: float = 0.0
    broadcast_buffers: bool = True
    ddp_bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = inert(False, "torch ignores it")
    gradient_as_bucket_view: bool = inert(False, "gradients are always views of the buckets, which saves a copy")
    static_graph: bool = False
    zero_bucket_size_in_m: int = inert(12, "FSDP2 gathers and reduces one block of the model at a time")
    cpu_offload: bool = False
    communication_dtype: torch.dtype | None = None
    overlap_communication: bool = inert(True, "communication overlaps with computation on CUDA")
    custom_policy: Any = only(None, "a policy of Shardformer", "give the plan to methods=[('tensor_parallel', …)]")
    pp_style: str = "1f1b"
    num_model_chunks: int = 1
    scheduler_nodes: Any = inert(None, _TORCHS_ENGINE)
    num_layers_per_stage: Sequence[int] | None = None
    gradient_checkpoint_config: Any = only(None, "recomputation by stage and ratio", "use methods=['checkpoint']")
    enable_metadata_cache: bool = inert(True, "shapes that came once are known, and may change")
    make_vocab_size_divisible_by: int = inert(64, "the vocabulary is not padded")
    dp_outside: bool = True
    overlap_p2p: bool = inert(True, _TORCHS_ENGINE)
    overlap_allgather: bool = inert(False, "weights of the next block are gathered while one computes")
    fp8_communication: bool = compressed()
    use_fp8: bool = False
    inner_ring_size: int | None = inert(None, "ring_attn is one ring")
    enable_sequence_overlap: bool = sequence_overlap()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "zero_stage", self.zero_stage, (0, 1, 2, 3))
        self.check_precision(self.precision)
        check_axes(self)
        if self.communication_dtype is not None and self.zero_stage == 0:
            raise ConfigError(
                f"{type(self).__name__}: communication_dtype needs a ZeRO stage",
                expected="zero_stage 1, 2 or 3",
                got="zero_stage=0, in which gradients are averaged in their own precision",
                fix="leave communication_dtype out, or choose a stage",
            )
        for name in ("num_microbatches", "microbatch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is not a count", expected="1 or more", got=repr(value), fix="leave it out")
        if self.pp_size > 1:
            self._refuse_fp8_communication("stages reduce gradients", "pp_size=1")
        elif self.tp_size > 1 and self.zero_stage == 0:
            self._refuse_fp8_communication("replicas of divided weights average gradients", "a zero_stage")

    def _refuse_fp8_communication(self, why: str, expected: str) -> None:
        if self.fp8_communication:
            raise ConfigError(
                f"{type(self).__name__}: fp8_communication cannot be had where {why} in their own way",
                expected=f"{expected} beside it",
                got=repr(self),
                fix="leave fp8_communication out",
            )

    def strategy(self, world: int) -> Strategy:
        """Return parallel_mode with the axes tensor, sequence, context, pipeline and data, and their methods."""
        mesh = mesh_of(self, world, self._sizes(), rest="data")
        if not self._data_outside:  # ranks of one stage are neighbours
            mesh["axes"].sort(key=lambda axis: axis[0] == "pipeline")
        methods: list[Any] = [("parallel_mode", mesh), *axis_methods(self)]
        if self.zero_stage:
            methods.append((_ZERO[self.zero_stage], zero_keys(self.communication_dtype)))
        methods += self.precision_methods(self.precision)
        methods += in_fp8(self.use_fp8, self.fp8_communication, gathers=self.zero_stage > 0)
        return self.with_methods([*methods, *offloaded(self.cpu_offload)])

    def _sizes(self) -> dict[str, int]:
        """Return the sizes of all axes but ``data``, innermost first."""
        return axis_sizes(self)

    @property
    def _data_outside(self) -> bool:
        return self.dp_outside

    def notices(self) -> list[str]:
        """Return the notices, also of arguments for other schedules and modes."""
        return super().notices() + axis_notices(self)

    @property
    def clipping(self) -> tuple[float, float]:
        """``max_norm``, and the 2-norm."""
        return self.max_norm, 2.0

    @property
    def ddp_options(self) -> Mapping[str, Any]:
        """Keyword arguments of DistributedDataParallel, used with ``zero_stage`` 0."""
        return ddp_options(
            self.broadcast_buffers, self.ddp_bucket_cap_mb, self.find_unused_parameters, self.static_graph
        )

    def num_micro_batches(self, batch_size: int) -> int:
        """Return ``num_microbatches``, or the number that ``microbatch_size`` gives.

        Raises:
            ConfigError: When ``microbatch_size`` does not divide the batch.
        """
        if self.num_microbatches is not None or self.microbatch_size is None:
            return self.num_microbatches or 1
        if batch_size % self.microbatch_size:
            raise ConfigError(
                "microbatch_size does not divide the batch",
                expected=f"a batch of a multiple of {self.microbatch_size} samples",
                got=str(batch_size),
                fix="choose another microbatch_size, and drop_last=True for the dataloader",
            )
        return batch_size // self.microbatch_size


@dataclass(frozen=True, eq=False, repr=False, init=False)
class MoeHybridParallelPlugin(HybridParallelPlugin):
    """:class:`HybridParallelPlugin` with experts divided over ``ep_size`` ranks. Seed: ColossalAI.

    The ranks of an expert group take different samples, so ``ep_size`` must divide the data-parallel ranks, of which
    there are the world's by ``tp_size``, ``pp_size`` and an ``sp_size`` of ranks of their own. The method
    ``expert_parallel`` finds the experts of a plain or transformers model without a policy. Beside ``tp_size`` experts
    are divided over the ranks of both, so the product must divide their number.

    Experts to which no sample of a rank is routed get no gradient there, so DDP looks for unused parameters.

    Args:
        tp_size, pp_size, sp_size: See :class:`HybridParallelPlugin`.
        ep_size: Number of ranks that experts are divided over; the third argument, as in ColossalAI.
        others, options: Further arguments of :class:`HybridParallelPlugin`, those after ``sp_size`` also by position.
        moe_tp_size: Must be 1.
        force_overlap_comm: No effect.
        moe_dp_outside: Whether ranks with the same experts lie around the stages of a pipeline, or within one.
    """

    ep_size: int = 1
    moe_tp_size: int = only(1, "tensor parallelism of its own for experts", "use ep_size")
    force_overlap_comm: bool = inert(False, "communication overlaps with computation on CUDA")
    moe_dp_outside: bool = True

    def __init__(
        self,
        tp_size: int = 1,
        pp_size: int = 1,
        ep_size: int = 1,
        sp_size: int | None = None,
        *others: Any,
        moe_tp_size: int = 1,
        force_overlap_comm: bool = False,
        moe_dp_outside: bool = True,
        **options: Any,
    ) -> None:
        # Written out: a dataclass puts its base's arguments first, and ColossalAI has ep_size between them.
        own = {"moe_tp_size": moe_tp_size, "force_overlap_comm": force_overlap_comm, "moe_dp_outside": moe_dp_outside}
        for name, value in {"ep_size": ep_size, **own}.items():
            object.__setattr__(self, name, value)  # the class is frozen, and the checks below read them
        super().__init__(tp_size, pp_size, sp_size, *others, **options)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ep_size > 1:
            self._refuse_fp8_communication("the gradients of experts are averaged", "ep_size=1")

    def strategy(self, world: int) -> Strategy:
        """Return the base's strategy, with ``expert_parallel`` over the axis expert inside data parallelism."""
        strategy = super().strategy(world)
        return strategy if self.ep_size == 1 else strategy.with_method("expert_parallel")

    def _sizes(self) -> dict[str, int]:
        sizes = axis_sizes(self)
        stages = {axis: sizes.pop(axis) for axis in ("pipeline",) if axis in sizes}
        return {**sizes, "expert": self.ep_size, **stages}

    @property
    def _data_outside(self) -> bool:
        return self.dp_outside and self.moe_dp_outside

    @property
    def ddp_options(self) -> Mapping[str, Any]:
        """Keyword arguments of DistributedDataParallel, always with ``find_unused_parameters``."""
        return {**super().ddp_options, "find_unused_parameters": True}
