"""AdamW with moments in 8 bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.optim.eight_bit.base import MomentAdamW

_READ_FROM_ARGS = {
    "nbits": ("optim_bits", "nbits"),
    "min_8bit_size": ("min_8bit_size",),
    "percentile_clipping": ("percentile_clipping",),
    "block_wise": ("block_wise",),
}


class AdamW8bit(MomentAdamW):
    """AdamW whose moments are kept in 8 bits (Dettmers et al. 2022, arXiv 2110.02861), equal on any layout.

    A byte stands for one of 256 numbers from −1 to 1 (0 to 1 for second moments), close together near 0; blocks of up
    to 256 elements of a row share an fp32 scale, their largest absolute value. Moments take 2.03 bytes per element
    instead of 8; rows shorter than 256 elements have a scale each and take more. Blocks never depend on the layout: a
    model trains to the same weights on one process and on many, and its states move between them.

    Unlike in bitsandbytes a second moment above 0 is never rounded to 0, which would divide the next step by eps.

    Args:
        params: Parameters or groups of them, plain or DTensors.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Added to √v̂.
        weight_decay: p -= lr · weight_decay · p, after the step.
        nbits: 8, or 32 for moments in fp32.
        min_8bit_size: Moments of fewer elements, on all ranks together, stay in fp32.
        percentile_clipping: Below 100: a gradient is scaled down to the norm below which so many percent of its own
            last 100 norms were. 100 clips nothing.
        block_wise: False for one scale per tensor.
        is_paged: Moments are kept in host memory (pinned) and visit the device batch by batch; a step then ends by
            waiting for the copies. On a CPU there is nothing to do.
        args: An object or mapping with any of ``optim_bits`` (or ``nbits``), ``min_8bit_size``,
            ``percentile_clipping`` and ``block_wise``: they override the arguments, as in bitsandbytes.
        half_update: See :class:`~meshwright.optim.sharded.ShardedOptimizer`.

    Raises:
        ConfigError: When a hyperparameter is out of range.
        ModelError: For parameters that are not fp32, fp16 or bf16.
    """

    states_can_be_averaged = False  # codes of different scales

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        nbits: int = 8,
        min_8bit_size: int = 4096,
        percentile_clipping: int = 100,
        block_wise: bool = True,
        is_paged: bool = False,
        args: Any = None,
        *,
        half_update: str = "master",
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "nbits": nbits,
            "min_8bit_size": min_8bit_size,
            "percentile_clipping": percentile_clipping,
            "block_wise": block_wise,
            "is_paged": is_paged,
            "half_update": half_update,
        }
        super().__init__(params, {**defaults, **_overrides(args)})


def _overrides(args: Any) -> dict[str, Any]:
    """What bitsandbytes reads from ``args``."""
    values = args if isinstance(args, Mapping) else vars(args) if args is not None else {}
    return {key: values[name] for key, names in _READ_FROM_ARGS.items() for name in names if name in values}
