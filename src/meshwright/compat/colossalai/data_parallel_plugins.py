"""Plugins for data parallelism: `LowLevelZeroPlugin`, `GeminiPlugin`, `TorchDDPPlugin`, `TorchFSDPPlugin`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.compat.colossalai.plugin import (
    LossScaleArguments,
    Plugin,
    check_choice,
    compressed,
    fused,
    in_fp8,
    inert,
    mesh_of,
    near,
    offloaded,
    only,
    sequence_overlap,
)
from meshwright.errors import ConfigError, join_names
from meshwright.runtime import world_size
from meshwright.runtime.torch_internals.modules import AnyBatchNorm
from meshwright.strategy import Strategy

_OWN_BUCKETS = "FSDP2 gathers and reduces one block of the model at a time"


class DPPluginBase(Plugin):
    """Base of the plugins of this module, by ColossalAI's name."""


@dataclass(frozen=True, eq=False, repr=False)
class LowLevelZeroPlugin(LossScaleArguments, DPPluginBase):
    """Optimizer states (stage 1) and gradients (stage 2) sharded, with fp32 master weights. Seed: ColossalAI.

    Stage 1 is the method zero1, stage 2 is zero2; ``extra_dp_size`` is the number of replicas, each sharded.
    ``cpu_offload`` is the method offload: it keeps states and fp32 master weights in host memory.
    """

    stage: int = 1
    precision: str = "fp16"
    initial_scale: float = 2.0**32
    min_scale: float = 1.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    max_scale: float = 2.0**32
    max_norm: float = 0.0
    norm_type: float = 2.0
    reduce_bucket_size_in_m: int = inert(12, _OWN_BUCKETS)
    communication_dtype: torch.dtype | None = None
    overlap_communication: bool = inert(True, "communication overlaps with computation on CUDA")
    overlap_allgather: bool = inert(False, "weights of the next block are gathered while one computes")
    cpu_offload: bool = False
    master_weights: bool = True
    verbose: bool = inert(False, "there is nothing to tell; Meshwright's plan table is accelerate(verbose=True)")
    cast_inputs: bool = only(True, "inputs that are not cast to the model's precision", "cast inside the model instead")
    fp8_communication: bool = compressed()
    use_fp8: bool = False
    extra_dp_size: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "stage", self.stage, (1, 2))
        self.check_precision(self.precision)

    def strategy(self, world: int) -> Strategy:
        """Return zero1 or zero2 over the ranks of each replica."""
        mesh = mesh_of(self, world, {"data": self.extra_dp_size}, rest="zero")
        zero = (f"zero{self.stage}", zero_keys(self.communication_dtype))
        precision = self.precision_methods(self.precision, master_weights=self.master_weights)
        fp8 = in_fp8(self.use_fp8, self.fp8_communication, gathers=True)
        return self.with_methods([("parallel_mode", mesh), zero, *precision, *fp8, *offloaded(self.cpu_offload)])

    @property
    def clipping(self) -> tuple[float, float]:
        """``max_norm`` and ``norm_type``."""
        return self.max_norm, self.norm_type


def zero_keys(communication_dtype: torch.dtype | None) -> dict[str, Any]:
    """Return the config of a ZeRO method for gradients that are reduced in ``communication_dtype``."""
    return {} if communication_dtype is None else {"mixed_precision": {"reduce_dtype": communication_dtype}}


# --- ZeRO stage 3.

_NO_CHUNKS = "there are no chunks: FSDP2 gathers one block of the model at a time"
_AS_STATIC = " is 'static'; offload_optim_frac and offload_param_frac say what lives on the host, by default nothing"
_METHOD_OF_FRACTION = {1.0: "fsdp", 0.0: "zero2"}


