"""Saving and loading an OptimManager."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from meshwright.errors import CheckpointError
from meshwright.optim.manager.loss_scale import LossScale
from meshwright.optim.part_state import gathered_state_dict, laid_out_like
from meshwright.optim.whole_state import load_laid_out


def manager_state(
    optimizers: Sequence[Optimizer], lr_schedulers: Sequence[Any], scale: LossScale, gather_opt: bool
) -> dict[str, Any]:
    """The loss scale's entries, ``optimizers`` and ``lr_schedulers``, in the order in which they were added."""
    states = [gathered_state_dict(o) if gather_opt else o.state_dict() for o in optimizers]
    schedules = [scheduler.state_dict() if scheduler is not None else None for scheduler in lr_schedulers]
    return {**scale.state_dict(), "optimizers": states, "lr_schedulers": schedules}


def load_manager_state(
    optimizers: Sequence[Optimizer], lr_schedulers: Sequence[Any], scale: LossScale, state: dict[str, Any]
) -> None:
    """Loads all parts, after all were checked and laid out.

    Raises:
        CheckpointError: When the parts are not those of this manager; it is unchanged then.
    """
    _check_parts(len(optimizers), [scheduler is not None for scheduler in lr_schedulers], state)
    laid_out = [laid_out_like(o, saved) for o, saved in zip(optimizers, state["optimizers"], strict=True)]
    scale.load_state_dict(state)
    for optimizer, saved in zip(optimizers, laid_out, strict=True):
        load_laid_out(optimizer, saved)
    for scheduler, saved in zip(lr_schedulers, state["lr_schedulers"], strict=True):
        if scheduler is not None:
            scheduler.load_state_dict(saved)


def _check_parts(num_optimizers: int, here: list[bool], state: dict[str, Any]) -> None:
    missing = sorted({"loss_scale", "loss_scale_enabled", "optimizers", "lr_schedulers"} - state.keys())
    saved = [] if missing else [scheduler is not None for scheduler in state["lr_schedulers"]]
    if missing or len(state["optimizers"]) != num_optimizers or saved != here:
        raise CheckpointError(
            "The saved state is not of this manager",
            expected=f"{len(here)} optimizers, with schedulers: {here}",
            got=f"entries missing: {missing}" if missing else f"{len(saved)} optimizers, with schedulers: {saved}",
            fix="add the same optimizers and schedulers in the same order before loading",
        )
