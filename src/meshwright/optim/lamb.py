"""LAMB: Adam with steps scaled layer by layer to the size of the weights, for very large batches."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

from meshwright.optim.adam.adam_rule import UNCORRECTED, AdamRule
from meshwright.optim.sharded import (
    Chunk,
    Kept,
    Layout,
    ShardedOptimizer,
    Sum,
    TensorList,
    Update,
    bad_value,
    check_at_least_zero,
    check_betas,
)

BiasCorrection = Literal["paper", "lr"] | bool


class Lamb(ShardedOptimizer):
    """LAMB (You et al. 2020, arXiv 1904.00962, Algorithm 2), right on any layout; one all-reduce a step.

    For every parameter (a "layer"), with moments m and v of the gradient::

        u = m̂ / (√v̂ + eps) + weight_decay · p        p -= lr · (‖p‖ / ‖u‖) · u

    and the ratio is 1 where either norm is 0.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate.
        betas: Decay rates of m and v.
        eps: Added to √v̂.
        weight_decay: Decoupled from the moments, part of u.
        adam: Leave the ratio out (ColossalAI's switch): AdamW without its scaling of the decay.
        bias_correction: ``"paper"`` (or True) divides m and v by 1 − βᵗ. ``"lr"`` scales lr by √(1 − β₂ᵗ) / (1 − β₁ᵗ)
            instead, as ColossalAI does: the ratio does not depend on the scale of u, so early steps are shorter than
            the paper's. False corrects nothing, the default of ColossalAI's plain ``Lamb``.
        per_matrix: For stacked weights of 3 and more dims (experts ``(E, H, W)``): one ratio for each matrix of the
            last two dims instead of one for the whole stack.
        half_update: See :class:`~meshwright.optim.sharded.ShardedOptimizer`.

    Raises:
        ConfigError: When a hyperparameter is out of range.
        ModelError: For parameters that are not fp32, fp16 or bf16.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        adam: bool = False,
        bias_correction: BiasCorrection = "paper",
        *,
        per_matrix: bool = False,
        half_update: str = "master",
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adam": adam,
            "bias_correction": bias_correction,
            "per_matrix": per_matrix,
            "half_update": half_update,
        }
        super().__init__(params, defaults)

    def check_group(self, group: dict[str, Any]) -> None:
        """Refuse numbers out of range.

        Raises:
            ConfigError: Naming the hyperparameter.
        """
        check_at_least_zero(group, "lr", "eps", "weight_decay")
        check_betas(group, 2)
        if group["bias_correction"] not in ("paper", "lr", True, False):
            raise bad_value("bias_correction", group["bias_correction"], "'paper', 'lr', True or False")

    def kept_states(self, layout: Layout, group: dict[str, Any]) -> dict[str, Kept]:
        """Return two moments in the parameter's shape, fp32."""
        whole = Kept(layout.shape, tuple(range(layout.ndim)))
        return {"exp_avg": whole, "exp_avg_sq": whole}

    def update(self, chunk: Chunk) -> Update:
        """Update a chunk, asking for both norms of every parameter."""
        group, weights = chunk.group, chunk.weights
        direction = _adam_direction(chunk)
        if group["adam"]:
            weights.add_(direction, alpha=-_learning_rate(group, chunk.step))
            return
        if group["per_matrix"] and chunk.layout.ndim > 2:
            over = (-2, -1)
            squares = [Sum(part.map(_matrix_squares), over) for part in (weights, direction)]
            weight_squares, update_squares = yield squares
            ratios = weight_squares.map(lambda p, u: _ratio(p, u)[..., None, None], update_squares)
        else:
            weight_squares, update_squares = yield [Sum(weights.squares()), Sum(direction.squares())]
            ratios = _ratio(weight_squares, update_squares)
        weights.addcmul_(direction, ratios, value=-_learning_rate(group, chunk.step))


def _adam_direction(chunk: Chunk) -> TensorList:
    """Return u = m̂ / (√v̂ + eps) + weight_decay · p: torch's fused Adam moves weight_decay · p by a step of −1."""
    group = chunk.group
    beta1, beta2 = group["betas"]
    rule = AdamRule(lr=-1.0, beta1=float(beta1), beta2=float(beta2), eps=group["eps"])
    # The kernel goes through memory: all tensors must have one layout, that of the states.
    direction = (chunk.weights * group["weight_decay"]).contiguous()
    step = chunk.step if group["bias_correction"] in ("paper", True) else UNCORRECTED
    moments = (chunk.states["exp_avg"].tensors, chunk.states["exp_avg_sq"].tensors)
    rule.update(direction.tensors, chunk.gradients.contiguous().tensors, *moments, step, scale=1.0)
    return direction


def _learning_rate(group: Any, step: int) -> float:
    lr = float(group["lr"])
    if group["bias_correction"] != "lr":
        return lr
    beta1, beta2 = group["betas"]
    return lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)


def _ratio(weight_squares: torch.Tensor, update_squares: torch.Tensor) -> torch.Tensor:
    """Return ‖p‖ / ‖u‖ from their squares; 1 where either is 0."""
    usable = (weight_squares > 0) & (update_squares > 0)
    return torch.where(usable, (weight_squares / update_squares).sqrt(), 1.0)


def _matrix_squares(stack: torch.Tensor) -> torch.Tensor:
    return stack.square().sum((-2, -1))
