"""What a model's input tells about its samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from meshwright.utils.trees import leaves_of

_IDS = ("input_ids", "decoder_input_ids")
_SAMPLES = 2  # one alone could be a dim of another meaning


def tokens_per_sample(inputs_of: Callable[[int], Any]) -> int | None:
    """Tokens of one sample: the second dim of ``input_ids``, or of the first integers ``[samples, tokens]``.

    None where there is no sample to be had, or none of tokens, as of images.

    Args:
        inputs_of: ``inputs_of(samples)`` returns the model input.
    """
    try:
        inputs = inputs_of(_SAMPLES)
    except Exception:  # a user's data may refuse; training will say so
        return None
    named = [inputs[name] for name in _IDS if isinstance(inputs, Mapping) and name in inputs]
    for leaf in (*named, *leaves_of(inputs)):
        if isinstance(leaf, torch.Tensor) and not leaf.is_floating_point() and leaf.dim() == 2:
            return leaf.shape[1] if leaf.shape[0] == _SAMPLES else None
    return None
