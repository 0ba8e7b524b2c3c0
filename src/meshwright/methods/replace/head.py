"""The head of a language model whose logits are not computed where only their cross entropy is wanted."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.errors import ModelError, join_names
from meshwright.loss import HeadLogits
from meshwright.methods.replace.changes import NewForward, Replacement


def replace_head(model: nn.Module, path: str | None, into: Replacement) -> None:
    """Adds the change of the head: in training it returns :class:`~meshwright.loss.HeadLogits`.

    Args:
        model: Where the head is.
        path: Of the head; None finds it.
        into: What is added to.

    Raises:
        ModelError: When there is no head, or several.
    """
    found = _heads(model) if path is None else _named(model, path)
    if len(found) != 1:
        raise ModelError(
            "module_replace: the head whose logits the loss is to do without is not clear",
            expected="one nn.Linear from the width of an embedding to its number of entries",
            got=join_names(found),
            fix='name it: ("module_replace", {"loss": "path.of.the.head"})',
        )
    ((name, head),) = found.items()
    shape = f"{head.in_features} x {head.out_features}"
    into.add(f"fused_loss: the logits of {name} ({shape}) go into a cross entropy in parts", [NewForward(head, _lazy)])


def _lazy(self: nn.Linear, input: Tensor) -> Tensor:
    # In evaluation logits are read in other ways, and FSDP may free the weight before they are.
    if not (self.training and torch.is_grad_enabled() and input.requires_grad):
        return F.linear(input, self.weight, self.bias)
    return HeadLogits.of(input, self.weight, self.bias)


def _named(model: nn.Module, path: str) -> dict[str, nn.Linear]:
    module = dict(model.named_modules()).get(path)
    return {path: module} if type(module) is nn.Linear else {}


def _heads(model: nn.Module) -> dict[str, nn.Linear]:
    """What transformers calls the output embeddings; else layers of the shape of an embedding."""
    getter: Any = getattr(model, "get_output_embeddings", None)
    asked = getter() if getter is not None else None
    if asked is not None:
        return {path: m for path, m in model.named_modules() if m is asked and type(m) is nn.Linear}
    tables = {tuple(m.weight.shape) for m in model.modules() if isinstance(m, nn.Embedding)}
    return {p: m for p, m in model.named_modules() if type(m) is nn.Linear and tuple(m.weight.shape) in tables}
