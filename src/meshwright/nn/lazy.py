"""Lazy modules, whose parameters have no shape before the first forward."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

from meshwright.errors import ModelError, join_names


def check_initialized(model: nn.Module) -> None:
    """Refuses a model with parameters or buffers that wait for an input to get their shapes.

    Raises:
        ModelError: Naming them.
    """
    waiting = [name for name, each in (*model.named_parameters(), *model.named_buffers()) if is_lazy(each)]
    if waiting:
        raise ModelError(
            "Lazy modules of the model have no parameters yet",
            expected="parameters with shapes",
            got=join_names(waiting),
            fix="run the model once on a batch before, model(batch), or build it with modules of given sizes",
        )
