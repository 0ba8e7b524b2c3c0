"""Saving and loading an OptimManager."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshwright.errors import CheckpointError
from meshwright.optim.loss_scale import LossScale
from meshwright.optim.whole_state import gathered_state_dict, laid_out_like, load_laid_out

if TYPE_CHECKING:
    from meshwright.optim.manager import OptimManager


def manager_state(manager: OptimManager, scale: LossScale, gather_opt: bool) -> dict[str, Any]:
    """The loss scale's entries, ``optimizers`` and ``lr_schedulers``, in the order in which they were added."""
    optimizers = [gathered_state_dict(o) if gather_opt else o.state_dict() for o in manager.optimizers]
    schedulers = [scheduler.state_dict() if scheduler is not None else None for scheduler in manager.lr_schedulers]
    return {**scale.state_dict(), "optimizers": optimizers, "lr_schedulers": schedulers}


def load_manager_state(manager: OptimManager, scale: LossScale, state: dict[str, Any]) -> None:
    """Loads all parts, after all were checked and laid out.

    Raises:
        CheckpointError: When the parts are not those of this manager; it is unchanged then.
    """
    _check_parts(manager, state)
    laid_out = [laid_out_like(o, saved) for o, saved in zip(manager.optimizers, state["optimizers"], strict=True)]
    scale.load_state_dict(state)
    for optimizer, saved in zip(manager.optimizers, laid_out, strict=True):
        load_laid_out(optimizer, saved)
    for scheduler, saved in zip(manager.lr_schedulers, state["lr_schedulers"], strict=True):
        if scheduler is not None:
            scheduler.load_state_dict(saved)


def _check_parts(manager: OptimManager, state: dict[str, Any]) -> None:
    missing = sorted({"loss_scale", "loss_scale_enabled", "optimizers", "lr_schedulers"} - state.keys())
    here = [scheduler is not None for scheduler in manager.lr_schedulers]
    saved = [] if missing else [scheduler is not None for scheduler in state["lr_schedulers"]]
    if missing or len(state["optimizers"]) != len(manager.optimizers) or saved != here:
        raise CheckpointError(
            "The saved state is not of this manager",
            expected=f"{len(here)} optimizers, with schedulers: {here}",
            got=f"entries missing: {missing}" if missing else f"{len(saved)} optimizers, with schedulers: {saved}",
            fix="add the same optimizers and schedulers in the same order before loading",
        )
