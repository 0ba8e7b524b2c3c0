"""Models in bf16 on CPUs: what these are slow in runs in fp32."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from meshwright.nn.forward import wrap_method
from meshwright.nn.half_attention import WideAttention, attends_wide, with_wide_attention
from meshwright.nn.half_linear import widen_products


def widen(model: nn.Module, device: torch.device) -> None:
    """Lets a model's layers multiply, and its forward attend, in fp32 where that is faster; changes it in place."""
    widen_products(model, device)
    if attends_wide(device):
        wrap_method(model, "forward", with_wide_attention)


@contextlib.contextmanager
def widened(model: nn.Module, device: torch.device) -> Iterator[None]:
    """:func:`widen` for a while: afterwards the model is as it was."""
    classes = {module: type(module) for module in model.modules() if isinstance(module, nn.Linear)}
    widen_products(model, device)
    try:
        with WideAttention() if attends_wide(device) else contextlib.nullcontext():
            yield
    finally:
        for module, cls in classes.items():
            module.__class__ = cls
