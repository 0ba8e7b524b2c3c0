"""Which functions may be called as ``loss_func(model_input, model_output)``, unlike most of torch's own losses."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.nn.modules.loss import _Loss

_DISTANCES = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)
_DISTANCE_FUNCTIONS = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)


def is_loss_func(value: Any) -> bool:
    """Whether a value may be called with a model's input and its output.

    Not a class; nor one of torch's losses, which are called with an output and a target, but for those to which it is
    all one which is which: these compare the output with the input itself, as autoencoders do.
    """
    if isinstance(value, type) or not callable(value):
        return False
    return not _is_torchs_loss(value) or is_distance(value)


def _is_torchs_loss(value: Any) -> bool:
    return isinstance(value, _Loss) or getattr(value, "__module__", "") == F.__name__


def is_distance(value: Any) -> bool:
    """Whether it is one of torch's losses to which it is all one which argument is the target."""
    return isinstance(value, _DISTANCES) or value in _DISTANCE_FUNCTIONS
