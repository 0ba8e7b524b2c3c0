"""Execute a training step over pipeline stages, and average the gradients of the stages."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule

from meshwright.inspect import captured, hand_over_micro_batches, hand_over_stages
from meshwright.methods.gradient_averaging import GradientAverager
from meshwright.methods.pipeline.chain import (
    Boundary,
    Line,
    StageOutput,
    flag_device,
    run_chain,
    shared_loss,
    shared_output,
)
from meshwright.methods.pipeline.schedules import SCHEDULES, live_peaks
from meshwright.methods.pipeline.splice import Handed, Splice, draw_seeds, drawing
from meshwright.nn import abandon_units, reshard
from meshwright.nn.batches import leaves_of
from meshwright.optim import local_tensor
from meshwright.runtime import preserved_rng, same_on_every_rank

if TYPE_CHECKING:
    from meshwright.methods.pipeline.stage_module import StageModule


class StageGradients:
    """Finishes the gradients of one rank of a pipeline.

    Args:
        line: The rank's place.
        shared: Parameters that several ranks train, and which (ascending); the same order on all.
        averager: Averages over replicas where parameters are not sharded; None where there are none, or FSDP2 does it.
    """

    def __init__(
        self, line: Line, shared: list[tuple[nn.Parameter, tuple[int, ...]]], averager: GradientAverager | None
    ) -> None:
        self._line, self._averager = line, averager
        self._shared: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for parameter, ranks in shared:
            self._shared.setdefault(ranks, []).append(parameter)
        self._aside: list[tuple[nn.Parameter, torch.Tensor | None]] = []  # exchanged before the present backward passes
        self._accumulating = False  # since the last exchange

    def begin(self, reduces: bool) -> None:
        """Before every backward pass: gradients that are sums over stages already are not to be summed once more.

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
        """Before the backward passes of a step: gradients are kept whole, weights that were gathered stay so."""
        if isinstance(model, FSDPModule):
            _set_ending(model, False)

    def abandon(self, model: nn.Module) -> None:
        """After a step that failed: no gradient of it stays, and plain calls are as before."""
        abandon_units(model)
        if isinstance(model, FSDPModule):
            _set_ending(model, True)
        model.zero_grad()
        self._aside, self._accumulating = [], False

    def reduce(self, model: nn.Module) -> None:
        """After them: FSDP2 averages over the replicas, once."""
        if isinstance(model, FSDPModule):
            _end(model)

    def exchange(self) -> None:
        """Sum the gradients of shared parameters, so that they are equal wherever these are trained.

        It averages over replicas too, where FSDP2 has not.
        """
        for ranks, parameters in self._shared.items():
            if self._line.rank in ranks:
                for same in _by_dtype([parameter for parameter in parameters if parameter.requires_grad]):
                    self._sum(ranks, same)
        for parameter, before in self._aside:
            if before is not None and parameter.grad is not None:
                local_tensor(parameter.grad).add_(local_tensor(before))
        self._aside, self._accumulating = [], False
        if self._averager is not None:
            self._averager.average()

    @torch.no_grad()
    def _sum(self, ranks: tuple[int, ...], parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        own = [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
        parts = {self._line.rank: torch.cat([gradient.flatten() for gradient in own])}
        operations = []
        for rank in ranks:
            if rank == self._line.rank:
                continue
            peer = dist.get_global_rank(self._line.group, rank)
            parts[rank] = torch.empty_like(parts[self._line.rank])
            operations.append(dist.P2POp(dist.isend, parts[self._line.rank], peer, self._line.group))
            operations.append(dist.P2POp(dist.irecv, parts[rank], peer, self._line.group))
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        total = parts[ranks[0]]
        for rank in ranks[1:]:  # in one order everywhere: the sums are equal to the last bit
            total = total + parts[rank]
        for gradient, whole in zip(own, total.split([gradient.numel() for gradient in own]), strict=True):
            gradient.copy_(whole.view_as(gradient))


def _set_ending(model: Any, ends: bool) -> None:
    """Whether every backward pass ends with reduced gradients and sharded weights, as in plain calls."""
    model.set_is_last_backward(ends)
    model.set_reshard_after_backward(ends)
    model.set_requires_gradient_sync(ends)
    if hasattr(model, "finalize_backward"):  # torch 2.13 has none yet
        model.set_manual_backward_finalization(not ends)


def _end(model: Any) -> None:
    """Reduce all units, free whole weights, and wait; plain calls are as before."""
    if hasattr(model, "finalize_backward"):
        model.set_reshard_after_backward(True)
        model.set_requires_gradient_sync(True)
        model.finalize_backward()
        _set_ending(model, True)
    else:
        from torch.distributed.pipelining import PipelineStage

        # What torch's schedules end a step with.
        PipelineStage.perform_reduce_grad(SimpleNamespace(submod=model), 1)  # type: ignore[arg-type]


def _by_dtype(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    found: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        found.setdefault(parameter.dtype, []).append(parameter)
    return list(found.values())


# --- A training step over the stages of a pipeline: torch's schedules, run on spliced models.
#
# The schedules see micro-batches as numbers: every rank of a pipeline has the whole batch, and a stage looks up its own
# inputs. They end with the loss, so that only hidden states travel.

_SHAPES_KEPT = 4  # schedules of as many batch shapes stay: each holds room for the hidden states of its micro-batches

Call = Callable[[Any], Any]
"""Calls the model on its input."""
Loss = Callable[[Any, Any], torch.Tensor]
"""The loss of one micro-batch's input and output, as it is to be added up."""
Measure = Callable[[], contextlib.AbstractContextManager[Any]]
"""A context whose result counts ``bytes`` that forward inside saves for backward."""


class PipelineEngine:
    """Runs the stages that this rank holds, in step with those of the others.

    Args:
        line: This rank's place.
        splice: Of the model.
        schedule: Name of the schedule.
    """

    def __init__(self, line: Line, splice: Splice, schedule: str) -> None:
        self.line, self._splice, self._schedule = line, splice, schedule
        self._boundaries: dict[int, Boundary] = {}
        self._schedules: dict[Any, tuple[Any, list[StageModule]]] = {}
        self.saved_bytes = 0
        self._shares_loss = False  # a loss function called inside another is that one's part
        self._shares_output = False  # while text is generated, every rank needs the logits
        self._reduces = True  # False: gradients of a plain backward pass only accumulate

    def finish(self, model: nn.Module, gradients: StageGradients, compute: torch.dtype | None) -> None:
        """Take the model as all methods have left it.

        Args:
            model: What is called.
            gradients: Finishes its gradients.
            compute: What gathered weights compute in; None: as they are.
        """
        self._model, self._gradients = model, gradients
        self._splice.dtype = compute or next((p.dtype for p in model.parameters() if p.is_floating_point()), None)

    # What a plain call of the model does.

    def around_model(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In the place of the model's forward: one stage where a schedule runs, else all of them in a chain."""

        def call() -> Any:
            return self._splice.until_handed(lambda: forward(*args, **kwargs))

        if self._splice.is_running:
            return call()
        self._splice.take_records()  # of a pass that failed
        output, self._boundaries = run_chain(self.line, self._splice, call, *draw_seeds(1))
        taken = self._splice.take_records()
        hand_over_stages({stage: [each.record for each in runs[0]] for stage, runs in taken.items()})
        return shared_output(self.line, output) if self._shares_output else output

    def around_inner(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In the place of the forward of a model inside the model, on which peft calls ``generate``."""
        return forward(*args, **kwargs) if self._splice.is_running else self.around_model(forward, *args, **kwargs)

    def around_generate(self, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In the place of the model's ``generate``: all ranks of the pipeline get the logits, and draw the same tokens.

        Without a cache: a rank's has the keys and values of its own blocks alone, and positions are counted by block 0.
        """
        seed = torch.randint(2**62, (), device=self.line.device)
        dist.broadcast(seed, src=self.line.peer(self.line.last), group=self.line.group)
        self._shares_output = True
        try:
            with preserved_rng():
                torch.manual_seed(int(seed))
                return generate(*args, **{**kwargs, "use_cache": False})
        finally:
            self._shares_output = False

    def loss(self, loss_func: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """A loss function that knows the loss on every rank and whose backward reaches every stage."""

        def everywhere(inputs: Any, output: Any) -> Any:
            if self._splice.is_running or self._shares_loss:
                return loss_func(inputs, output)
            (seed,) = draw_seeds(1)
            if isinstance(output, StageOutput):
                hand_over_stages({})
                return self._finishing(shared_loss(self.line, output.token, None))
            self._shares_loss = True
            try:
                with captured() as records, drawing(seed):
                    loss = loss_func(inputs, output)
            except Exception:
                shared_loss(self.line, None, None)  # the others wait for a loss
                raise
            finally:
                self._shares_loss = False
            hand_over_stages({self.line.last: records})
            first = loss[0] if isinstance(loss, list | tuple) else loss
            first = self._finishing(shared_loss(self.line, None, first))
            return [first, *loss[1:]] if isinstance(loss, list | tuple) else first

        return everywhere

    def _finishing(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the first thing of its backward is to ask for what follows its last."""
        if loss.requires_grad:
            loss = loss.view_as(loss)
            loss.register_hook(self._begin_backward)
        return loss

    def _begin_backward(self, gradient: torch.Tensor) -> None:
        self._gradients.begin(self._reduces)
        if self._reduces:
            Variable._execution_engine.queue_callback(self._gradients.exchange)

    @contextlib.contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """Around a plain forward and backward; only the last one's gradients are averaged and exchanged."""
        before, self._reduces = self._reduces, is_last
        try:
            yield
        finally:
            self._reduces = before

    # A step by a schedule.

    def step(self, inputs: list[Any], call: Call, loss: Loss, measure: Measure | None = None) -> torch.Tensor:
        """Forward and backward of all micro-batches, gradients averaged and exchanged unless they only accumulate.

        Args:
            inputs: Of each micro-batch, for ``call`` and ``loss``: equal shapes, equal on all ranks of the pipeline.
            call: Calls the model.
            loss: Makes a micro-batch's loss of its output.
            measure: Records what the first micro-batch saves; :attr:`saved_bytes` then tells what all in flight do.

        Returns:
            The sum of the micro-batches' losses, equal on every rank of the pipeline.

        Raises:
            Exception: On every rank of the world, when a stage failed on any of them.
        """

        def run(given: Any) -> Any:
            output = call(given)
            return output if isinstance(output, Handed) else loss(given, output)

        schedule, modules = self._prepared(inputs, run)
        seeds = draw_seeds(len(inputs))
        for module in modules:
            module.begin(inputs, run, seeds, measure)
        self._splice.take_records()
        numbers = torch.arange(len(inputs))
        losses: list[torch.Tensor] = []
        holds_last = self.line.is_here(self.line.last)
        self._gradients.begin(self._reduces)
        self._gradients.accumulate(self._model)
        schedule.step(number=numbers, **({"target": numbers, "losses": losses} if holds_last else {}))
        self._raise_together(modules)
        if measure is not None:
            self.saved_bytes = self._in_flight(modules, len(inputs))
        if self._reduces:
            self._gradients.reduce(self._model)
            self._gradients.exchange()
        hand_over_micro_batches(self._splice.take_records())
        total = torch.zeros((), device=self.line.device)
        if losses:
            total += torch.stack([each.detach().reshape(()) for each in losses]).sum()
        dist.all_reduce(total, group=self.line.group)
        return total

    def _in_flight(self, modules: list[StageModule], num_micro_batches: int) -> int:
        sizes = [0] * len(self.line.ranks)
        for module in modules:
            sizes[module.stage] = module.saved_bytes
        cut = self._splice.cut
        return live_peaks(self._schedule, cut.num_ranks, cut.stages_per_rank, num_micro_batches, sizes)[self.line.rank]

    def _prepared(self, inputs: list[Any], run: Call) -> tuple[Any, list[StageModule]]:
        """Return the schedule for batches of these shapes; built the first time they come."""
        key = (len(inputs), _shapes(inputs[0]), self._model.training)
        if key not in self._schedules:
            self._learn(inputs[0], run)
            while len(self._schedules) >= _SHAPES_KEPT:
                del self._schedules[next(iter(self._schedules))]
            self._schedules[key] = self._build(len(inputs))
        return self._schedules[key]

    def _learn(self, inputs: Any, run: Call) -> None:
        """One forward pass that leaves nothing behind but the shapes of what goes between stages."""
        buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        # A chain ends on all ranks of its pipeline, also when it fails.
        with same_on_every_rank(), preserved_rng(), torch.no_grad(), captured():
            run(inputs)
        for buffer, before in buffers:
            buffer.copy_(before)
        reshard(self._model)

    def _build(self, num_micro_batches: int) -> tuple[Any, list[StageModule]]:
        from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

        from meshwright.methods.pipeline.stage_module import Stage, StageModule

        stages, modules = [], []
        for number in self.line.stages:
            own = functools.partial(self._parameters_of, number)
            modules.append(StageModule(self._splice, number, self._boundaries, own, self.line.device))
            stages.append(Stage.build(modules[-1], self.line))
        kind = get_schedule_class(SCHEDULES[self._schedule].torch_name)
        schedule = kind(
            stages if issubclass(kind, PipelineScheduleMulti) else stages[0],  # type: ignore[arg-type]
            num_micro_batches,
            loss_fn=lambda output, number: output.sum(),
            scale_grads=False,
        )
        return schedule, modules

    def _parameters_of(self, stage: int) -> Iterator[nn.Parameter]:
        """The parameters that a stage may use, as they are when asked: sharding exchanges them."""
        for name, parameter in self._model.named_parameters():
            if self._splice.cut.stage_of(name) in (None, stage):
                yield parameter

    def abandon(self) -> None:
        """After a failure: see :meth:`StageGradients.abandon`."""
        self._gradients.abandon(self._model)

    def _raise_together(self, modules: list[StageModule]) -> None:
        errors = [module.error for module in modules if module.error is not None]
        failed = torch.tensor(float(bool(errors)), device=flag_device(self.line))
        dist.all_reduce(failed, dist.ReduceOp.MAX)
        if failed.item():
            self.abandon()
            with same_on_every_rank():
                for error in errors:
                    raise error


def _shapes(inputs: Any) -> tuple[Any, ...]:
    return tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf) for leaf in leaves_of(inputs)
    )
