"""Execute a training step over pipeline stages, and finish the gradients of this rank's stages.

A step runs one of torch's pipeline schedules on a spliced model ([Note: splicing] in ``splice.py``); a plain call of
the model runs its stages as a chain (``chain.py``). Either way :class:`StageGradients` then sums the gradients of
parameters that several ranks train and averages over data-parallel replicas.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from meshwright.inspect import captured, hand_over_micro_batches, hand_over_stages
from meshwright.methods.gradient_averaging import GradientAverager
from meshwright.methods.pipeline.chain import (
    Boundary,
    PipelineRank,
    StageOutput,
    run_chain,
    shared_loss,
    shared_output,
)
from meshwright.methods.pipeline.schedules import SCHEDULES, answered, listed, live_peaks
from meshwright.methods.pipeline.splice import (
    HiddenState,
    Splice,
    draw_seeds,
    drawing,
    keeping_loss_here,
    loss_stays_here,
)
from meshwright.nn import abandon_units, reshard
from meshwright.nn.batches import leaves_of, tensors_of
from meshwright.optim import local_tensor
from meshwright.runtime import any_rank, preserved_rng, same_on_every_rank
from meshwright.runtime.torch_internals.autograd import queue_callback
from meshwright.runtime.torch_internals.tensors import storage_identity

if TYPE_CHECKING:
    from meshwright.methods.pipeline.stage_module import StageModule


class StageGradients:
    """Sums and averages the gradients of one pipeline rank.

    Args:
        rank: This rank.
        shared: Parameters that several pipeline ranks train, each with those ranks (ascending); in the same order on
            all ranks.
        averagers: Average over replicas where parameters are not sharded; empty without replicas, or under FSDP2.
    """

    def __init__(
        self,
        rank: PipelineRank,
        shared: list[tuple[nn.Parameter, tuple[int, ...]]],
        averagers: Sequence[GradientAverager],
    ) -> None:
        self._rank, self._averagers = rank, averagers
        self._shared: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for parameter, ranks in shared:
            self._shared.setdefault(ranks, []).append(parameter)
        self._aside: list[tuple[nn.Parameter, torch.Tensor | None]] = []  # gradients exchanged in earlier steps
        self._accumulating = False  # a backward pass has run since the last exchange

    def begin(self, reduces: bool) -> None:
        """Set gradients aside that are sums over stages already; call it before every backward pass.

        Args:
            reduces: Whether :meth:`exchange` follows; else the next pass adds to the gradients of this one.
        """
        if not self._accumulating:
            every = [p for parameters in self._shared.values() for p in parameters if p.requires_grad]
            self._aside = [(parameter, parameter.grad) for parameter in every]
            for parameter in every:
                parameter.grad = None
        self._accumulating = not reduces

    def accumulate(self, model: nn.Module) -> None:
        """Keep gradients unreduced and weights gathered until :meth:`reduce`; call it before a step's backward."""
        if isinstance(model, FSDPModule):
            _set_ending(model, False)

    def abandon(self, model: nn.Module) -> None:
        """Drop the gradients of a failed step and return the model to its state between steps."""
        abandon_units(model)
        if isinstance(model, FSDPModule):
            _set_ending(model, True)
        model.zero_grad()
        self._aside, self._accumulating = [], False

    def reduce(self, model: nn.Module) -> None:
        """Let FSDP2 average over the replicas, once for all micro-batches of a step."""
        if isinstance(model, FSDPModule):
            _end(model)

    def exchange(self) -> None:
        """Sum the gradients of shared parameters over the ranks that train them; average over replicas without FSDP2.

        Gradients that :meth:`begin` has set aside are added back.
        """
        for ranks, parameters in self._shared.items():
            if self._rank.index in ranks:
                trained = [parameter for parameter in parameters if parameter.requires_grad]
                for dtype in dict.fromkeys(parameter.dtype for parameter in trained):
                    self._sum(ranks, [parameter for parameter in trained if parameter.dtype == dtype])
        for parameter, before in self._aside:
            if before is not None and parameter.grad is not None:
                local_tensor(parameter.grad).add_(local_tensor(before))
        self._aside, self._accumulating = [], False
        for averager in self._averagers:
            averager.average()

    @torch.no_grad()
    def _sum(self, ranks: tuple[int, ...], parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        own = [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
        parts = {self._rank.index: torch.cat([gradient.flatten() for gradient in own])}
        operations = []
        for rank in ranks:
            if rank == self._rank.index:
                continue
            peer = dist.get_global_rank(self._rank.group, rank)
            parts[rank] = torch.empty_like(parts[self._rank.index])
            operations.append(dist.P2POp(dist.isend, parts[self._rank.index], peer, self._rank.group))
            operations.append(dist.P2POp(dist.irecv, parts[rank], peer, self._rank.group))
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        total = parts[ranks[0]]
        # Every rank adds in the same order, so the sums are bitwise equal.
        for rank in ranks[1:]:
            total = total + parts[rank]
        for gradient, whole in zip(own, total.split([gradient.numel() for gradient in own]), strict=True):
            gradient.copy_(whole.view_as(gradient))


def _set_ending(model: Any, ends: bool) -> None:
    """Set whether each backward pass ends with reduced gradients and sharded weights, as plain calls do."""
    model.set_is_last_backward(ends)
    model.set_reshard_after_backward(ends)
    model.set_requires_gradient_sync(ends)
    if hasattr(model, "finalize_backward"):  # torch 2.13 has none yet
        model.set_manual_backward_finalization(not ends)


def _end(model: Any) -> None:
    """Reduce the gradients of all FSDP2 units, reshard their weights, and return to the settings of plain calls."""
    if hasattr(model, "finalize_backward"):
        model.set_reshard_after_backward(True)
        model.set_requires_gradient_sync(True)
        model.finalize_backward()
        _set_ending(model, True)
    else:
        from torch.distributed.pipelining import PipelineStage

        # What torch's schedules end a step with.
        PipelineStage.perform_reduce_grad(SimpleNamespace(submod=model), 1)  # type: ignore[arg-type]


# --- A training step by one of torch's schedules
#
# Every rank of a pipeline has the whole batch, so the schedules are given micro-batch numbers, and a stage looks up its
# own inputs. The last stage ends with the loss: only hidden states travel.

# Schedules are cached by batch shape: torch takes long to build them.
_MOST_SCHEDULES = 4

Call = Callable[[Any], Any]
"""Calls the model on its input."""
Loss = Callable[[Any, Any], torch.Tensor]
"""Computes a micro-batch's loss from its input and output, scaled so that the losses add up."""
Measure = Callable[[], contextlib.AbstractContextManager[Any]]
"""Makes a context whose result has ``bytes`` and ``bytes_of``: what a forward inside saves for backward."""


class PipelineEngine:
    """Runs this rank's stages in step with those of the other ranks.

    Args:
        rank: This rank.
        splice: Runs single stages of the model.
        schedule: Name of the schedule.

    Attributes:
        saved_bytes: Most bytes saved for backward at once on this rank in the last step that was measured.
    """

    def __init__(self, rank: PipelineRank, splice: Splice, schedule: str) -> None:
        self.rank, self._splice, self._schedule = rank, splice, schedule
        self._boundaries: dict[int, Boundary] = {}
        self._schedules: dict[Any, tuple[Any, list[StageModule]]] = {}
        self.saved_bytes = 0
        self._shares_output = False  # while generating: every rank needs the logits
        self._reduces = True  # False: the gradients of a plain backward pass only accumulate

    def finish(
        self, model: nn.Module, gradients: StageGradients, compute: torch.dtype | None, *, exchanges: bool = False
    ) -> None:
        """Take over the model once all methods have been applied.

        Args:
            model: The model that training calls.
            gradients: Finishes its gradients.
            compute: Dtype in which gathered weights compute; None: their own.
            exchanges: Whether ranks of other pipelines take part in a stage, as those with its other experts do.
        """
        self._exchanges = exchanges
        self._model, self._gradients = model, gradients
        self._splice.dtype = compute or next((p.dtype for p in model.parameters() if p.is_floating_point()), None)

    # Plain calls of the model

    def around_model(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replace the model's forward: run one stage under a schedule, else all stages as a chain."""

        def call() -> Any:
            return self._splice.until_stage_end(lambda: forward(*args, **kwargs))

        if self._splice.is_running:
            return call()
        self._splice.take_records()  # drop those of a failed pass
        output, self._boundaries = run_chain(self.rank, self._splice, call, *draw_seeds(1))
        taken = self._splice.take_records()
        hand_over_stages({stage: [each.record for each in runs[0]] for stage, runs in taken.items()})
        return shared_output(self.rank, output) if self._shares_output else output

    def around_inner(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replace the forward of a model inside the model, such as the one on which peft calls ``generate``."""
        return forward(*args, **kwargs) if self._splice.is_running else self.around_model(forward, *args, **kwargs)

    def around_generate(self, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replace the model's ``generate``: give every pipeline rank the logits and the same random draws.

        There is no key-value cache: a rank's would hold its own blocks only, and block 0's counts the positions.
        """
        seed = torch.randint(2**62, (), device=self.rank.device)
        dist.broadcast(seed, src=self.rank.peer(self.rank.last_stage), group=self.rank.group)
        self._shares_output = True
        try:
            with preserved_rng():
                torch.manual_seed(int(seed))
                return generate(*args, **{**kwargs, "use_cache": False})
        finally:
            self._shares_output = False

    def shared_output(self, output: Any) -> Any:
        """Return what the rank with the last stage passes, on every rank of the pipeline; collective."""
        return shared_output(self.rank, output)

    def loss(self, loss_func: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Wrap a loss function so that every rank gets the loss, and its backward reaches every stage."""

        def everywhere(inputs: Any, output: Any) -> Any:
            if loss_stays_here():
                return loss_func(inputs, output)
            (seed,) = draw_seeds(1)
            if isinstance(output, StageOutput):
                hand_over_stages({})
                return self._finishing(shared_loss(self.rank, output, None))
            try:
                with captured() as records, drawing(seed), keeping_loss_here():
                    loss = loss_func(inputs, output)
            except Exception:
                # The other ranks wait for a loss.
                shared_loss(self.rank, None, None)
                raise
            hand_over_stages({self.rank.last_stage: records})
            first = loss[0] if isinstance(loss, list | tuple) else loss
            first = self._finishing(shared_loss(self.rank, None, first))
            return [first, *loss[1:]] if isinstance(loss, list | tuple) else first

        return everywhere

    def _finishing(self, loss: torch.Tensor) -> torch.Tensor:
        """Put a hook on the start of the loss's backward, which schedules the gradient exchange for its end."""
        if loss.requires_grad:
            loss = loss.view_as(loss)
            loss.register_hook(self._begin_backward)
        return loss

    def _begin_backward(self, gradient: torch.Tensor) -> None:
        self._gradients.begin(self._reduces)
        if self._reduces:
            queue_callback(self._gradients.exchange)

    @contextlib.contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """Average and exchange gradients at the end of a plain backward inside only if it ``is_last``."""
        before, self._reduces = self._reduces, is_last
        try:
            yield
        finally:
            self._reduces = before

    # Steps by a schedule

    def step(self, inputs: list[Any], call: Call, loss: Loss, measure: Measure | None = None) -> torch.Tensor:
        """Run forward and backward of all micro-batches, then average and exchange gradients if they are complete.

        Args:
            inputs: Input of each micro-batch for ``call`` and ``loss``; of equal shapes, the same on all pipeline
                ranks.
            call: Calls the model.
            loss: Computes a micro-batch's loss.
            measure: Measures what the first micro-batch saves for backward, to set ``saved_bytes``.

        Returns:
            The sum of the micro-batches' losses, equal on every rank of the pipeline.

        Raises:
            Exception: On every rank of the world, when a stage failed on any of them.
        """

        def run(given: Any) -> Any:
            output = call(given)
            return output if isinstance(output, HiddenState) else loss(given, output)

        schedule, modules = self._prepared(inputs, run)
        seeds = draw_seeds(len(inputs))
        for module in modules:
            module.begin(inputs, run, seeds, measure)
        self._splice.take_records()
        numbers = torch.arange(len(inputs))
        losses: list[torch.Tensor] = []
        holds_last = self.rank.holds(self.rank.last_stage)
        self._gradients.begin(self._reduces)
        self._gradients.accumulate(self._model)
        schedule.step(number=numbers, **({"target": numbers, "losses": losses} if holds_last else {}))
        self._raise_together(modules)
        if measure is not None:
            self.saved_bytes = self._in_flight(modules, len(inputs)) + _saved_inputs(modules, inputs)
        if self._reduces:
            self._gradients.reduce(self._model)
            self._gradients.exchange()
        hand_over_micro_batches(self._splice.take_records())
        total = torch.zeros((), device=self.rank.device)
        if losses:
            total += torch.stack([each.detach().reshape(()) for each in losses]).sum()
        dist.all_reduce(total, group=self.rank.group)
        return total

    def _in_flight(self, modules: list[StageModule], num_micro_batches: int) -> int:
        sizes = [0] * len(self.rank.stage_ranks)
        for module in modules:
            sizes[module.stage] = module.saved_bytes
        cut = self._splice.cut
        return live_peaks(self._schedule, cut.num_ranks, cut.stages_per_rank, num_micro_batches, sizes)[self.rank.index]

    def _prepared(self, inputs: list[Any], run: Call) -> tuple[Any, list[StageModule]]:
        """Return the schedule for batches of these shapes, building it on first use."""
        key = (len(inputs), _shapes(inputs[0]), self._model.training)
        if key not in self._schedules:
            self._find_boundaries(inputs[0], run)
            while len(self._schedules) >= _MOST_SCHEDULES:
                del self._schedules[next(iter(self._schedules))]
            self._schedules[key] = self._build(len(inputs))
        return self._schedules[key]

    def _find_boundaries(self, inputs: Any, run: Call) -> None:
        """Run one forward pass to learn the shapes of hidden states; it changes nothing else."""
        buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        # A chain ends on all ranks of its pipeline even if a stage fails, so the error can be agreed on; but not on
        # those of other pipelines that wait for this stage.
        agreeing = contextlib.nullcontext() if self._exchanges else same_on_every_rank()
        with agreeing, preserved_rng(), torch.no_grad(), captured():
            run(inputs)
        for buffer, before in buffers:
            buffer.copy_(before)
        reshard(self._model)

    def _build(self, num_micro_batches: int) -> tuple[Any, list[StageModule]]:
        from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

        from meshwright.methods.pipeline.stage_module import Stage, StageModule, dw_builder
        from meshwright.runtime.torch_internals.pipelining import letting_go

        stages, modules, builder = [], [], dw_builder(self._model)
        for number in self.rank.stages:
            own = functools.partial(self._parameters_of, number)
            module = StageModule(
                self._splice, number, self._boundaries, own, self.rank.device, exchanges=self._exchanges
            )
            modules.append(module)
            stages.append(Stage.build(modules[-1], self.rank, builder))
        kind: type[Any] = get_schedule_class(SCHEDULES[self._schedule].torch_name)
        several = issubclass(kind, PipelineScheduleMulti)
        schedule = (letting_go(kind) if several else kind)(
            stages if several else stages[0],
            num_micro_batches,
            loss_fn=lambda output, number: output.sum(),
            scale_grads=False,
        )
        if several:
            rows = listed(row for _, row in sorted(schedule.pipeline_order_with_comms.items()))
            schedule.let_go(answered(rows, self.rank.stage_ranks)[self.rank.index])
        return schedule, modules

    def _parameters_of(self, stage: int) -> Iterator[nn.Parameter]:
        """Yield the parameters that a stage may use, looked up at each call because sharding swaps them."""
        for name, parameter in self._model.named_parameters():
            if self._splice.cut.stage_of(name) in (None, stage):
                yield parameter

    def abandon(self) -> None:
        """Drop the gradients of a failed step; see :meth:`StageGradients.abandon`."""
        self._gradients.abandon(self._model)

    def _raise_together(self, modules: list[StageModule]) -> None:
        errors = [module.error for module in modules if module.error is not None]
        # The flag cannot ride on an exchange that the step has anyway: those are on the device, which the host would
        # have to wait for, and what is read a step later comes after the update. Hosts agree in log n messages, while
        # the devices work on what the schedule has issued.
        if any_rank(bool(errors)):
            self.abandon()
            with same_on_every_rank():
                for error in errors:
                    raise error


def _saved_inputs(modules: list[StageModule], inputs: list[Any]) -> int:
    """Return the bytes of the inputs of all micro-batches of which stages save anything; views share a storage."""
    saved = set().union(*(module.saved_inputs for module in modules))
    listed = (tensor for each in inputs for place, tensor in enumerate(tensors_of(each)) if place in saved)
    storages = {storage_identity(each): each.nbytes() for each in map(torch.Tensor.untyped_storage, listed)}
    return sum(storages.values())


def _shapes(inputs: Any) -> tuple[Any, ...]:
    return tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf) for leaf in leaves_of(inputs)
    )
