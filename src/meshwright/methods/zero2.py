"""``zero2``: optimizer states and gradients are sharded (ZeRO stage 2). Seed: ATorch."""

from __future__ import annotations

from typing import ClassVar

from meshwright.cost import Step
from meshwright.methods.base import Phase
from meshwright.methods.job import Job
from meshwright.methods.law import Conflict
from meshwright.methods.zero.config import ZeroMethod, not_beside
from meshwright.methods.zero.cost import shard_cost
from meshwright.methods.zero.engine import shard
from meshwright.methods.zero.units import units_of


class Zero2(ZeroMethod):
    """Weights are gathered once per step and kept through backward; gradients are reduced as they come.

    FSDP's SHARD_GRAD_OP.
    """

    method_name: ClassVar[str] = "zero2"
    phase: ClassVar[Phase] = Phase.SHARD
    summary: ClassVar[str] = "shards gradients and optimizer states; weights stay whole through a step"
    effect: ClassVar[str] = (
        "memory: gradients, optimizer states / n. Communication: one gather, one reduction per micro-batch"
    )
    seed_name: ClassVar[str | None] = "ATorch: zero2"
    conflicts: ClassVar[tuple[Conflict, ...]] = not_beside("fsdp")

    def check(self, job: Job) -> None:
        """Refuses models that FSDP2 cannot shard."""
        units_of(self, job.model, job.strategy, dict(job.axes))

    def apply(self, job: Job) -> None:
        """Shards with FSDP2; parameters stay gathered until the last backward."""
        shard(self, job, reshard_after_forward=False, reduce_once=False)

    def cost(self, step: Step) -> Step:
        """One gather per step, one reduction per micro-batch."""
        return shard_cost(self, step, gathers="once", reduce_once=False)
