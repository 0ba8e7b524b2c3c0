"""A published run as it can be simulated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.cost import Cluster, Step
from meshwright.planner.family_ops import FamilyRun
from meshwright.planner.family_shape import Shape
from meshwright.planner.published.convention import Convention
from meshwright.planner.published.rows import Row
from meshwright.strategy import Strategy


@dataclass(frozen=True)
class Case:
    """A published run as it can be simulated."""

    row: Row
    convention: Convention
    shape: Shape
    run: FamilyRun
    cluster: Cluster
    strategy: Strategy
    zero_stage: int
    steps: tuple[Step, ...]  # of the pipeline's ranks; one without
    global_batch: int
    assumed: tuple[str, ...]

    @property
    def tokens_per_step(self) -> int:
        """Over all devices."""
        return self.global_batch * self.shape.seq

    @property
    def in_turn(self) -> bool:
        """Whether gradients are reduced behind backward, and not beside it."""
        beside = self.convention.reduces_beside
        return self.zero_stage < 2 and (not beside or (self.convention.reduces_each and self.zero_stage == 1))

    @property
    def setting(self) -> tuple[Any, ...]:
        """The model and the cluster: runs of one setting differ by strategy."""
        return (self.row.source, self.row.text("model"), self.shape.seq, self.row.text("gpu"), self.cluster.num_devices)
