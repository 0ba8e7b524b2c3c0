"""`BoostedOptimizer`, and what `execute_pipeline` runs: the micro-batches of one step."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.errors import ConfigError
from meshwright.methods import PipelineEngine, PipelineParallel
from meshwright.optim import GuardedOptimizer, Stages, inner_optimizer
from meshwright.runtime import preserved_rng
from meshwright.runtime.torch_internals.pytree import tree_map
from meshwright.strategy import Strategy
from meshwright.training.accelerated import Accelerated


class BoostedOptimizer(GuardedOptimizer):
    """A GuardedOptimizer that also calls backward, and clips in every step with ``max_norm``.

    Args:
        optimizer: The optimizer that ``accelerate`` returned, guarded or not.
        model: The model that it updates.
        max_norm: Largest gradient norm, applied in every step; 0 for no clipping.
        norm_type: p of the p-norm.
        stages: Ranks whose parts of a model, by pipeline stages or experts, count in norms.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        stages: Stages | None = None,
    ) -> None:
        if isinstance(optimizer, GuardedOptimizer):
            guards = {
                "scaler": optimizer.scaler,
                "master": optimizer.master,
                "skip_nonfinite": optimizer.skip_nonfinite,
                "stop_nonfinite": optimizer.stop_nonfinite,
            }
            super().__init__(optimizer.inner, **guards, stages=stages)  # type: ignore[arg-type]
        else:
            super().__init__(optimizer, stages=stages)
        self.model = model
        self.max_norm, self.norm_type = max_norm, norm_type
        self._last_norm: torch.Tensor | None = None

    def backward(self, loss: torch.Tensor, inputs: Any = None, retain_graph: bool = False) -> None:
        """Run backward of the loss, scaled where the precision needs it."""
        self.scaled(loss).backward(inputs=inputs, retain_graph=retain_graph)

    def backward_by_grad(
        self, tensor: torch.Tensor, grad: torch.Tensor, inputs: Any = None, retain_graph: bool = False
    ) -> None:
        """Run backward from a tensor, given the gradient of the unscaled loss with respect to it."""
        torch.autograd.backward(self.scaled(tensor), grad, inputs=inputs, retain_graph=retain_graph)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss with a backward that multiplies by the loss scale."""
        return self.scaled(loss)

    def unscale_grad(self) -> None:
        """Remove the loss scale from the gradients; repeats do nothing."""
        self.prepare_gradients()

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip gradients by their norm over all ranks' shards; return the norm before clipping (0-dim).

        Raises:
            RuntimeError: With ``error_if_nonfinite``, when the norm is not finite.
        """
        self._last_norm = self.clip_grad_norm(max_norm, norm_type)
        if error_if_nonfinite and not bool(torch.isfinite(self._last_norm)):
            raise RuntimeError(
                f"The norm of the gradients is {self._last_norm.item()}, so they cannot be clipped by it. What to do: "
                "leave error_if_nonfinite out to skip such steps in fp16, or look for the cause with a lower lr."
            )
        return self._last_norm

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Clip every gradient element to ``[-clip_value, clip_value]``, after the loss scale is removed."""
        self.clip_grad_value(clip_value)

    def get_grad_norm(self, norm_type: float = 2.0) -> float | None:
        """Return the norm of the last step before clipping; None without clipping (``max_norm`` is 0).

        Raises:
            ConfigError: When ``norm_type`` is not that of the clipping.
        """
        if norm_type != self.norm_type:
            raise ConfigError(
                "This norm was not measured",
                expected=f"norm_type={self.norm_type}",
                got=f"norm_type={norm_type}",
                fix="call clip_grad_by_norm(float('inf'), norm_type) before the step",
            )
        return self._last_norm.item() if self._last_norm is not None else None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Clip if ``max_norm`` is above 0, and update the weights unless gradients overflowed."""
        if self.max_norm > 0 and closure is None:
            self.clip_grad_by_norm(self.max_norm, self.norm_type)
        super().step(closure)

    def unwrap(self) -> Optimizer:
        """Return the optimizer that was boosted."""
        return inner_optimizer(self)


OptimizerWrapper = BoostedOptimizer
"""ColossalAI's name."""


# --- The micro-batches of one step, one after the other or by the schedule of a pipeline.

Criterion = Callable[[Any, Any], torch.Tensor]


def execute_one_stage(
    parts: list[Any],
    model: nn.Module,
    criterion: Criterion,
    optimizer: BoostedOptimizer | None,
    accelerated: Accelerated,
    keep_outputs: bool,
) -> tuple[torch.Tensor, list[Any]]:
    """Run forward, and with an optimizer backward, of micro-batches on ranks that have all stages.

    Args:
        parts: Micro-batches: each a tensor, a list or tuple of arguments of the model, or keyword arguments.
        model: The boosted model.
        criterion: ``criterion(outputs, micro_batch)`` returns the mean loss.
        optimizer: None runs forward alone, without gradients.
        accelerated: The accelerated model; it reduces gradients in the last micro-batch only.
        keep_outputs: Whether to return outputs.

    Returns:
        The mean loss of this rank, and the outputs, detached.
    """
    total: torch.Tensor | None = None
    outputs = []
    for index, part in enumerate(parts):
        is_last = index == len(parts) - 1
        reduce = contextlib.nullcontext() if is_last or optimizer is None else accelerated.no_sync()
        with torch.set_grad_enabled(optimizer is not None), reduce:
            output = _call(model, part)
            loss = criterion(output, part) / len(parts)
            if optimizer is not None:
                optimizer.backward(loss)
        total = loss.detach() if total is None else total + loss.detach()
        if keep_outputs:
            outputs.append(_detached(output))
    assert total is not None
    return total, outputs


