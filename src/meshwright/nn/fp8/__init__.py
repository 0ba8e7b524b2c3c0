"""Linear layers whose three matrix products run in 8 bits with delayed scaling (Micikevicius et al. 2022)."""

from meshwright.nn.fp8.linear import BUFFERS, Fp8Linear, Fp8Options, is_scaling_state, to_fp8, to_plain
from meshwright.nn.fp8.recipe import DelayedScaling
from meshwright.nn.fp8.scales import update_scales

__all__ = [
    "BUFFERS",
    "DelayedScaling",
    "Fp8Linear",
    "Fp8Options",
    "is_scaling_state",
    "to_fp8",
    "to_plain",
    "update_scales",
]
