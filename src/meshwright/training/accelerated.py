"""Train a model that ``accelerate`` returned.

:class:`Accelerated` has the step: micro-batches forward and backward, the mean loss over all ranks, clipping, the
verdict on loss spikes, update, schedule. The means over a global batch follow below it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from meshwright.data.loader import real_counts
from meshwright.errors import ConfigError, DataError
from meshwright.methods import Job, abandon, abandoned_if_it_fails
from meshwright.methods.job import (
    MAX_EXACT_SUM,
    SAMPLED,
    STEP_AXES,
    guards_are_on,
    mean_over,
    parameters_in,
    restored_buffers,
    sum_over,
)
from meshwright.nn import reshard
from meshwright.nn.batches import call_loss, call_model, equal_micro_batches, first_loss, micro_batches, shares_of
from meshwright.optim import average_of, clip_gradient_values, clip_gradients, clipped_step, guard_of, judge_loss
from meshwright.optim.guarded_step import is_outer
from meshwright.planner import Plan, measured_state, record_saved
from meshwright.runtime import (
    HostCopy,
    peak_memory_bytes,
    preserved_rng,
    synchronize_device,
)
from meshwright.strategy import Strategy
from meshwright.training.batch_counts import (
    Divisor,
    LossWeight as LossWeight,
    gather_for_metrics,
    loss_divisors,
    without_repeats,
)

if TYPE_CHECKING:
    from meshwright.methods import PipelineEngine
    from meshwright.methods.expert.balance import ExpertLoad
    from meshwright.optim import GuardedOptimizer, SpikeAction, Stages, WeightAverage
    from meshwright.training.step_profile import StepProfile


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step. Its tensors are 0-dim and on the device, which only reading them waits for."""

    loss: torch.Tensor  # mean over the global batch
    grad_norm: torch.Tensor  # over all parameters, before clipping
    skipped: bool  # whether the weights stayed as they were: gradients or loss not finite, or the loss a spike
    spike: SpikeAction | None = None  # the action of loss_spike for this step; None: the loss was no spike


@dataclass(frozen=True)
class DryRun:
    """The cost of one forward and backward pass that changed nothing."""

    step_time_s: float
    peak_memory_bytes: int


