"""``ema``: an exponential moving average of the weights, sharded as they are, to evaluate and export."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt
from torch.optim import Optimizer

from meshwright.cost import Average, Step
from meshwright.errors import StrategyError
from meshwright.methods.base import Method, Phase
from meshwright.methods.job import Job
from meshwright.methods.law import Conflict
from meshwright.optim import EmaPolicy, WeightAverage


class Ema(Method):
    """After steps of the optimizer: average ← d average + (1 - d) weights, on every rank for its own shards.

    ``with accelerated.ema.weights():`` lends the model the average. It is in every checkpoint of a ``CheckpointStore``
    under the model's names. A skipped step does not count; the first update takes the weights as they are.

    Config: None, the decay, or keys.
    """

    method_name: ClassVar[str] = "ema"
    phase: ClassVar[Phase] = Phase.OPTIMIZER
    summary: ClassVar[str] = "an exponential moving average of the weights, to evaluate and export"
    effect: ClassVar[str] = "memory: the average, sharded as the weights. Time: weights and average are read once more"
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            other="outer",
            reason="between two synchronisations every replica has weights of its own to average",
            fix="leave ema out: the global weights are an average already",
        ),
        Conflict(
            other="fp8",
            reason="it lends the model other weights than those whose scales are known ahead",
            fix="leave all_gather out",
            when=lambda _, other: bool(other.all_gather),
            other_keys="all_gather=True",
        ),
    )

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999
    """Of the old average in one step, whatever ``every`` is."""
    warmup: bool = True
    """Begin with smaller decays: (1 + t) / (10 + t) in update t, until ``decay`` is smaller."""
    every: PositiveInt = 1
    """Steps from one update to the next; more make it cheaper."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Of the average; bf16 is rounded at random, and right on average."""

    @classmethod
    def from_short(cls, raw: Any) -> Mapping[str, Any]:
        """Reads the decay."""
        return {"decay": raw} if isinstance(raw, float) else super().from_short(raw)

    def check(self, job: Job) -> None:
        """Refuses a job in which nothing moves the weights."""
        if job.optim_func is None:
            raise StrategyError(
                "ema has no optimizer whose weights it could average",
                expected="optim_func",
                got="None",
                fix="pass the class of the optimizer, or leave ema out",
            )

    def apply(self, job: Job) -> None:
        """Follows the optimizer, when it is built."""
        finish, policy = job.finish_optimizer, EmaPolicy(self.decay, self.warmup, self.every, self.dtype)

        def with_average(optimizer: Optimizer) -> Optimizer:
            finished = finish(optimizer)
            WeightAverage(finished, policy, job.model)  # from now on the optimizer's
            return finished

        job.finish_optimizer = with_average

    def cost(self, step: Step) -> Step:
        """An average beside all that trains."""
        return step.replace(average=Average(itemsize=2 if self.dtype == "bf16" else None, every=self.every))
