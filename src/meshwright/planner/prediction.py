"""What a model would save and compute in one micro-batch, in a forward pass over fake tensors that hold no data."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

from meshwright.cost import Activations, Boundary
from meshwright.planner.saved import record_saved
from meshwright.planner.summary import summarise
from meshwright.planner.traces import Trace
from meshwright.planner.work import BACKWARD_FLOPS, PlacedWork


def predict_saved(
    model: nn.Module,
    inputs: Any,
    forward: Callable[[nn.Module, Any], Any],
    *,
    param_dtype: torch.dtype | None,
    autocast_dtype: torch.dtype | None,
    split: Trace | None = None,
    blocks: Sequence[nn.Module] = (),
) -> tuple[Activations, int, tuple[Boundary, ...]]:
    """Predicts what one micro-batch saves, in a forward pass over fake tensors; the model itself is not touched.

    Args:
        model: A plain module, not wrapped or sharded.
        inputs: The model input of one micro-batch, as ``prepare_input`` returns it.
        forward: ``forward(model, inputs)`` computes the loss.
        param_dtype: Precision of the parameters as they compute; None keeps their own.
        autocast_dtype: Precision of autocast; None runs without.
        split: Lets the model run as one rank of the axes that divide layers, tokens or experts; None runs it whole.
        blocks: Those that a pipeline cuts: activations and operations are told apart by their places then.

    Returns:
        The activations, the floating-point operations of forward and backward (recomputation not counted), and what is
        sent over that axis.

    Raises:
        Exception: Whatever the model raises when it runs without data.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))

    def converted(tensor: torch.Tensor) -> torch.Tensor:
        copy: torch.Tensor = fake.from_tensor(tensor.detach())
        return copy.to(param_dtype) if param_dtype is not None and copy.is_floating_point() else copy

    state = {
        f"model.{name}": _one_ranks(converted(tensor), tensor, split).requires_grad_(tensor.requires_grad)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    fake_inputs = tree_map(lambda leaf: converted(leaf) if isinstance(leaf, torch.Tensor) else leaf, inputs)
    counter = FlopCounterMode(display=False)
    autocast = torch.autocast(device.type, dtype=autocast_dtype) if autocast_dtype else contextlib.nullcontext()
    work = PlacedWork(model, blocks, counter)
    recorded = record_saved(model, counter=counter, blocks=blocks)
    with warnings.catch_warnings(), fake, counter, autocast, recorded as saved:
        warnings.simplefilter("ignore")
        as_one_rank = split.running(saved.log) if split is not None else contextlib.nullcontext()
        with as_one_rank, work.counting() if blocks else contextlib.nullcontext():
            loss = torch.func.functional_call(_Forward(model, forward), state, (fake_inputs,))
        flops = counter.get_total_flops() * (1 + BACKWARD_FLOPS)
        boundaries = split.boundaries(model, saved.log) if split is not None else ()
        activations = summarise(model, saved)
        if blocks:
            activations = dataclasses.replace(activations, flops_at=work.everything(loss))
    return activations, flops, boundaries


def _one_ranks(fake: torch.Tensor, tensor: torch.Tensor, split: Trace | None) -> torch.Tensor:
    if split is None or not isinstance(tensor, nn.Parameter):
        return fake
    shape = split.local_shape(tensor)
    return fake if shape == fake.shape else fake.new_empty(shape)


class _Forward(nn.Module):
    """The model and its loss as one module, so that ``functional_call`` can lend it fake parameters."""

    def __init__(self, model: nn.Module, forward: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.model = model
        self._run = forward

    def forward(self, inputs: Any) -> Any:
        """Computes the loss."""
        return self._run(self.model, inputs)
