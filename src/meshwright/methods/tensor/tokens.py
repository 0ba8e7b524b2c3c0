"""Hooks that cut, gather and put together tokens, for ``sequence=True``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from meshwright.methods.tensor.exchange import TensorAxis
from meshwright.methods.tensor.sequence import SequenceLayout, check_tokens
from meshwright.methods.tensor.sequence_trial import TOKENS_DIM, first_hidden, with_argument
from meshwright.methods.tensor.styles import is_linear

Change = Callable[[torch.Tensor], torch.Tensor]


def let_exchange_tokens(model: nn.Module, layout: SequenceLayout, axis: TensorAxis) -> None:
    """Cuts tokens before the first block, gathers them where a module needs all, puts them together behind the last.

    Layers that take all tokens themselves are left to the caller, who shares the gathering between them.
    """

    def cut(hidden: torch.Tensor) -> torch.Tensor:
        check_tokens(hidden, axis.size)
        return axis.cut(hidden, TOKENS_DIM)

    for path in layout.first:
        change_hidden_input(model.get_submodule(path), cut)
    for path in layout.last:
        change_hidden_output(model.get_submodule(path), lambda hidden: axis.gather(hidden, TOKENS_DIM))
    for path in layout.scopes:
        if not is_linear(model.get_submodule(path)):
            change_hidden_input(model.get_submodule(path), axis.gather_tokens)


def change_hidden_input(module: nn.Module, change: Change) -> Any:
    """Changes the hidden state that a module is called with; returns the hook."""

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return with_argument(args, kwargs, change)

    return module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)


def change_hidden_output(module: nn.Module, change: Change) -> Any:
    """Changes the hidden state that a module returns; returns the hook."""

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        leaves, tree = tree_flatten(output)
        place = first_hidden(leaves)
        assert place is not None, "a block that was proved returns a hidden state"
        leaves[place] = change(leaves[place])
        return tree_unflatten(leaves, tree)

    return module.register_forward_hook(leave)
