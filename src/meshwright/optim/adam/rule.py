"""The arithmetic of one Adam step on plain tensors: torch's fused kernels, and the rules of weight decay by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch.optim.adam import adam

WeightDecayRule = Literal["decoupled", "coupled", "bmtrain"]
WEIGHT_DECAY_RULES: tuple[str, ...] = get_args(WeightDecayRule)

_FUSED_DEVICES = ("cpu", "cuda")


def is_decoupled(rule: str, dtype: torch.dtype) -> bool:
    """Whether weight decay bypasses the moments for parameters of this type.

    ``"decoupled"`` is AdamW (Loshchilov and Hutter 2019, Algorithm 2), ``"coupled"`` is L2 regularisation as in Adam
    (Kingma and Ba 2015), ``"bmtrain"`` is what BMTrain does: decoupled for half precision, coupled for fp32.
    """
    return rule == "decoupled" or (rule == "bmtrain" and dtype != torch.float32)


@dataclass(frozen=True)
class AdamRule:
    """The hyperparameters of one group for parameters of one type."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool
    hold_steps: int

    @classmethod
    def of(cls, group: Mapping[str, Any], dtype: torch.dtype) -> AdamRule:
        """Reads a parameter group; tensors among its values are read to the host."""
        beta1, beta2 = group["betas"]
        return cls(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=is_decoupled(group["weight_decay_rule"], dtype),
            maximize=group["maximize"],
            hold_steps=group["hold_steps"],
        )

    def update(
        self,
        weights: list[torch.Tensor],
        gradients: list[torch.Tensor],
        exp_avgs: list[torch.Tensor],
        exp_avg_sqs: list[torch.Tensor],
        step: int,
        scale: float,
    ) -> None:
        """Moves fp32 weights and moments by one step, in place.

        Args:
            weights: Dense fp32 tensors of one device.
            gradients: Laid out like the weights; left divided by ``scale``.
            exp_avgs: First moments.
            exp_avg_sqs: Second moments.
            step: Number of this step for these weights, from 1.
            scale: What the gradients are multiplied by.
        """
        device = weights[0].device
        # Zero and not a skipped step: the moments go on.
        lr = 0.0 if step <= self.hold_steps else self.lr
        if device.type not in _FUSED_DEVICES:
            self._update_unfused(weights, gradients, exp_avgs, exp_avg_sqs, step, scale, lr)
            return
        kernel = torch._fused_adamw_ if self.decoupled else torch._fused_adam_
        # One tensor for all: the kernels read the step number and leave it as it is.
        steps = [torch.full((), float(step), dtype=torch.float32, device=device)] * len(weights)
        kernel(
            weights,
            gradients,
            exp_avgs,
            exp_avg_sqs,
            [],
            steps,
            lr=lr,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=self.weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=self.maximize,
            grad_scale=torch.full((), scale, dtype=torch.float32, device=device) if scale != 1.0 else None,
            found_inf=None,
        )

    def _update_unfused(
        self,
        weights: list[torch.Tensor],
        gradients: list[torch.Tensor],
        exp_avgs: list[torch.Tensor],
        exp_avg_sqs: list[torch.Tensor],
        step: int,
        scale: float,
        lr: float,
    ) -> None:
        if scale != 1.0:
            torch._foreach_div_(gradients, scale)
        adam(
            weights,
            gradients,
            exp_avgs,
            exp_avg_sqs,
            [],
            [torch.tensor(float(step - 1), dtype=torch.float32) for _ in weights],
            foreach=True,
            decoupled_weight_decay=self.decoupled,
            amsgrad=False,
            beta1=self.beta1,
            beta2=self.beta2,
            lr=lr,
            weight_decay=self.weight_decay,
            eps=self.eps,
            maximize=self.maximize,
        )

    def delta(self, weight: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, step: int) -> torch.Tensor:
        """The direction of a step: m̂ / (√v̂ + eps), plus weight_decay · w where decay is decoupled (BMTrain's delta).

        Args:
            weight: Before the step.
            exp_avg: First moment after the step.
            exp_avg_sq: Second moment after the step.
            step: Number of the step, from 1.
        """
        mean = exp_avg / (1 - self.beta1**step)
        delta = mean / ((exp_avg_sq / (1 - self.beta2**step)).sqrt_() + self.eps)
        return delta.add_(weight, alpha=self.weight_decay) if self.decoupled and self.weight_decay else delta
