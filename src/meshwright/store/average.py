"""The moving average of the weights in a checkpoint: ``average.NAME`` beside ``model.NAME``, for any layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from meshwright.errors import CheckpointError, join_names
from meshwright.optim import WeightAverage
from meshwright.store.record import Record

_COUNTS = ("num_steps", "num_updates")


def average_tensors(average: WeightAverage | None, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Live averages by stored name.

    Args:
        average: None where none is kept.
        weights: The tensors that the optimizer updates, by model name.
    """
    if average is None:
        return {}
    return {f"average.{name}": average.of[tensor] for name, tensor in weights.items() if tensor in average.of}


def average_counts(average: WeightAverage | None) -> dict[str, int] | None:
    """The numbers of an average, for the record."""
    return None if average is None else {name: getattr(average, name) for name in _COUNTS}


@dataclass(frozen=True)
class AveragePlan:
    """What loading will do to an average; nothing is changed until :meth:`commit`."""

    average: WeightAverage | None
    targets: dict[str, torch.Tensor]
    """Tensors to be filled before ``commit``, by stored name."""
    counts: Mapping[str, int] | None
    """None: the checkpoint holds no average, and a new one begins with the weights it holds."""

    def commit(self) -> None:
        """Takes over the numbers."""
        if self.average is None:
            return
        if self.counts is None:
            self.average.restart()
            return
        self.average.num_steps, self.average.num_updates = (int(self.counts[name]) for name in _COUNTS)


def plan_average(average: WeightAverage | None, weights: Mapping[str, torch.Tensor], record: Record) -> AveragePlan:
    """Checks that a stored average fits this one, and lists the tensors to fill.

    Raises:
        CheckpointError: When it lacks weights that train here.
    """
    if average is None or record.average is None:
        return AveragePlan(average, {}, None)
    targets = average_tensors(average, weights)
    missing = sorted(name for name in targets if name not in record.tensors)
    if missing:
        raise CheckpointError(
            "The checkpoint does not average the same weights",
            expected=f"averages of {len(targets)} parameters that train",
            got=f"missing: {join_names(missing)}",
            fix="freeze parameters as before, or leave ema out of the strategy to begin without it",
        )
    return AveragePlan(average, targets, record.average)