@dataclass(frozen=True, eq=False, repr=False)
class GeminiPlugin(LossScaleArguments, DPPluginBase):
    """Weights, gradients and optimizer states sharded over the ranks: the method fsdp. Seed: ColossalAI.

    ``shard_param_frac=0`` keeps gathered weights through a step (zero2); ``strict_ddp_mode`` shards nothing.
    ``offload_optim_frac`` is the share of elements with states and master weights in host memory, where they are
    updated, ``offload_param_frac`` that of elements with weights there: the method offload. Nothing moves between
    device and host on its own.
    """

    chunk_config_dict: dict[Any, Any] | None = inert(None, _NO_CHUNKS)
    chunk_init_device: Any = inert(None, _NO_CHUNKS)
    placement_policy: str = near("static", _AS_STATIC)
    enable_gradient_accumulation: bool = inert(False, "gradients accumulate always, with no_sync")
    max_prefetch: int = inert(0, "the next block is always gathered ahead")
    shard_param_frac: float = 1.0
    offload_optim_frac: float = 0.0
    offload_param_frac: float = 0.0
    warmup_non_model_data_ratio: float = inert(0.8, _NO_CHUNKS)
    steady_cuda_cap_ratio: float = inert(0.9, _NO_CHUNKS)
    precision: str = "fp16"
    master_weights: bool = True
    pin_memory: bool = False
    force_outputs_fp32: bool = False
    strict_ddp_mode: bool = False
    search_range_m: int = inert(32, _NO_CHUNKS)
    hidden_dim: int | None = inert(None, _NO_CHUNKS)
    min_chunk_size_m: float = inert(32, _NO_CHUNKS)
    memstats: Any = inert(None, _NO_CHUNKS)
    gpu_margin_mem_ratio: float = inert(0.0, "offload_optim_frac says what is updated on the device")
    initial_scale: float = 2.0**16
    min_scale: float = 1.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    max_scale: float = 2.0**32
    max_norm: float = 0.0
    norm_type: float = 2.0
    tp_size: int = 1
    extra_dp_size: int = 1
    enable_all_optimization: bool = fused()
    enable_fused_normalization: bool = fused()
    enable_flash_attention: bool = fused()
    enable_sequence_parallelism: bool = only(False, "activations split along the sequence", "leave it out")
    enable_jit_fused: bool = fused()
    enable_async_reduce: bool = inert(True, "gradients are always reduced while backward goes on")
    use_fp8: bool = False
    verbose: bool = inert(False, "there is nothing to tell")
    fp8_communication: bool = compressed()
    enable_sequence_overlap: bool = sequence_overlap()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "placement_policy", self.placement_policy, ("static", "auto"))
        check_choice(self, "shard_param_frac", self.shard_param_frac, tuple(_METHOD_OF_FRACTION))
        self.check_precision(self.precision)
        Strategy(self._offloaded())  # checks the fractions

    def strategy(self, world: int) -> Strategy:
        """Return fsdp over the ranks of each replica, with tensor parallelism inside."""
        rest = "data" if self.strict_ddp_mode else "zero"
        sizes = {"tensor": self.tp_size, **({} if self.strict_ddp_mode else {"data": self.extra_dp_size})}
        methods: list[Any] = [("parallel_mode", mesh_of(self, world, sizes, rest))]
        methods += ["tensor_parallel"] if self.tp_size > 1 else []
        methods += [] if self.strict_ddp_mode else [_METHOD_OF_FRACTION[self.shard_param_frac]]
        precision = self.precision_methods(self.precision, master_weights=self.master_weights)
        fp8 = in_fp8(self.use_fp8, self.fp8_communication, gathers=not self.strict_ddp_mode)
        return self.with_methods([*methods, *precision, *fp8, *self._offloaded()])

    def _offloaded(self) -> list[Any]:
        if not (self.offload_optim_frac or self.offload_param_frac):
            return []
        # States of weights in host memory are always there, too.
        states = max(self.offload_optim_frac, self.offload_param_frac)
        keys = {"optimizer": states, "parameters": self.offload_param_frac, "pin_memory": self.pin_memory}
        return [("offload", keys)]

    def notices(self) -> list[str]:
        """Return the notices, also of ``pin_memory`` without offloading."""
        unused = self.pin_memory and not self._offloaded()
        return super().notices() + (
            ["GeminiPlugin: pin_memory changes nothing; nothing is offloaded"] if unused else []
        )

    @property
    def clipping(self) -> tuple[float, float]:
        """``max_norm`` and ``norm_type``."""
        return self.max_norm, self.norm_type

    @property
    def outputs_in_fp32(self) -> bool:
        """``force_outputs_fp32``."""
        return self.force_outputs_fp32


# --- DistributedDataParallel.


def ddp_options(
    broadcast_buffers: bool, bucket_cap_mb: float, find_unused_parameters: bool, static_graph: bool
) -> dict[str, Any]:
    """Return keyword arguments of DistributedDataParallel, without a default of which newer torch warns."""
    options = {
        "bucket_cap_mb": bucket_cap_mb,
        "find_unused_parameters": find_unused_parameters,
        "static_graph": static_graph,
    }
    return options if broadcast_buffers else {**options, "broadcast_buffers": False}