class Accelerated:
    """The model, optimizer, data and functions of a training job, with its strategy applied.

    Train with :meth:`step`, or write the loop by hand with the attributes. Unpacks as ATorch's result:
    ``model, optim, dataloader, loss_func, prepare_input, args = accelerated``.

    Attributes:
        model: Sharded or replicated; call it as before.
        optim: The optimizer over ``model``, or None.
        dataloader: This rank's part of every global batch, or None.
        loss_func: ``loss_func(model_input, model_output)``; carries autocast and loss scale. None if none was given.
        unscaled_loss_func: The same without the loss scale, for loops that scale when they call backward.
        prepare_input: ``prepare_input(data, device)`` makes the model input.
        lr_scheduler: Stepped by :meth:`step`; None if none was given.
        args: ATorch's flags for hand-written loops; both are False, since the loop needs nothing special.
        strategy: The strategy as applied.
        plan: Its predictions.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        *,
        optim: Optimizer | None,
        dataloader: DataLoader | None,
        lr_scheduler: LRScheduler | None,
        has_loss_func: bool,
        model_input_format: str | None,
        loss_weight: LossWeight | None = None,
    ) -> None:
        self._job = job
        self.model: nn.Module = job.model
        self.optim = optim
        self.dataloader = dataloader
        self.loss_func = self._loss_func if has_loss_func else None
        self.unscaled_loss_func = job.loss_func if has_loss_func else None
        self.prepare_input = job.prepare_input
        self.lr_scheduler = lr_scheduler
        self.args = {"use_optim_backward": False, "requires_set_gradient_accumulation_boundary": False}
        self.strategy: Strategy = job.strategy
        self.plan = plan
        self.device, self.mesh = job.device, job.mesh_axes.mesh
        self.replica, self.num_replicas = job.mesh_axes.replica, job.mesh_axes.num_replicas
        self.num_micro_batches = job.num_micro_batches
        self.max_grad_norm, self.grad_norm_type = job.optimizer.max_grad_norm, job.optimizer.grad_norm_type
        self._model_input_format, self._loss_weight = model_input_format, loss_weight
        self._mean_loss = MeanLoss(job, dataloader)
        self._may_skip = job.optimizer.skip_nonfinite or job.optimizer.spikes is not None
        # Set by measured_step; the next forward, of one micro-batch, then measures the activations that it saves.
        self._measures_next = False
        self._saved_bytes = 0  # in device memory
        self._offloaded_bytes = 0  # copied to the host
        self._profile: StepProfile | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.optim, self.dataloader, self.loss_func, self.prepare_input, self.args))

    def step(self, batch: Any) -> StepResult:
        """Run one optimizer step: forward, backward, clip, update, schedule.

        A loop may catch an error in forward or backward that every rank meets, and go on with the next batch.

        Args:
            batch: This rank's part of the global batch, as the dataloader yields it; cut into ``num_micro_batches``.
                Those of a batch that does not divide differ by one sample (in pipelines they are more and smaller), and
                count by their samples; samples that the loader repeats to fill the last batch of an epoch do not count.

        Returns:
            Loss and gradient norm, equal on every rank (under ``outer``: of a replica), and whether the update was
            skipped.

        Raises:
            ConfigError: When there is no optimizer or no loss.
            DataError: When ranks are at different places in the data.
            ModelError: When parameters were put into the model, or resized, after ``accelerate``.
        """
        optim = self.optim
        if optim is None:
            raise ConfigError(
                "There is no optimizer to step",
                got="optim_func=None",
                fix="pass optim_func, such as torch.optim.AdamW",
                expected="an optimizer built by optim_func",
            )
        with contextlib.nullcontext() if self._profile is None else self._profile.step():
            return self._step(optim, batch)

    def _step(self, optim: Optimizer, batch: Any) -> StepResult:
        optim.zero_grad()
        if self._job.check_unchanged is not None:
            self._job.check_unchanged()
        with restored_buffers(self.model, self._may_skip) as restore_buffers:
            loss = self._mean_loss(self._forward_backward(*self._cut(batch)))
            is_alone = not is_outer(optim)
            with self._phase("optimizer"):
                grad_norm, update = clipped_step(
                    parameters_in(self.model), optim, self.max_grad_norm, self.grad_norm_type, self.stages
                )
                # The verdict comes before the update, which the guard then skips. The host may learn it after it.
                find_spike = self._judge(loss, may_be_late=is_alone)
                update()
                spike = find_spike() if find_spike is not None else None
            skipped = self._guard is not None and self._guard.step_was_skipped
            if skipped:
                restore_buffers()
        # Under an outer optimizer, replicas skip steps on their own, but their learning rates must stay the same.
        if self.lr_scheduler is not None and not (skipped and is_alone):
            self.lr_scheduler.step()
        return StepResult(loss, grad_norm, skipped, spike)

    def _judge(self, loss: torch.Tensor, *, may_be_late: bool) -> Callable[[], SpikeAction | None] | None:
        guard, spikes = self._guard, self._job.optimizer.spikes
        if guard is None:
            return None
        guard.loss = loss
        return judge_loss(loss, guard, spikes, may_be_late=may_be_late) if spikes is not None else None

    def _phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._profile is None else self._profile.phase(name)

    @contextlib.contextmanager
    def profile(
        self,
        folder: str | os.PathLike[str],
        steps: tuple[int, int] = (3, 5),
        *,
        trace: bool = True,
        memory: bool = False,
    ) -> Iterator[StepProfile]:
        """Profile some of the steps taken inside the ``with`` block; collective.

        Each rank writes ``trace-rankN.json.gz``, which https://ui.perfetto.dev opens, with the phases of the step named
        (``meshwright.forward``, …), and rank 0 ``summary.txt``: where the step went, predicted and measured. Phases are
        measured in the steps before those that are traced, if there are such beside the first.

        Args:
            folder: Where they are written.
            steps: The first and the last step to trace, counted from 1 at the beginning of the block.
            trace: Whether to trace; without it only phases are measured.
            memory: Write ``memory-rankN.pickle``, too: every allocation in these steps, for pytorch.org/memory_viz.
                CUDA alone has it.

        Raises:
            ConfigError: When ``steps`` are no two numbers in order, or another profile is active.
        """
        from meshwright.training.step_profile import StepProfile  # late: few runs need it

        if self._profile is not None:
            raise ConfigError(
                "The job is profiled already", expected="one profile at a time", got="a second", fix="leave the first"
            )
        waiting: Any = self.dataloader if hasattr(self.dataloader, "waiting") else None
        with StepProfile(self.plan, self.device, Path(folder), steps, trace=trace, memory=memory) as self._profile:
            if waiting is not None:
                waiting.waiting = lambda: self._phase("data")
            try:
                yield self._profile
            finally:
                if waiting is not None:
                    waiting.waiting = contextlib.nullcontext
                self._profile = None

    def measured_step(self, batch: Any) -> tuple[StepResult, dict[str, int]]:
        """Run a :meth:`step` and measure the bytes on this rank, by the classes of ``plan.memory``.

        Activations are those that the first micro-batch saves; all else is counted after the update.
        """
        self._measures_next, self._offloaded_bytes = True, 0
        result = self.step(batch)
        activations = {"activations": self._saved_bytes, "host_activations": self._offloaded_bytes}
        return result, measured_state(self.model, self.optim) | activations

    def _forward_backward(self, parts: list[Any], shares: Sequence[Divisor]) -> torch.Tensor:
        """Run all micro-batches; return this rank's part of the mean loss over ranks."""
        with abandoned_if_it_fails(self._job, self.optim):
            inputs_and_divisors, check = self._prepare(parts, shares)
            if self._job.pipeline is not None:
                with self._phase("forward and backward"):
                    loss = self._run_pipeline(self._job.pipeline, list(inputs_and_divisors))
                check()
                return loss
            total: torch.Tensor | None = None
            for index, (inputs, divisor) in enumerate(inputs_and_divisors):
                with self._job.micro_batch(index == len(parts) - 1):
                    with self._phase("forward"):
                        loss = divided(self._forward(inputs), divisor)
                    with self._phase("backward"):
                        loss.backward()
                total = loss.detach() if total is None else total + loss.detach()
            assert total is not None
            check()
            return total

    def _without_repeats(
        self, batch: Any, parts: list[Any], axes: tuple[str, ...]
    ) -> tuple[list[Any], Sequence[Divisor]]:
        """Return a batch's parts without samples that fill it up, and what their losses are divided by."""
        counts = real_counts(batch)
        return (parts, shares_of(parts)) if counts is None else without_repeats(self._job, parts, counts, axes)

    def _cut(self, batch: Any) -> tuple[list[Any], Sequence[Divisor]]:
        """Return a batch's micro-batches, and what their losses are divided by."""
        if self._job.pipeline is None:
            return self._without_repeats(batch, micro_batches(batch, self.num_micro_batches), STEP_AXES)
        parts, count = equal_micro_batches(
            batch, self.num_micro_batches, self._job.size("pipeline"), singly=real_counts(batch) is not None
        )
        own, shares = self._without_repeats(batch, parts[:count], STEP_AXES)
        return [*own, *parts[count:]], [*shares, *[math.inf] * (len(parts) - count)]

    def _prepare(
        self, parts: list[Any], shares: Sequence[Divisor]
    ) -> tuple[Iterable[tuple[Any, Divisor]], Callable[[], None]]:
        """Return each micro-batch's model input and the divisor of its loss; and a check for the end of backward."""
        inputs = (self.prepare_input(part, self.device) for part in parts)
        if self._loss_weight is None:
            # Lazily: one input at a time is on the device.
            return zip(inputs, shares, strict=True), lambda: None
        every = list(inputs)
        divisors, check = loss_divisors(self._job, self._loss_weight, every, STEP_AXES, shares)
        return zip(every, divisors, strict=True), check

    def _run_pipeline(self, pipeline: PipelineEngine, inputs: list[tuple[Any, Divisor]]) -> torch.Tensor:
        if self._guard is not None:
            self._guard.expect_scaled()
        measure = functools.partial(record_saved, self.model) if self._measures_next else None
        loss = pipeline.step(
            inputs,
            call=lambda given: call_model(self.model, given[0], self._model_input_format),
            loss=lambda given, output: divided(first_loss(self._loss_func(given[0], output)), given[1]),
            measure=measure,
        )
        if measure is not None:
            self._measures_next, self._saved_bytes = False, pipeline.saved_bytes
        return loss

    def _forward(self, inputs: Any) -> torch.Tensor:
        if not self._measures_next:
            return self._loss_of(inputs)
        offloaded = self._job.activations
        before = offloaded.num_bytes if offloaded is not None else 0
        with record_saved(self.model) as saved:
            loss = self._loss_of(inputs)
        saved.forget_freed()
        self._measures_next, self._saved_bytes = False, saved.bytes
        self._offloaded_bytes = offloaded.num_bytes - before if offloaded is not None else 0
        return loss

    def _loss_of(self, inputs: Any) -> torch.Tensor:
        return first_loss(self._loss_func(inputs, self._output_of(inputs)), trains=True)

    def _output_of(self, inputs: Any) -> Any:
        output, prepare = call_model(self.model, inputs, self._model_input_format), self._job.prepare_output
        return output if prepare is None else prepare(output)

    def _loss_func(self, inputs: Any, output: Any) -> Any:
        """Return the job's loss; its backward multiplies by the loss scale where there is one."""
        loss = call_loss(self._job.loss_func, inputs, output)
        if self._guard is None:
            return loss
        if isinstance(loss, list | tuple):
            return [self._guard.scaled(loss[0]), *loss[1:]]
        return self._guard.scaled(loss)

    def add_up(self, numbers: Callable[[], Sequence[int]]) -> Callable[[], Sequence[float]]:
        """Add up numbers of the ranks in the collective that each step has for its loss, without waiting for others.

        Args:
            numbers: Called in each step; as many on every rank, always. Their sums should stay below 2**24.

        Returns:
            A function that returns the sums of the last step; on a GPU those of the step before, to avoid waiting for
            the device. Empty before there are any. Under ``outer`` they are sums over the ranks of a replica.
        """
        return self._mean_loss.add_up(numbers)

    @property
    def pipeline(self) -> PipelineEngine | None:
        """The engine that runs the stages of a pipeline; None where there is none."""
        return self._job.pipeline

    @property
    def stages(self) -> Stages | None:
        """The division of parameters among ranks, for norms; None where every rank holds the whole model."""
        return self._job.stages

    @property
    def ema(self) -> WeightAverage:
        """The moving average of the weights, of the method ``ema``.

        Raises:
            ConfigError: Where the strategy keeps none.
        """
        average = average_of(self.optim)
        if average is None:
            raise ConfigError(
                "No average of the weights is kept",
                expected="the method ema in the strategy",
                got=str(self.strategy),
                fix='add it: ("ema", {"decay": 0.999})',
            )
        return average

    @property
    def expert_load(self) -> ExpertLoad | None:
        """The tokens of every expert in the last step; None where ``expert_parallel`` does not count them."""
        return self._job.expert_load

    @property
    def num_skipped_steps(self) -> int:
        """Number of steps of this process that left the weights as they were, for an inf or nan in the gradients."""
        return self._guard.num_skipped_steps if self._guard is not None else 0

    @property
    def waits_in_steps(self) -> bool:
        """True where the host reads numbers of a step: for a loss scale, skipped steps, weighted losses, or sums."""
        has_scale = self._guard is not None and self._guard.scaler is not None
        return has_scale or self._may_skip or self._loss_weight is not None or self._mean_loss.carries

    @property
    def is_profiled(self) -> bool:
        """True inside :meth:`profile`."""
        return self._profile is not None

    @property
    def _guard(self) -> GuardedOptimizer | None:
        return guard_of(self.optim)

    @torch.no_grad()
    def evaluate(self, batch: Any, loss_weight: LossWeight | None = None) -> torch.Tensor:
        """Return the mean loss over the global batch, without gradients; 0-dim, equal on every rank.

        Samples that a loader of Meshwright repeats to fill its last batch do not count.

        Args:
            batch: This rank's part of it.
            loss_weight: As in ``accelerate``, for this batch; None: the one that was given there.
        """
        (real,), shares = self._without_repeats(batch, [batch], SAMPLED)
        inputs, divisor = self.prepare_input(real, self.device), shares[0]
        if (weight := loss_weight or self._loss_weight) is not None:
            (divisor,), check = loss_divisors(self._job, weight, [inputs], SAMPLED, shares)
            check()
        loss = first_loss(self._job.loss_func(inputs, self._output_of(inputs)))
        loss = mean_over(self._job.mesh_axes, divided(loss, divisor), SAMPLED)
        reshard(self.model)  # otherwise weights gathered here would outlive a change of the shards
        return loss

    def gather_for_metrics(self, values: Any) -> Any:
        """Gather what was computed from a batch from all replicas, without the samples that fill its last batch.

        Args:
            values: Tensors of one row per sample, of equal shapes on every rank, in containers of any kind; of numbers
                there is one per replica in the result. Computed from the batch that a loader of Meshwright
                (``dataloader`` or one of ``global_batch_loader``) has yielded last. Of a pipeline, the rank with the
                last stage has the model's output, and its values count; on others they may be anything.

        Returns:
            The same containers, on every rank, with the samples of the global batch in their order.

        Raises:
            DataError: When rows are not those of the batch, or shapes differ between ranks.
        """
        return gather_for_metrics(self._job, values)

    def clip_grad_norm(self, max_norm: float | None = None, norm_type: float | None = None) -> torch.Tensor:
        """Clip the gradients of the whole model, sharded or not; return their norm before clipping (0-dim).

        Args:
            max_norm: Largest norm allowed; None: ``max_grad_norm``, or measured only where there is none.
            norm_type: p of the p-norm; None: ``grad_clip``'s, or 2.
        """
        limit = next((each for each in (max_norm, self.max_grad_norm) if each is not None), float("inf"))
        p = norm_type if norm_type is not None else self.grad_norm_type
        return clip_gradients(self.model.parameters(), self.optim, limit, p, self._job.stages)

    def clip_grad_value(self, clip_value: float) -> None:
        """Clamp every element of the gradients to ``[-clip_value, clip_value]``, sharded or not."""
        clip_gradient_values(self.model.parameters(), self.optim, clip_value)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate the gradients of a forward and backward inside, which the next one outside reduces.

        For hand-written loops.
        """
        with self._job.micro_batch(False):
            yield

    def abandon(self) -> None:
        """Recover from an error in forward or backward, without gradients; for hand-written loops, on every rank."""
        abandon(self._job, self.optim)

    def dry_run(self, batch: Any) -> DryRun:
        """Run forward and backward once and leave weights, buffers, gradients and random generators as they were."""
        with preserved_rng(), restored_buffers(self.model) as restore_buffers:
            start = time.perf_counter()
            self._forward_backward(*self._cut(batch))
            synchronize_device(self.device)
            elapsed = time.perf_counter() - start
            restore_buffers()
        self.model.zero_grad(set_to_none=True)
        if self.optim is not None:
            self.optim.zero_grad()  # an offloaded optimizer has gradients on the host
        return DryRun(elapsed, peak_memory_bytes(self.device))

    def __repr__(self) -> str:
        return f"Accelerated({self.strategy}, {type(self.optim).__name__}, {self.device})"


# --- The mean over a global batch, of which every rank and micro-batch has a part


class MeanLoss:
    """The mean of every step's loss, whose collective also checks that ranks are in one epoch and gather alike.

    Args:
        job: Gives the ranks, and the gather-order check.
        dataloader: Its ``epoch`` is compared, if it has one.
    """

    def __init__(self, job: Job, dataloader: Any) -> None:
        self._job, self._dataloader = job, dataloader if guards_are_on() else None
        self._checked_epoch: int | None = None  # the host reads the mean once per epoch
        self._numbers: Callable[[], Sequence[int]] | None = None
        self._sent: HostCopy | None = None  # on a GPU: the sums of the last step
        self._sums: Sequence[float] = ()

    def add_up(self, numbers: Callable[[], Sequence[int]]) -> Callable[[], Sequence[float]]:
        """See :meth:`Accelerated.add_up`."""
        self._numbers, self._sent, self._sums = numbers, None, ()
        return lambda: self._sums

    @property
    def carries(self) -> bool:
        """True where numbers are added up beside the loss."""
        return self._numbers is not None

    def __call__(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the mean over the ranks that take samples of one step; collective.

        Raises:
            DataError: When other ranks are in another epoch; on a GPU at the first step of an epoch.
            ModelError: When other ranks have run other sharded layers; on a GPU one step late.
        """
        epoch, check = getattr(self._dataloader, "epoch", None), self._job.gather_order_check
        order = check.numbers() if check is not None else []
        num_ranks = math.prod(map(self._job.size, STEP_AXES))
        epochs = _epoch_numbers(epoch, num_ranks) if isinstance(epoch, int) else []
        carried = self._numbers() if self._numbers is not None else []
        further = [*epochs, *order, *carried]
        if not further:
            return mean_over(self._job.mesh_axes, loss, STEP_AXES)
        own = loss.detach().to(torch.promote_types(loss.dtype, torch.float32))
        numbers = torch.stack([own, *(torch.full_like(own, each) for each in further)])
        sums = sum_over(self._job.mesh_axes, numbers, STEP_AXES)
        if isinstance(epoch, int):
            self._check_epoch(epoch, sums[1 : 1 + len(epochs)], num_ranks)
        if check is not None:
            check.check(sums[1 + len(epochs) : 1 + len(epochs) + len(order)])
        if carried:
            self._carry(sums[-len(carried) :])
        return (sums[0] / num_ranks).to(loss.dtype)

    def _carry(self, sums: torch.Tensor) -> None:
        """Note the sums of :meth:`add_up`, over the ranks that share samples, too."""
        others = tuple(axis for axis, _ in self._job.mesh_axes.sizes if axis not in SAMPLED)
        now = HostCopy(sum_over(self._job.mesh_axes, sums, others))
        known, self._sent = (self._sent, now) if sums.device.type == "cuda" else (now, None)
        if known is not None:
            self._sums = known.tolist()

    def _check_epoch(self, epoch: int, sums: torch.Tensor, num_ranks: int) -> None:
        # On a GPU the host would wait for the device in every step.
        is_read = epoch != self._checked_epoch or sums.device.type == "cpu"
        if is_read and sums.tolist() != [number * num_ranks for number in _epoch_numbers(epoch, num_ranks)]:
            raise DataError(
                "Ranks are in different epochs: they would take some samples twice, and others never",
                expected="every rank walks the data loader alike",
                got=f"epoch {epoch} on this rank, {float(sums[0]) / num_ranks:g} on average",
                fix="walk it on all ranks or on none (who looks at the data alone takes dataloader.dataset); or call "
                "its set_epoch with one number on every rank",
            )
        self._checked_epoch = epoch


def _epoch_numbers(epoch: int, num_ranks: int) -> list[int]:
    """Return numbers that tell epochs apart, and whose sum over the ranks is exact in fp32.

    The square as well: a rank in epoch 1 between others in 0 and 2 would find its own epoch for the mean.
    """
    limit = MAX_EXACT_SUM // num_ranks
    return [epoch % limit, epoch * epoch % limit]


def divided(loss: torch.Tensor, divisor: Divisor) -> torch.Tensor:
    """Divide a micro-batch's loss; one without items, whose mean is nan, gives 0 without gradients."""
    if isinstance(divisor, torch.Tensor):
        return (loss.nan_to_num().where(divisor.isinf(), loss) / divisor).to(loss.dtype)
    return loss / divisor
