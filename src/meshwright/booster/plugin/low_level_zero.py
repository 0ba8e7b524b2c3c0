"""``LowLevelZeroPlugin``: ZeRO stages 1 and 2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from meshwright.booster.plugin.base import inert, only
from meshwright.booster.plugin.options import LossScaleArguments, check_choice, compressed, in_fp8, mesh_of, offloaded
from meshwright.strategy import Strategy

_OWN_BUCKETS = "FSDP2 gathers and reduces one block of the model at a time"


@dataclass(frozen=True, eq=False, repr=False)
class LowLevelZeroPlugin(LossScaleArguments):
    """Sharded optimizer states (stage 1), and gradients (stage 2), with fp32 master weights. Seed: ColossalAI.

    Stage 1 is the method zero1, stage 2 is zero2; ``extra_dp_size`` replicates over that many groups of ranks.
    ``cpu_offload`` keeps states and fp32 master weights in host memory and updates there: the method offload.
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
        """zero1 or zero2 over all ranks, or over the ranks of each replica."""
        mesh = mesh_of(self, world, {"data": self.extra_dp_size}, rest="zero")
        zero = (f"zero{self.stage}", zero_keys(self.communication_dtype))
        precision = self.precision_methods(self.precision, master_weights=self.master_weights)
        fp8 = in_fp8(self.use_fp8, self.fp8_communication, gathers=True)
        return self.with_methods([("parallel_mode", mesh), zero, *precision, *fp8, *offloaded(self.cpu_offload)])

    @property
    def clipping(self) -> tuple[float, float]:
        """As given."""
        return self.max_norm, self.norm_type


def zero_keys(communication_dtype: torch.dtype | None) -> dict[str, Any]:
    """The keys of a ZeRO method that reduces gradients in a precision of its own; none for None."""
    return {} if communication_dtype is None else {"mixed_precision": {"reduce_dtype": communication_dtype}}