@dataclass(frozen=True, eq=False, repr=False)
class TorchDDPPlugin(DPPluginBase):
    """Data parallelism over all ranks; arguments are those of DistributedDataParallel. Seed: ColossalAI.

    BatchNorm becomes SyncBatchNorm on CUDA, as in ColossalAI. ``Booster(mixed_precision=)`` chooses the precision.
    """

    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = inert(False, "torch ignores it")
    gradient_as_bucket_view: bool = inert(False, "gradients are always views of the buckets, which saves a copy")
    static_graph: bool = False
    fp8_communication: bool = compressed()

    def strategy(self, world: int) -> Strategy:
        """Return data parallelism over all ranks."""
        fp8 = in_fp8(False, self.fp8_communication, gathers=False)
        return self.with_methods([("parallel_mode", {"data": world}), *fp8])

    @property
    def controls_precision(self) -> bool:
        """Return False: the Booster decides the precision."""
        return False

    @property
    def ddp_options(self) -> Mapping[str, Any]:
        """Keyword arguments of DistributedDataParallel."""
        return ddp_options(self.broadcast_buffers, self.bucket_cap_mb, self.find_unused_parameters, self.static_graph)

    def prepare_model(self, model: nn.Module, device: torch.device) -> list[str]:
        """Convert BatchNorm to SyncBatchNorm on CUDA, so that its statistics are those of all ranks' samples."""
        has_batch_norm = any(
            isinstance(part, AnyBatchNorm) and not isinstance(part, nn.SyncBatchNorm) for part in model.modules()
        )
        if not has_batch_norm or world_size() == 1:
            return []
        if device.type == "cuda" and not isinstance(model, AnyBatchNorm):
            nn.SyncBatchNorm.convert_sync_batchnorm(model)  # in place, with the same parameters
            return []
        return ["TorchDDPPlugin: BatchNorm keeps each rank's own statistics; SyncBatchNorm needs CUDA"]


# --- PyTorch's FSDP, version 2.

_FSDP1 = ("process_group", "auto_wrap_policy", "backward_prefetch", "ignored_modules", "param_init_fn")
_METHODS = {None: "fsdp", "FULL_SHARD": "fsdp", "SHARD_GRAD_OP": "zero2", "NO_SHARD": None}


@dataclass(frozen=True, eq=False, repr=False)
class TorchFSDPPlugin(DPPluginBase):
    """Fully sharded data parallelism. Arguments are those of FSDP1, as in ColossalAI; the engine is FSDP2.

    Args:
        sharding_strategy: A ``ShardingStrategy`` or its name: FULL_SHARD, SHARD_GRAD_OP or NO_SHARD.
        mixed_precision: With ``param_dtype``, ``reduce_dtype`` and ``buffer_dtype``, to which buffers are cast once;
            there is no loss scaling, so use bf16.
        cpu_offload: With ``offload_params=True``: parameters, gradients and states live in host memory (offload).
        sync_module_states: No effect: parameters are always taken over from rank 0 before sharding, and a notice says
            so where they differed.

    FSDP2 does not have the other arguments; the error of each says what to do instead.
    """

    process_group: Any = None
    sharding_strategy: Any = None
    cpu_offload: Any = None
    auto_wrap_policy: Any = None
    backward_prefetch: Any = None
    mixed_precision: Any = None
    ignored_modules: Any = None
    param_init_fn: Any = None
    sync_module_states: bool = False
    fp8_communication: bool = compressed()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "sharding_strategy", self._sharding(), tuple(_METHODS))
        keys = [*self._keys(), *(["cpu_offload"] if self._offloaded() else [])]
        if _METHODS[self._sharding()] is None and keys:
            raise ConfigError(
                f"{type(self).__name__}: NO_SHARD has no arguments",
                expected="nothing beside it",
                got=join_names(keys),
                fix="use TorchDDPPlugin, with Booster(mixed_precision=…) for a precision",
            )
        self.strategy(1)  # the method checks for arguments that FSDP2 does not have

    def _sharding(self) -> str | None:
        return getattr(self.sharding_strategy, "name", self.sharding_strategy)

    def _keys(self) -> dict[str, Any]:
        """Return the config of the sharding method, from the arguments that were given."""
        keys = {name: value for name in _FSDP1 if (value := getattr(self, name)) is not None}
        if self.mixed_precision is not None:
            dtypes = ("param_dtype", "reduce_dtype")
            keys["mixed_precision"] = {name: getattr(self.mixed_precision, name) for name in dtypes}
        return keys

    def strategy(self, world: int) -> Strategy:
        """Return fsdp, zero2 or data parallelism over all ranks."""
        method = _METHODS[self._sharding()]
        methods = [] if method is None else [(method, self._keys())]
        fp8 = in_fp8(False, self.fp8_communication, gathers=method is not None)
        return self.with_methods([("parallel_mode", {"data": world}), *methods, *fp8, *self._offloaded()])

    @property
    def buffer_dtype(self) -> torch.dtype | None:
        """``mixed_precision.buffer_dtype``."""
        return getattr(self.mixed_precision, "buffer_dtype", None)

    def _offloaded(self) -> list[Any]:
        offloads = getattr(self.cpu_offload, "offload_params", bool(self.cpu_offload))
        return [("offload", {"parameters": 1.0})] if offloads else []
