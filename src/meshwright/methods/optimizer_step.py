"""Configure the optimizer step: accumulation, clipping, skipped steps, and averaged weights."""

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
    """``Accelerated.step`` cuts each rank's batch into so many micro-batches and updates once.

    It is ``accelerate(num_micro_batches=)`` inside the strategy, so that a strategy file says what its plan was made
    for. When gradients travel is the sharding method's to decide: plain data parallelism and zero1 reduce them once,
    zero2 and fsdp for every micro-batch.

    Config: the number, or ``{"num_micro_batches": 4}``.
    """

    method_name: ClassVar[str] = "gradient_accumulation"
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

    @classmethod
    def from_short(cls, raw: Any) -> Mapping[str, Any]:
        """Read the number."""
        is_count = isinstance(raw, int) and not isinstance(raw, bool)
        return {"num_micro_batches": raw} if is_count else super().from_short(raw)

    def notices(self) -> list[str]:
        """Say when it changes nothing."""
        one = self.num_micro_batches == 1
        return ["gradient_accumulation changes nothing: one micro-batch is the whole batch"] if one else []

    def apply(self, job: Job) -> None:
        """The plan's number is this one already."""
        job.num_micro_batches = self.num_micro_batches

    def cost(self, step: Step) -> Step:
        """Return the same for the simulated step, whose micro-batch was traced with this number."""
        return step.replace(num_micro_batches=self.num_micro_batches)


# --- ``grad_clip``: gradients are scaled down to a largest norm, as the strategy says it.

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class GradClip(Method):
    """Scales all gradients so that their common norm, over all ranks' shards, is at most ``max_norm`` (Pascanu 2013).

    It is ``accelerate(max_grad_norm=)`` inside the strategy, with other norms than the Euclidean one; under ``outer``
    every replica clips by its own norm.

    Config: the largest norm, or keys; 1.0 is the default.
    """

    method_name: ClassVar[str] = "grad_clip"
    phase: ClassVar[Phase] = Phase.OPTIMIZER
    summary: ClassVar[str] = "gradients are scaled down to a largest norm"
    effect: ClassVar[str] = "time: gradients are read, and written where they are clipped. Communication: one number"

    max_norm: _Positive = 1.0
    """In the gradients' units; the loss scale of fp16 is taken off before."""
    norm_type: Literal["inf"] | _Positive = 2.0
    """p of the p-norm; ``inf``: the largest magnitude."""

    @classmethod
    def from_short(cls, raw: Any) -> Mapping[str, Any]:
        """Read the largest norm."""
        is_number = isinstance(raw, int | float) and not isinstance(raw, bool)
        return {"max_norm": raw} if is_number else super().from_short(raw)

    @classmethod
    def normalised(cls, keys: dict[str, Any]) -> dict[str, Any]:
        """Take torch's ``float("inf")``, which JSON has no word for."""
        return {**keys, "norm_type": "inf"} if keys.get("norm_type") == float("inf") else keys

    def check(self, job: Job) -> None:
        """Refuse two largest norms."""
        if job.max_grad_norm not in (None, self.max_norm):
            raise StrategyError(
                "grad_clip and max_grad_norm name different norms",
                expected="one of the two, or the same number",
                got=f"{self} and max_grad_norm={job.max_grad_norm}",
                fix="leave max_grad_norm out: the strategy clips",
            )

    def apply(self, job: Job) -> None:
        """``Accelerated`` clips in every step."""
        job.max_grad_norm, job.grad_norm_type = self.max_norm, float(self.norm_type)

    def cost(self, step: Step) -> Step:
        """Nothing more: every step measures the norm."""
        return step


# --- ``skip_nonfinite``: a step whose gradients hold inf or nan leaves the weights as they are, or ends training.

_FP16 = "fp16 finds its loss scale by gradients that overflow"


def _in_fp16(own: Any, other: Any) -> bool:
    return bool(own.action == "stop" and other.dtype == "fp16")


class SkipNonfinite(Method):
    """Looks at the norm of all gradients before every update; all ranks decide alike, by one number.

    ``skip`` goes on with the next step: weights, states and learning rate stay as they are, and
    ``Accelerated.num_skipped_steps`` counts. ``stop`` raises a :class:`~meshwright.errors.NonFiniteError` on every
    rank, with the weights as they were, for a debugger or a restart from the last checkpoint.

    Config: None, ``"skip"`` or ``"stop"``.
    """

    method_name: ClassVar[str] = "skip_nonfinite"
    phase: ClassVar[Phase] = Phase.OPTIMIZER  # behind the precision, which may ask for the same
    summary: ClassVar[str] = "steps whose gradients hold inf or nan are skipped, or end training"
    effect: ClassVar[str] = "time: the host waits for the norm in every step"
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        *(
            Conflict(
                other=name,
                reason=_FP16,
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

    @classmethod
    def from_short(cls, raw: Any) -> Mapping[str, Any]:
        """Read the action."""
        return {"action": raw} if isinstance(raw, str) else super().from_short(raw)

    def apply(self, job: Job) -> None:
        """The optimizer is built with a guard that does it."""
        job.skip_nonfinite, job.stop_nonfinite = True, self.action == "stop"
        others = [method for method in job.strategy.methods if isinstance(method, HalfPrecisionMethod)]
        if any(method.dtype == "fp16" for method in others):
            job.notices.append("skip_nonfinite changes nothing beside fp16, whose loss scale skips such steps already")

    def cost(self, step: Step) -> Step:
        """Nothing more: every step measures the norm."""
        return step


# --- ``loss_spike``: a step whose loss jumps above the latest ones is skipped, told, or ends training.

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
        """Read the action."""
        return {"action": raw} if isinstance(raw, str) else super().from_short(raw)

    def check(self, job: Job) -> None:
        """Refuse a job without an update that could be skipped."""
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


# --- ``ema``: an exponential moving average of the weights, sharded as they are, to evaluate and export.


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
        """Read the decay."""
        return {"decay": raw} if isinstance(raw, float) else super().from_short(raw)

    def check(self, job: Job) -> None:
        """Refuse a job in which nothing moves the weights."""
        if job.optim_func is None:
            raise StrategyError(
                "ema has no optimizer whose weights it could average",
                expected="optim_func",
                got="None",
                fix="pass the class of the optimizer, or leave ema out",
            )

    def apply(self, job: Job) -> None:
        """Follow the optimizer, when it is built."""
        finish, policy = job.finish_optimizer, EmaPolicy(self.decay, self.warmup, self.every, self.dtype)

        def with_average(optimizer: Optimizer) -> Optimizer:
            finished = finish(optimizer)
            WeightAverage(finished, policy, job.model)  # from now on the optimizer's
            return finished

        job.finish_optimizer = with_average

    def cost(self, step: Step) -> Step:
        """Return an average beside all that trains."""
        return step.replace(average=Average(itemsize=2 if self.dtype == "bf16" else None, every=self.every))
