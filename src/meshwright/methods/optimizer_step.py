"""Configure the optimizer step: accumulation, clipping, skipped steps, and averaged weights.

Each method records what it asks for in ``Job.optimizer``; :mod:`meshwright.optim` does the work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt
from torch.optim import Optimizer

from meshwright.cost import Average, Step
from meshwright.errors import StrategyError
from meshwright.methods.base import Conflict, Job, Method, Phase
from meshwright.methods.half_precision import HalfPrecisionMethod
from meshwright.optim import EmaPolicy, SpikeAction, SpikePolicy, SpikeWatch, WeightAverage, watch_spikes


class GradientAccumulation(Method):
    """Cuts each rank's batch into several micro-batches per update.

    It is ``accelerate(num_micro_batches=)`` inside the strategy, so that a strategy file says what its plan was made
    for. The sharding method decides when gradients are reduced: plain data parallelism and zero1 reduce them once,
    zero2 and fsdp in every micro-batch.

    Config: the number, or ``{"num_micro_batches": 4}``.
    """

    method_name: ClassVar[str] = "gradient_accumulation"
    short_forms: ClassVar[Mapping[type, str]] = {int: "num_micro_batches"}
    phase: ClassVar[Phase] = Phase.OPTIMIZER
    summary: ClassVar[str] = "a step's batch runs in several micro-batches"
    effect: ClassVar[str] = (
        "memory: activations / n, gradients kept between micro-batches. Time: smaller products. "
        "Communication: zero2 and fsdp n times, others as before"
    )
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            other="pipeline_parallel",
            reason="a step has one number of micro-batches",
            fix="leave gradient_accumulation out: a pipeline accumulates",
            when=lambda own, other: other.num_micro_batches not in (None, own.num_micro_batches),
            other_keys="another num_micro_batches",
        ),
    )

    num_micro_batches: PositiveInt

    @property
    def asked_micro_batches(self) -> int | None:
        """See :class:`~meshwright.methods.planner_hooks.PlannerHooks`."""
        return self.num_micro_batches

    def notices(self) -> list[str]:
        """Return a notice when it changes nothing."""
        one = self.num_micro_batches == 1
        return ["gradient_accumulation changes nothing: one micro-batch is the whole batch"] if one else []

    def apply(self, job: Job) -> None:
        """Set the job's number, which the plan has already; a pipeline may need more."""
        job.num_micro_batches = max(job.num_micro_batches, self.num_micro_batches)

    def cost(self, step: Step) -> Step:
        """Set the number of the simulated step, whose micro-batch was traced with it; a pipeline may need more."""
        return step.replace(num_micro_batches=max(step.num_micro_batches, self.num_micro_batches))


_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class GradClip(Method):
    """Scales all gradients so that their common norm, over all ranks' shards, is at most ``max_norm`` (Pascanu 2013).

    It is ``accelerate(max_grad_norm=)`` inside the strategy, with other norms than the Euclidean one; under ``outer``
    every replica clips by its own norm.

    Config: the largest norm, or keys; 1.0 is the default.
    """

    method_name: ClassVar[str] = "grad_clip"
    short_forms: ClassVar[Mapping[type, str]] = {int: "max_norm", float: "max_norm"}
    phase: ClassVar[Phase] = Phase.OPTIMIZER
    summary: ClassVar[str] = "gradients are scaled down to a largest norm"
    effect: ClassVar[str] = "time: gradients are read, and written where they are clipped. Communication: one number"

    max_norm: _Positive = 1.0
    """Largest norm, in the gradients' units, without the loss scale of fp16."""
    norm_type: Literal["inf"] | _Positive = 2.0
    """p of the p-norm; ``inf``: the largest magnitude."""

    @classmethod
    def normalised(cls, keys: dict[str, Any]) -> dict[str, Any]:
        """Accept torch's ``float("inf")``, which JSON cannot express."""
        return {**keys, "norm_type": "inf"} if keys.get("norm_type") == float("inf") else keys

    def check(self, job: Job) -> None:
        """Refuse a ``max_grad_norm`` that differs."""
        if job.optimizer.max_grad_norm not in (None, self.max_norm):
            raise StrategyError(
                "grad_clip and max_grad_norm name different norms",
                expected="one of the two, or the same number",
                got=f"{self} and max_grad_norm={job.optimizer.max_grad_norm}",
                fix="leave max_grad_norm out: the strategy clips",
            )

    def apply(self, job: Job) -> None:
        """Record the norm; ``Accelerated`` clips in every step."""
        job.optimizer.max_grad_norm, job.optimizer.grad_norm_type = self.max_norm, float(self.norm_type)

    def cost(self, step: Step) -> Step:
        """Return the step as it is: every step measures the norm."""
        return step


def _in_fp16(own: Any, other: Any) -> bool:
    return bool(own.action == "stop" and other.dtype == "fp16")


