"""``zero1``: optimizer states are sharded (ZeRO stage 1, Rajbhandari et al. 2020). Seed: ATorch."""

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


class Zero1(ZeroMethod):
    """Each rank updates its shard of the weights; weights and gradients are whole while a step runs.

    Gradients of all micro-batches accumulate locally and are reduced once: the least communication of the three.
    """

    method_name: ClassVar[str] = "zero1"
    phase: ClassVar[Phase] = Phase.SHARD
    summary: ClassVar[str] = "shards optimizer states; gradients are reduced once per step"
    effect: ClassVar[str] = "memory: optimizer states / n. Communication: as data parallelism, once per step"
    seed_name: ClassVar[str | None] = "ATorch: zero1"
    conflicts: ClassVar[tuple[Conflict, ...]] = not_beside("zero2", "fsdp")

    def check(self, job: Job) -> None:
        """Refuses models that FSDP2 cannot shard."""
        units_of(self, job.model, job.strategy, dict(job.axes))

    def apply(self, job: Job) -> None:
        """Shards with FSDP2; parameters stay gathered and gradients whole until the last micro-batch."""
        shard(self, job, reshard_after_forward=False, reduce_once=True)

    def cost(self, step: Step) -> Step:
        """One gather and one reduction of everything per step."""
        return shard_cost(self, step, gathers="once", reduce_once=True)