def execute_stages(
    parts: list[Any],
    model: nn.Module,
    criterion: Criterion,
    optimizer: BoostedOptimizer | None,
    pipeline: PipelineEngine,
    keep_outputs: bool,
) -> tuple[torch.Tensor, list[Any]]:
    """Run micro-batches by the schedule of a pipeline; arguments are those of :func:`execute_one_stage`.

    Returns:
        The mean loss, equal on every rank of the pipeline, and on the last stage the outputs.
    """
    outputs: dict[int, Any] = {}

    def loss_of(part: Any, output: Any) -> torch.Tensor:
        if keep_outputs:
            outputs[id(part)] = _detached(output)
        return criterion(output, part) / len(parts)

    loss_everywhere = pipeline.loss(loss_of)
    if optimizer is not None:
        optimizer.expect_scaled()
        loss = pipeline.step(
            parts,
            call=lambda part: _call(model, part),
            loss=lambda part, output: optimizer.scaled(loss_everywhere(part, output)),
        )
    else:
        with torch.no_grad():
            loss = torch.stack([loss_everywhere(part, _call(model, part)) for part in parts]).sum()
    return loss, [outputs[id(part)] for part in parts if id(part) in outputs]


def check_parts(accelerated: Accelerated, count: int) -> None:
    """Check that the pipeline's schedule can run with ``count`` micro-batches.

    Raises:
        StrategyError: Naming the numbers that it can run with.
    """
    method = accelerated.strategy.get("pipeline_parallel")
    assert isinstance(method, PipelineParallel)
    assert accelerated.pipeline is not None
    ranks = accelerated.pipeline.rank.group.size()
    method.check_numbers(ranks * method.stages_per_rank, ranks, count)


def needs_sample(strategy: Strategy, model: Any) -> bool:
    """Return whether methods trace the model on a sample of its data.

    To divide layers without dividing tokens, the dummy inputs of transformers' models do as well.
    """
    tensor = strategy.get("tensor_parallel")
    divides_tokens = getattr(tensor, "sequence", False)
    if divides_tokens or not {"pipeline_parallel", "sequence_parallel"}.isdisjoint(strategy.names):
        return True
    return tensor is not None and getattr(model, "dummy_inputs", None) is None


def sample_of(dataloader: Any, model: nn.Module, strategy: Strategy, *, has_criterion: bool) -> Any:
    """Return the model's input for a batch of the dataset's first sample; None if it has none.

    The loader itself is not iterated.
    """
    batch = _first_of(dataloader)
    # execute_pipeline passes whole batches to the model; loops pass any part of them.
    is_whole = "pipeline_parallel" in strategy or not isinstance(model, nn.Module)
    return batch if is_whole else _taken_by(model, batch, has_criterion)


def _taken_by(model: nn.Module, batch: Any, has_criterion: bool) -> Any:
    """Return the part of a batch that fits the model's forward; with a criterion, labels are left out."""
    known = inspect.signature(model.forward).parameters.values()
    kinds = {parameter.kind for parameter in known}
    if isinstance(batch, Mapping):
        names = {parameter.name for parameter in known}
        return batch if inspect.Parameter.VAR_KEYWORD in kinds else {k: v for k, v in batch.items() if k in names}
    if not isinstance(batch, list | tuple) or inspect.Parameter.VAR_POSITIONAL in kinds:
        return batch
    places = [each for each in known if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    needed = sum(each.default is each.empty for each in places)
    return tuple(batch[: max(1, needed if has_criterion else len(places))])


def _first_of(dataloader: Any) -> Any:
    dataset, collate = getattr(dataloader, "dataset", None), getattr(dataloader, "collate_fn", None)
    if collate is None or dataset is None or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        return None
    with preserved_rng():
        return collate([dataset[0]])


def joined(outputs: list[Any]) -> Any:
    """Concatenate outputs of micro-batches along dim 0, averaging 0-dim ones; None if there are none."""

    def join(*leaves: Any) -> Any:
        if not isinstance(leaves[0], torch.Tensor):
            return leaves[0]
        return torch.cat(leaves) if leaves[0].dim() else torch.stack(leaves).mean()

    return tree_map(join, *outputs) if outputs else None


def _call(model: nn.Module, part: Any) -> Any:
    if isinstance(part, Mapping):
        return model(**part)
    return model(*part) if isinstance(part, list | tuple) else model(part)


def _detached(output: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, output)
