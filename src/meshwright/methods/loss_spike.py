"""``loss_spike``: a step whose loss jumps above the latest ones is skipped, told, or ends training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, PositiveInt
from torch.optim import Optimizer

from meshwright.cost import Step
from meshwright.errors import StrategyError
from meshwright.methods.base import Method, Phase
from meshwright.methods.job import Job
from meshwright.methods.law import Conflict
from meshwright.optim import SpikeAction, SpikePolicy, SpikeWatch, watch_spikes

_ALONE = ("stop", "rollback")


class LossSpike(Method):
    """Compares the loss of every step, before its update, with the median of the latest; all ranks decide alike.

    A spike lies more than ``threshold`` standard deviations above that median, as the median absolute deviation tells
    them; a loss of inf or nan always is one. ``skip`` leaves weights and states as they were. ``rollback`` does so too
    and asks for the last checkpoint, to go on behind the batches in between (Chowdhery et al. 2022, PaLM, §5.1):
    ``meshwright train`` does it, a loop of one's own sees it in ``StepResult.spike``. ``stop`` raises a
    :class:`~meshwright.errors.LossSpikeError` on every rank, with the weights as they were. ``warn`` says so.

    Config: None, the action, or keys.
    """

    method_name: ClassVar[str] = "loss_spike"
    phase: ClassVar[Phase] = Phase.WATCH
    summary: ClassVar[str] = "steps whose loss jumps are skipped, told, rolled back, or end training"
    effect: ClassVar[str] = "time: the host waits for the loss before every update"
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            other="outer",
            reason="a replica that stops or goes back alone leaves the others waiting",
            fix="use skip or warn: each replica judges losses of its own",
            when=lambda own, _: own.action in _ALONE,
            own_keys="action='stop' or 'rollback'",
        ),
    )

    action: SpikeAction = "skip"
    window: Annotated[int, Field(ge=2)] = SpikePolicy.window
    """Losses to compare with; nothing but inf and nan is a spike until half of them have been seen."""
    threshold: Annotated[float, Field(gt=0, allow_inf_nan=False)] = SpikePolicy.threshold
    """In standard deviations."""
    patience: PositiveInt = SpikePolicy.patience
    """Of ``skip``: spikes in a row that end training, for then it is no spike."""

    @classmethod
    def from_short(cls, raw: Any) -> Mapping[str, Any]:
        """Reads the action."""
        return {"action": raw} if isinstance(raw, str) else super().from_short(raw)

    def check(self, job: Job) -> None:
        """Refuses a job without an update that could be skipped."""
        if job.optim_func is None:
            raise StrategyError(
                "loss_spike has no optimizer whose steps it could skip",
                expected="optim_func",
                got="None",
                fix="pass the class of the optimizer, or leave loss_spike out",
            )

    def apply(self, job: Job) -> None:
        """``Accelerated.step`` asks a watch, which the optimizer hands to checkpoints."""
        job.spikes = watch = SpikeWatch(SpikePolicy(self.action, self.window, self.threshold, self.patience))
        finish = job.finish_optimizer

        def watched(optimizer: Optimizer) -> Optimizer:
            finished = finish(optimizer)
            watch_spikes(finished, watch)
            return finished

        job.finish_optimizer = watched

    def cost(self, step: Step) -> Step:
        """Nothing more: every step averages its loss."""
        return step
