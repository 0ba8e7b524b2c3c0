"""GaLore: AdamW with moments in the space of the gradients' leading singular vectors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.optim.adam.rule import AdamRule
from meshwright.optim.eight_bit import QUANTISATION, AdamW8bit
from meshwright.optim.galore.base import GaLoreMoments


class GaLoreAdamW(GaLoreMoments):
    """GaLore (Zhao et al. 2024, arXiv 2403.03507) with AdamW's moments in fp32, right on any layout.

    Groups with a ``rank`` are projected. With P the leading singular vectors of the gradient G of every
    ``update_proj_gap``-th step, and m and v the moments of R = G·P (of Pᵀ·G, where that is smaller)::

        p += scale · (N·Pᵀ)        N = −lr · √(1 − β₂ᵗ) / (1 − β₁ᵗ) · m / (√v + eps)        p -= lr · weight_decay · p

    The order is that of ``galore_torch.GaLoreAdamW``; the moments stay as they are when P changes. For P one rank per
    matrix gathers the gradient, and the work is spread over all ranks; else nothing is sent but R, where the
    contracted dim is split: one all-reduce per mesh axis and step. When singular vectors cannot be computed (a gradient
    is not finite), the old ones stay.

    Args:
        params: Parameters or groups of them, plain or DTensors, as :func:`get_galore_param_groups` makes them. Keys of
            projected groups: ``rank``; ``update_proj_gap`` = 200; ``scale`` = 0.25; ``proj_type`` = ``"std"``
            (contracts the shorter dim), ``"reverse_std"``, ``"right"``, ``"left"`` or ``"full"`` (both sides);
            ``svd`` = ``"exact"`` or ``"randomised"`` (cheaper by min(H, W) / rank, nearly as good, the same on all
            ranks). Stacks of matrices (experts, shape (E, H, W)) are projected matrix by matrix.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Added to √v.
        weight_decay: Applied after the step, with the whole learning rate.
        correct_bias: False leaves the factor of t out.
        half_update: See :class:`~meshwright.optim.sharded.ShardedOptimizer`.

    Raises:
        ConfigError: When a hyperparameter is out of range.
        ModelError: For parameters of other types than fp32, fp16 and bf16, and matrices smaller than the rank.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
        *,
        half_update: str = "master",
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "correct_bias": correct_bias,
            "half_update": half_update,
        }
        super().__init__(params, {**defaults, **QUANTISATION})

    def rule(self, group: dict[str, Any], step: int) -> AdamRule:
        """The step with eps beside the uncorrected √v; with lr as it is, where nothing is to be corrected."""
        rule = replace(super().rule(group, step), eps=float(group["eps"]))
        return rule if group["correct_bias"] else replace(rule, lr=float(group["lr"]))


class GaLoreAdamW8bit(GaLoreMoments, AdamW8bit):
    """:class:`GaLoreAdamW` with moments in 8 bits, as :class:`~meshwright.optim.eight_bit.AdamW8bit` keeps them.

    As in the kernels of bitsandbytes, eps stands beside the corrected √v̂. Projectors stay in fp32. The size that
    ``min_8bit_size`` is compared with, and the norm of ``percentile_clipping``, are those of projected gradients.

    Args and errors: those of :class:`~meshwright.optim.eight_bit.AdamW8bit` and, for groups, :class:`GaLoreAdamW`.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
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
        super().__init__(
            params, lr, betas, eps, weight_decay, nbits, min_8bit_size, percentile_clipping, block_wise, is_paged, args,
            half_update=half_update,
        )  # fmt: skip


class DistGaloreAdamW(GaLoreAdamW8bit):
    """:class:`GaLoreAdamW8bit` under ColossalAI's name for its distributed form; here both are the same optimizer."""


class DistGaloreAwamW(DistGaloreAdamW):
    """:class:`DistGaloreAdamW` in ColossalAI's spelling."""
