"""The loss of language models. Shapes: B batch · T time · V vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from meshwright.errors import ModelError
from meshwright.loss.fused_cross_entropy import fused_cross_entropy

_NOTHING = -100  # the target of a position that predicts nothing


def next_token_loss(model_input: Any, output: Any) -> Tensor:
    """Mean cross-entropy, in nats per token, of predicting token t + 1 from the tokens up to t.

    In fp32, in the memory of the logits (:func:`fused_cross_entropy`): 4 bytes per fp32 logit, 2 per half-precision
    one, beyond the logits themselves, where ``F.cross_entropy`` takes 12.

    Args:
        model_input: Token ids (B, T), or a mapping that holds them as ``"input_ids"``.
        output: Logits (B, T, V), or something that holds them as ``logits``.

    Raises:
        ModelError: When the output has no logits of that shape.
    """
    ids_BT = model_input["input_ids"] if isinstance(model_input, Mapping) else model_input
    held = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    logits_BTV = output if held is None else held
    if not isinstance(logits_BTV, Tensor) or logits_BTV.dim() != 3 or logits_BTV.shape[:2] != ids_BT.shape:
        shape = f" of shape {tuple(logits_BTV.shape)}" if isinstance(logits_BTV, Tensor) else ""
        raise ModelError(
            "The model's output is not what the next-token loss is made for",
            expected=f"logits of shape ({', '.join(map(str, ids_BT.shape))}, vocabulary), or an output with .logits",
            got=f"{type(logits_BTV).__name__}{shape}",
            fix="return logits, or give a loss of your own",
        )
    # All positions, of which the last predicts nothing: without it the logits would have to be copied.
    target_BT = F.pad(ids_BT[:, 1:], (0, 1), value=_NOTHING)
    return fused_cross_entropy(logits_BTV.flatten(0, 1), target_BT.flatten(), ignore_index=_NOTHING)
