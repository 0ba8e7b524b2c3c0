"""An OptimManager over outer optimizers: every replica decides for itself, and all count alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from meshwright.optim.layouts import Peers
from meshwright.optim.outer import OuterOptimizer


def prepare_gradients(optimizers: Iterable[Optimizer]) -> None:
    """Averages gradients over replicas where a synchronous warm-up asks for it."""
    for optimizer in optimizers:
        if isinstance(optimizer, OuterOptimizer):
            optimizer.prepare_gradients()


def peers_of(optimizers: Iterable[Optimizer]) -> Peers | None:
    """The ranks that decide together: those of one replica where there are replicas, None for the world."""
    outer = next((each for each in optimizers if isinstance(each, OuterOptimizer)), None)
    return None if outer is None else Peers(outer.replicas.inside, outer.replicas.num_inside)


def count_skipped(optimizer: Optimizer, scheduler: Any) -> None:
    """A step that this replica skips and others take: counts and learning rates must not drift apart."""
    if isinstance(optimizer, OuterOptimizer):
        optimizer.count_step()
        if scheduler is not None:
            scheduler.step()
