"""Mean and variance of the update's direction over all parameters of all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from meshwright.optim.held import held_of
from meshwright.optim.layouts import num_replicas, reduced


class DeltaMoments:
    """Sums of values and of their squares in fp64; a shard that several ranks hold counts once."""

    def __init__(self) -> None:
        self._sums: list[torch.Tensor] = []  # per piece: sum, sum of squares, count
        self._total: torch.Tensor | None = None

    def restart(self) -> None:
        """Forgets the step before."""
        self._sums, self._total = [], None

    def add(self, parameter: torch.Tensor, values: torch.Tensor) -> None:
        """Counts the values of a piece of one parameter."""
        wide = values.double()
        count = torch.full((), float(values.numel()), dtype=torch.float64, device=values.device)
        replicas = num_replicas(parameter, held=held_of(parameter))
        self._sums.append(torch.stack([wide.sum(), wide.square().sum(), count]) / replicas)

    def reduce(self) -> None:
        """Sums over ranks: one all-reduce of three numbers, on every rank, whatever it holds itself."""
        device = self._sums[0].device if self._sums else torch.device("cpu")
        total = torch.zeros(3, dtype=torch.float64, device=device)
        for part in self._sums:
            total += part.to(device)
        self._total = reduced(total, dist.ReduceOp.SUM)

    @property
    def mean(self) -> float:
        """Mean of the last step; nan before the first."""
        total, _, count = self._read()
        return total / count if count else float("nan")

    @property
    def variance(self) -> float:
        """Population variance of the last step; nan before the first."""
        total, squares, count = self._read()
        return max(squares / count - (total / count) ** 2, 0.0) if count else float("nan")

    def _read(self) -> list[float]:
        return self._total.tolist() if self._total is not None else [0.0, 0.0, 0.0]