class SkipNonfinite(Method):
    """Skips steps whose gradients have inf or nan, or ends training; all ranks decide alike, by the common norm.

    ``skip`` goes on with the next step: weights, states and learning rate stay as they are, and
    ``Accelerated.num_skipped_steps`` counts it. ``stop`` raises a :class:`~meshwright.errors.NonFiniteError` on every
    rank, with the weights as they were, for a debugger or a restart from the last checkpoint.

    Config: None, ``"skip"`` or ``"stop"``.
    """

    method_name: ClassVar[str] = "skip_nonfinite"
    short_forms: ClassVar[Mapping[type, str]] = {str: "action"}
    phase: ClassVar[Phase] = Phase.OPTIMIZER  # after the precision, which may ask for the same
    summary: ClassVar[str] = "steps whose gradients hold inf or nan are skipped, or end training"
    effect: ClassVar[str] = "time: the host waits for the norm in every step"
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        *(
            Conflict(
                other=name,
                reason="fp16 finds its loss scale by gradients that overflow",
                fix="use skip, or bf16",
                when=_in_fp16,
                own_keys="action='stop'",
                other_keys="dtype='fp16'",
            )
            for name in ("amp_native", "half")
        ),
        Conflict(
            other="outer",
            reason="a replica that stops alone leaves the others waiting",
            fix="use skip: each replica skips steps of its own",
            when=lambda own, _: own.action == "stop",
            own_keys="action='stop'",
        ),
    )

    action: Literal["skip", "stop"] = "skip"

    def apply(self, job: Job) -> None:
        """Have the optimizer built with a guard that skips or stops."""
        job.optimizer.skip_nonfinite, job.optimizer.stop_nonfinite = True, self.action == "stop"
        others = [method for method in job.strategy.methods if isinstance(method, HalfPrecisionMethod)]
        if any(method.dtype == "fp16" for method in others):
            job.notices.append("skip_nonfinite changes nothing beside fp16, whose loss scale skips such steps already")

    def cost(self, step: Step) -> Step:
        """Return the step as it is: every step measures the norm."""
        return step


_ALONE = ("stop", "rollback")


class LossSpike(Method):
    """Compares the loss of every step, before its update, with the median of the latest losses; all ranks decide alike.

    A spike lies more than ``threshold`` standard deviations, estimated by the median absolute deviation, above that
    median; inf and nan are always spikes. ``skip`` leaves weights and states as they were. ``rollback`` does so too and
    asks to return to the last checkpoint and to leave out the batches in between (Chowdhery et al. 2022, PaLM, §5.1):
    ``meshwright train`` does it, a loop of your own reads ``StepResult.spike``. ``stop`` raises a
    :class:`~meshwright.errors.LossSpikeError` on every rank, with the weights as they were. ``warn`` prints a warning.

    Config: None, the action, or keys.
    """

    method_name: ClassVar[str] = "loss_spike"
    short_forms: ClassVar[Mapping[type, str]] = {str: "action"}
    phase: ClassVar[Phase] = Phase.WATCH
    summary: ClassVar[str] = "steps whose loss jumps are skipped, reported, rolled back, or end training"
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
    """Number of losses to compare with; until half of them have been seen only inf and nan are spikes."""
    threshold: Annotated[float, Field(gt=0, allow_inf_nan=False)] = SpikePolicy.threshold
    """Height of a spike, in standard deviations."""
    patience: PositiveInt = SpikePolicy.patience
    """Number of spikes in a row at which ``skip`` ends training, for then the loss has not jumped but risen."""

    def check(self, job: Job) -> None:
        """Refuse a job without an optimizer."""
        job.require_optimizer(self.method_name, "whose steps it could skip")

    def apply(self, job: Job) -> None:
        """Add a watch that ``Accelerated.step`` asks, and that the optimizer saves in checkpoints."""
        job.optimizer.spikes = watch = SpikeWatch(SpikePolicy(self.action, self.window, self.threshold, self.patience))

        def watched(optimizer: Optimizer) -> Optimizer:
            watch_spikes(optimizer, watch)
            return optimizer

        job.optimizer.wrappers.append(watched)

    def cost(self, step: Step) -> Step:
        """Return the step as it is: every step averages its loss."""
        return step


class Ema(Method):
    """Keeps an exponential moving average of the weights, sharded as they are: average ← d average + (1 - d) weights.

    ``with accelerated.ema.weights():`` swaps the average into the model. It is saved in every checkpoint of a
    ``CheckpointStore`` under the model's names. Skipped steps do not count; the first update copies the weights. Under
    ``outer`` it follows the global weights, and moves when they do: by ``decay ** n`` after n steps.

    Config: None, the decay, or keys.
    """

    method_name: ClassVar[str] = "ema"
    short_forms: ClassVar[Mapping[type, str]] = {float: "decay"}
    phase: ClassVar[Phase] = Phase.OPTIMIZER
    summary: ClassVar[str] = "an exponential moving average of the weights, to evaluate and export"
    effect: ClassVar[str] = "memory: the average, sharded as the weights. Time: weights and average are read once more"
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            other="outer",
            reason="replicas never hold the same weights, which the average would follow",
            fix="synchronise the whole model at once, or leave ema out: the global weights are an average already",
            when=lambda _, other: not other.makes_equal,
            other_keys="fragments, delay or merge_alpha",
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
    """Weight of the old average in one step, whatever ``every`` is."""
    warmup: bool = True
    """Begin with smaller decays: (1 + t) / (10 + t) in update t, up to ``decay``."""
    every: PositiveInt = 1
    """Number of steps from one update to the next."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision of the average; bf16 is rounded stochastically."""

    def check(self, job: Job) -> None:
        """Refuse a job without an optimizer."""
        job.require_optimizer(self.method_name, "whose weights it could average")

    def apply(self, job: Job) -> None:
        """Attach an average to the optimizer, when it is built."""
        policy = EmaPolicy(self.decay, self.warmup, self.every, self.dtype)

        def with_average(optimizer: Optimizer) -> Optimizer:
            # The optimizer keeps it from now on.
            WeightAverage(optimizer, policy, job.model, of_replicas="outer" in job.strategy.names)
            return optimizer

        job.optimizer.wrappers.append(with_average)

    def cost(self, step: Step) -> Step:
        """Add an average of all trainable parameters."""
        return step.replace(average=Average(itemsize=2 if self.dtype == "bf16" else None, every=self.every))
