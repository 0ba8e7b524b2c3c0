"""``fsdp``: parameters, gradients and optimizer states are sharded (ZeRO stage 3). Seed: ATorch."""

from __future__ import annotations

from typing import ClassVar

from meshwright.cost import Step
from meshwright.errors import StrategyError
from meshwright.methods.base import Phase
from meshwright.methods.job import Job
from meshwright.methods.zero.config import ZeroMethod
from meshwright.methods.zero.cost import Gathers, shard_cost
from meshwright.methods.zero.engine import shard
from meshwright.methods.zero.units import units_of


class Fsdp(ZeroMethod):
    """A block's weights are whole only while it computes: gathered in forward, freed, gathered again in backward."""

    method_name: ClassVar[str] = "fsdp"
    phase: ClassVar[Phase] = Phase.SHARD
    summary: ClassVar[str] = "shards weights, gradients and optimizer states; gathers block by block"
    effect: ClassVar[str] = (
        "memory: weights, gradients, optimizer states / n. Communication: two gathers, one reduction per micro-batch"
    )
    seed_name: ClassVar[str | None] = "ATorch: fsdp"

    reshard_after_forward: bool | int = True
    """True frees weights after forward; False keeps them (that is zero2); n keeps them sharded over n ranks."""

    def check(self, job: Job) -> None:
        """Refuses models that FSDP2 cannot shard, and a group of ranks that does not divide the axis."""
        units_of(self, job.model, job.strategy, dict(job.axes))
        group, ranks = self.reshard_after_forward, job.size(job.shard_axis)
        if not isinstance(group, bool) and (group < 1 or ranks % group):
            raise StrategyError(
                "fsdp: reshard_after_forward is not a number of ranks that divides the sharding axis",
                expected=f"True, False or a divisor of {ranks}",
                got=repr(group),
                fix="use True, or the number of ranks within a node",
            )

    def apply(self, job: Job) -> None:
        """Shards with FSDP2."""
        shard(self, job, reshard_after_forward=self.reshard_after_forward, reduce_once=False)

    def cost(self, step: Step) -> Step:
        """Two gathers and one reduction per micro-batch."""
        return shard_cost(self, step, gathers=self._gathers(step.size(step.shard_axis)), reduce_once=False)

    def _gathers(self, ranks: int) -> Gathers:
        group = self.reshard_after_forward
        if not group:
            return "once"
        return "nearby" if not isinstance(group, bool) and 1 < group < ranks else "twice"
