"""Meshwright: the variant is a strategy, or ``auto`` for the one that the planner chooses."""

from __future__ import annotations

from typing import Any

import torch

# user:
import meshwright as mw

# end
from peers.case import Case, Step, loss_func

_STRATEGIES: dict[str, list[Any]] = {"data": [], "zero1": ["zero1"], "zero2": ["zero2"], "fsdp": ["fsdp"]}
_FEATURES: dict[str, list[Any]] = {
    "plain": [],
    "compile": ["compile"],
    "fp8": ["fp8", "compile"],
    "offload": [("offload", "optimizer")],
}


def setup(case: Case, variant: str) -> Step:
    fixed = [("amp_native", "bf16")] if case.precision == "bf16" else []
    fixed += _FEATURES[case.feature]
    # user:
    job = mw.accelerate(
        case.build(),
        torch.optim.AdamW,
        loss_func=loss_func,
        strategy=None if variant == "auto" else _STRATEGIES[variant] + fixed,
        included=[name if isinstance(name, str) else name[0] for name in fixed] if variant == "auto" else (),
        optim_args=case.optim,
        max_grad_norm=case.max_norm,
        sample_batch=torch.zeros(case.batch, case.seq_len, dtype=torch.long),
    )

    def step(ids: torch.Tensor) -> torch.Tensor:
        return job.step(ids).loss

    # end
    step.strategy = str(job.strategy)  # type: ignore[attr-defined]
    return step
