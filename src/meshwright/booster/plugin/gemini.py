"""``GeminiPlugin``: ZeRO stage 3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.booster.plugin.base import inert, only
from meshwright.booster.plugin.options import (
    LossScaleArguments,
    check_choice,
    compressed,
    fused,
    in_fp8,
    mesh_of,
    sequence_overlap,
)
from meshwright.strategy import Strategy

_NO_CHUNKS = "there are no chunks: FSDP2 gathers one block of the model at a time"
_OFFLOAD = "use 'static', and say with offload_optim_frac and offload_param_frac what lives on the host"
_METHOD_OF_FRACTION = {1.0: "fsdp", 0.0: "zero2"}


@dataclass(frozen=True, eq=False, repr=False)
class GeminiPlugin(LossScaleArguments):
    """Weights, gradients and optimizer states sharded over the ranks: the method fsdp. Seed: ColossalAI.

    ``shard_param_frac=0`` keeps gathered weights through a step (zero2); ``strict_ddp_mode`` shards nothing.
    ``offload_optim_frac`` of the elements have their states and master weights in host memory and are updated there,
    ``offload_param_frac`` live there themselves: the method offload. Nothing moves between the two on its own.
    """

    chunk_config_dict: dict[Any, Any] | None = inert(None, _NO_CHUNKS)
    chunk_init_device: Any = inert(None, _NO_CHUNKS)
    placement_policy: str = only("static", "tensors that move between device and host", _OFFLOAD)
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
        check_choice(self, "shard_param_frac", self.shard_param_frac, tuple(_METHOD_OF_FRACTION))
        self.check_precision(self.precision)
        Strategy(self._offloaded())  # refuses fractions that are none

    def strategy(self, world: int) -> Strategy:
        """fsdp over the ranks of each replica; tensor parallelism inside."""
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
        states = max(self.offload_optim_frac, self.offload_param_frac)  # of weights on the host they are there
        keys = {"optimizer": states, "parameters": self.offload_param_frac, "pin_memory": self.pin_memory}
        return [("offload", keys)]

    def notices(self) -> list[str]:
        """Also of memory that nothing is pinned in."""
        alone = self.pin_memory and not self._offloaded()
        return super().notices() + (["GeminiPlugin: pin_memory changes nothing; nothing is offloaded"] if alone else [])

    @property
    def clipping(self) -> tuple[float, float]:
        """As given."""
        return self.max_norm, self.norm_type

    @property
    def outputs_in_fp32(self) -> bool:
        """``force_outputs_fp32``."""
        return self.force_outputs_fp32
