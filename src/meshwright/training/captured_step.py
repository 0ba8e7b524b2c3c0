"""Record the step of a job as one CUDA graph, and replay it: the host launches a graph in place of every kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from meshwright.data.loader import real_counts
from meshwright.errors import ModelError, StrategyError, join_names
from meshwright.methods.compile import Compile
from meshwright.nn.batches import leaves_of, map_tree
from meshwright.optim.guarded_step import inner_optimizer
from meshwright.training.accelerated import Accelerated, StepResult

_METHODS = {"parallel_mode", "amp_native", "half", "compile", "module_replace", "gradient_accumulation", "grad_clip"}
"""Methods that neither exchange anything nor ask the host for a decision."""


class CapturedStep:
    """A job's step as a CUDA graph, called like :meth:`Accelerated.step`.

    The first ``warm_steps`` calls are ordinary steps, the next one is recorded, and from then on the graph is replayed:
    the batch is copied into the memory that was recorded, and the learning-rate schedule goes on on the host. It pays
    where launching kernels takes longer than running them: in small models.

    Learning rates are numbers of the device from the beginning, so that schedules reach the graph. A batch of another
    shape, one that a loader has filled up, and steps that are profiled or in evaluation mode, are ordinary steps. After
    states were loaded, or other settings of a group were changed, the step is recorded anew.

    Args:
        job: The job, of ``accelerate``: on one GPU, with Adam or AdamW of torch.
        warm_steps: Ordinary steps before the recording, in which kernels are compiled and states are made.

    Raises:
        StrategyError: Where the job has a part that cannot be recorded, naming it.

    Example:
        >>> step = mw.CapturedStep(job)
        >>> for batch in job.dataloader:
        ...     result = step(batch)
    """

    def __init__(self, job: Accelerated, *, warm_steps: int = 3) -> None:
        if problem := _why_not(job):
            raise StrategyError(
                f"The step cannot be captured: {problem}",
                expected="one CUDA device, torch's Adam or AdamW, and nothing that the host decides or exchanges: "
                f"of the methods {join_names(sorted(_METHODS))}",
                got=f"{job.strategy} on {job.device}",
                fix="call job.step, or leave that part out",
            )
        assert job.optim is not None
        self.job, self._warm_steps = job, max(warm_steps, 1)
        self._optim = inner_optimizer(job.optim)
        self._stream = torch.cuda.Stream(job.device)
        self._rates = [torch.empty((), dtype=torch.float32, device=job.device) for _ in self._optim.param_groups]
        self._forget()

    def __call__(self, batch: Any) -> StepResult:
        """Take a step; see :meth:`Accelerated.step`. The result's tensors are the caller's."""
        self._bring_rates()
        if _is_special(self.job, batch):
            return self._plain(batch)
        if self._recorded_for != self._situation():
            self._forget()
        if self._num_warm < self._warm_steps:
            self._num_warm += 1
            return self._plain(batch)
        if self._graph is None:
            self._record(batch)
        if _shapes(batch) != self._shapes:
            return self._plain(batch)
        return self._replay(batch)

    def _forget(self) -> None:
        self._graph: torch.cuda.CUDAGraph | None = None
        self._given: list[torch.Tensor] = []  # the recorded batch
        self._shapes: Any = None
        self._result: StepResult | None = None
        self._num_warm = 0
        self._recorded_for = self._situation()

    def _situation(self) -> tuple[Any, ...]:
        """Return what a graph holds good for: the optimizer's states, its settings, and the way the model runs."""
        settings = [
            {key: value for key, value in group.items() if key not in ("params", "lr", "initial_lr")}
            for group in self._optim.param_groups
        ]
        return id(self._optim.state), settings, self.job.max_grad_norm

    def _bring_rates(self) -> None:
        """Put learning rates that were set as numbers into the graph's memory."""
        for group, rate in zip(self._optim.param_groups, self._rates, strict=True):
            if group["lr"] is not rate:
                rate.fill_(float(group["lr"]))
                group["lr"], group["capturable"] = rate, True

    def _plain(self, batch: Any) -> StepResult:
        """Take an ordinary step on the stream of the recording, where autograd's nodes have to be made."""
        current = torch.cuda.current_stream(self.job.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = self.job.step(batch)
        current.wait_stream(self._stream)
        return result

    def _record(self, batch: Any) -> None:
        job, scheduler = self.job, self.job.lr_scheduler
        given = map_tree(lambda each: _on(job.device, each), batch)
        graph = torch.cuda.CUDAGraph()
        job.lr_scheduler = None  # it runs on the host, after each replay
        try:
            job.optim.zero_grad()  # type: ignore[union-attr]
            torch.cuda.synchronize(job.device)
            with torch.cuda.graph(graph, stream=self._stream):
                result = job.step(given)
        except RuntimeError as error:
            self._forget()
            raise ModelError(
                "The step cannot be captured: something in it waits for the device",
                expected="a model and a loss without .item(), bool(tensor) and results of which data give the shape",
                got=(str(error).strip().splitlines() or [type(error).__name__])[0],
                fix="call job.step, or take it out; TORCH_SHOW_CPP_STACKTRACES=1 and "
                "torch.cuda.set_sync_debug_mode('error') around job.step name the line",
            ) from error
        finally:
            job.lr_scheduler = scheduler
        self._graph, self._result = graph, result
        self._given, self._shapes = leaves_of(given), _shapes(batch)

    def _replay(self, batch: Any) -> StepResult:
        assert self._graph is not None
        assert self._result is not None
        for place, value in zip(self._given, leaves_of(batch), strict=True):
            if isinstance(place, torch.Tensor):
                place.copy_(value, non_blocking=True)
        self._graph.replay()
        if self.job.lr_scheduler is not None:
            self.job.lr_scheduler.step()
        return StepResult(self._result.loss.clone(), self._result.grad_norm.clone(), skipped=False)


def _on(device: torch.device, each: Any) -> Any:
    return each.detach().to(device, copy=True) if isinstance(each, torch.Tensor) else each


def _is_special(job: Accelerated, batch: Any) -> bool:
    """Return whether a step is of a kind that is not recorded."""
    return job.is_profiled or not job.model.training or real_counts(batch) is not None


def _shapes(batch: Any) -> list[Any]:
    """Return shapes and types of a batch's tensors, and the values of all else."""
    return [(each.shape, each.dtype) if isinstance(each, torch.Tensor) else each for each in leaves_of(batch)]


def _why_not(job: Accelerated) -> str | None:
    """Return the part of a job that cannot be recorded; None where all can."""
    if job.optim is None:
        return "there is no optimizer"
    if job.device.type != "cuda":
        return f"CUDA graphs need a CUDA device, and this is {job.device}"
    others = [method.method_name for method in job.strategy.methods if method.method_name not in _METHODS]
    if others:
        return f"{join_names(others)} cannot be recorded"
    if any(isinstance(method, Compile) and method.is_captured(job.device) for method in job.strategy.methods):
        return "compile captures graphs of its own in this mode"
    if job.waits_in_steps:
        return "the host reads numbers of its steps"
    if job.num_replicas > 1:
        return "collectives were not tried in graphs"
    return _why_not_optimizer(inner_optimizer(job.optim))


def _why_not_optimizer(optimizer: Optimizer) -> str | None:
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return f"{type(optimizer).__name__} may count its steps on the host"
    return None
