"""``execute_pipeline``: the micro-batches of one step. With one stage they run one after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from meshwright.accelerated import Accelerated
from meshwright.batches import micro_batches
from meshwright.booster.optimizer import BoostedOptimizer


def execute_stage(
    batch: Any,
    model: nn.Module,
    criterion: Callable[[Any, Any], torch.Tensor],
    optimizer: BoostedOptimizer | None,
    accelerated: Accelerated,
    num_micro_batches: int,
    return_loss: bool,
    return_outputs: bool,
) -> dict[str, Any]:
    """Forward, and backward where there is an optimizer, over the micro-batches of one batch of this rank.

    Args:
        batch: A tensor, a list or tuple of arguments of the model, or a dictionary of keyword arguments.
        model: The boosted model.
        criterion: ``criterion(outputs, micro_batch)`` returns the mean loss.
        optimizer: None runs forward alone, without gradients.
        accelerated: Reduces gradients in the last micro-batch only.
        num_micro_batches: Equal parts along dim 0.
        return_loss: Return the mean loss of this rank.
        return_outputs: Return the outputs, joined along dim 0 (0-dim ones averaged).

    Returns:
        ``{"loss": …, "outputs": …}``, None where not asked for.

    Raises:
        DataError: When the batch does not divide.
    """
    parts = micro_batches(batch, num_micro_batches)
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
        if return_outputs:
            outputs.append(tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, output))
    return {"loss": total if return_loss else None, "outputs": _joined(outputs) if return_outputs else None}


def _call(model: nn.Module, part: Any) -> Any:
    if isinstance(part, Mapping):
        return model(**part)
    return model(*part) if isinstance(part, list | tuple) else model(part)


def _joined(outputs: list[Any]) -> Any:
    def join(*leaves: Any) -> Any:
        if not isinstance(leaves[0], torch.Tensor):
            return leaves[0]
        return torch.cat(leaves) if leaves[0].dim() else torch.stack(leaves).mean()

    return tree_map(join, *outputs)
