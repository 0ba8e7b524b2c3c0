"""``weight_vote``: ranks that hold the same weights compare their bits every so many steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import PositiveInt
from torch.optim import Optimizer

from meshwright.cost import Step, Traffic
from meshwright.errors import StrategyError
from meshwright.methods.base import Method, Phase
from meshwright.methods.job import Job
from meshwright.methods.vote.voter import VoteAction, VotePolicy, Voter
from meshwright.optim import GuardedOptimizer
from meshwright.optim.wrapped import call_around

_NUMBER_BYTES = 8


class WeightVote(Method):
    """Finds silent corruption: a flipped bit in one replica's weights or states, which no error tells of.

    Most held by the ranks of one weight, or of one shard of it, is right, and the ranks that hold something else are
    named with the parameter. ``stop`` raises a :class:`~meshwright.errors.ReplicaError` on every rank, ``warn`` says
    so, ``heal`` gives the outvoted ranks the weight, its optimizer states and its average from one of the majority.
    Two ranks that differ are named both, and cannot heal. What one rank alone holds, such as a shard of ``fsdp`` over
    all ranks, has nothing to be compared with; where that is all there is, the user is told.

    Config: None, the number of steps, the action, or keys.
    """

    method_name: ClassVar[str] = "weight_vote"
    phase: ClassVar[Phase] = Phase.WATCH
    summary: ClassVar[str] = "ranks that hold the same weights compare their bits, and name who differs"
    effect: ClassVar[str] = (
        "time: weights are read once in every so many steps. Communication: 8 bytes for each weight of every rank then"
    )

    every: PositiveInt = VotePolicy.every
    """Steps of the optimizer from one vote to the next; under ``outer``, at least as many."""
    action: VoteAction = VotePolicy.action

    @classmethod
    def from_short(cls, raw: Any) -> Mapping[str, Any]:
        """Reads the number of steps, or the action."""
        if isinstance(raw, int) and not isinstance(raw, bool):
            return {"every": raw}
        return {"action": raw} if isinstance(raw, str) else super().from_short(raw)

    def check(self, job: Job) -> None:
        """Refuses a job in which nothing moves the weights."""
        if job.optim_func is None:
            raise StrategyError(
                "weight_vote has no optimizer whose steps it could count",
                expected="optim_func",
                got="None",
                fix="pass the class of the optimizer, or leave weight_vote out",
            )

    def apply(self, job: Job) -> None:
        """Follows the optimizer's steps."""
        finish = job.finish_optimizer

        def voting(optimizer: Optimizer) -> Optimizer:
            finished = finish(optimizer)
            job.voter = Voter(job.model, finished, VotePolicy(self.every, self.action), job.device)
            if not job.voter.num_compared:
                job.notices.append("weight_vote has nothing to compare: every part of the weights is on one rank alone")
                return finished
            # Inside the guards, which others may put anew; a skipped step changes nothing that could be voted on.
            stepped = finished.inner if isinstance(finished, GuardedOptimizer) else finished
            call_around(stepped, after=[job.voter.count_step])
            return finished

        job.finish_optimizer = voting

    def cost(self, step: Step) -> Step:
        """One all-gather of a number for each weight."""
        world = math.prod(size for _, size in step.axes)
        axis = next((name for name, size in step.axes if size > 1), None)
        if axis is None:
            return step
        num_bytes = _NUMBER_BYTES * world * sum(count for count, _ in step.every_parameter())
        return step.send(Traffic("all_gather", axis, num_bytes, "update", every=self.every, hidden=False))
