"""Between the first and the last block of a list each rank has a part of the tokens."""

from __future__ import annotations

import functools
import inspect
import itertools
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_map

from meshwright.errors import ModelError
from meshwright.methods.pipeline.parts import Elsewhere
from meshwright.methods.sequence.calls import TokenRanks, answering
from meshwright.methods.sequence.order import TokenOrder
from meshwright.methods.tensor.sequence_trial import TOKENS_DIM, hidden_argument
from meshwright.methods.tensor.tokens import change_hidden_output
from meshwright.nn import require_blocks, wrap_method

_OF_POSITIONS = ("position", "rotary", "rope", "freqs", "cos", "sin")  # in names of arguments that go with tokens

BlockList = list[tuple[str, nn.Module]]

Place = Literal["first", "following", "staged"]
"""Of a block: the first one gets all tokens; one of a pipeline's stage gets a part, from who knows where."""


def work_on_parts(model: nn.Module, ranks: TokenRanks) -> None:
    """Cuts and gathers tokens in hooks around the blocks, and lets ``ranks`` answer attention inside them.

    Of several axes the innermost comes first: what is cut later is cut before it, and is gathered after it.
    """
    for blocks in block_lists(model, ranks.order.method):
        for path, block in blocks:
            wrap_method(block, "forward", answering(path, ranks))
        cut_tokens(blocks, ranks, _others(model, blocks))


def _others(model: nn.Module, blocks: BlockList) -> tuple[bool, bool]:
    """Whether other pipeline ranks have blocks of the list before and after these."""
    paths = [path for path, _ in blocks]
    children = list(model.get_submodule(paths[0].rpartition(".")[0]).children())
    places = [children.index(block) for _, block in blocks]
    before, after = children[: places[0]], children[places[-1] + 1 :]
    return any(isinstance(each, Elsewhere) for each in before), any(isinstance(each, Elsewhere) for each in after)


def block_lists(model: nn.Module, method: str) -> list[BlockList]:
    """The blocks of a model with their paths, list by list.

    Raises:
        ModelError: When there are none, naming the method.
    """
    blocks = require_blocks(model, method=method, option="an nn.ModuleList")
    return [list(group) for _, group in itertools.groupby(blocks, lambda block: block[0].rpartition(".")[0])]


def cut_tokens(blocks: BlockList, ranks: TokenRanks, others: tuple[bool, bool] = (False, False)) -> list[Any]:
    """Cuts tokens before the first block, and puts them together behind the last; returns the hooks.

    Args:
        blocks: The blocks.
        ranks: Who has which tokens.
        others: Whether other pipeline ranks have blocks before and after these, and do one or the other.
    """
    tokens, (before, after) = TokenParts(ranks.order), others
    following: Place = "staged" if before or after else "following"
    hooks = [
        block.register_forward_pre_hook(
            functools.partial(tokens.enter, path, following if before or place else "first"),
            with_kwargs=True,
            prepend=True,
        )
        for place, (path, block) in enumerate(blocks)
    ]
    if after:
        return hooks

    def leave(hidden: torch.Tensor) -> torch.Tensor:
        tokens.forget()
        return ranks.gather(hidden)

    return [*hooks, change_hidden_output(blocks[-1][1], leave)]


class TokenParts:
    """Gives the blocks of one list this rank's part of whatever goes with tokens.

    Args:
        order: Which tokens they are.
    """

    def __init__(self, order: TokenOrder) -> None:
        self._order = order
        self._count = 0  # all tokens of the sequence that runs
        self._known: dict[
            tuple[int, int], tuple[torch.Tensor, torch.Tensor]
        ] = {}  # what several blocks take: whole, and part

    def enter(
        self, path: str, place: Place, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the block at ``path``.

        Raises:
            ModelError: When there is no hidden state, or not that of this rank's tokens.
        """
        where = hidden_argument(args, kwargs)
        if where is None:
            raise self._wrong_hidden(path, "no tensor of that form")
        hidden = args[where] if isinstance(where, int) else kwargs[where]
        if place == "first":
            self._order.check(hidden.shape[TOKENS_DIM])
            self._count, self._known = hidden.shape[TOKENS_DIM], {}
        elif place == "staged":
            self._count, self._known = self._whole(hidden), {}
        elif self._whole(hidden) != self._count:
            raise self._wrong_hidden(path, f"{hidden.shape[TOKENS_DIM]} of {self._count} tokens")

        def argument(name: str, value: Any) -> Any:
            if value is hidden:
                return self._order.part(hidden, TOKENS_DIM) if place == "first" else hidden
            return tree_map(functools.partial(self._part, name), value)

        names = [*_argument_names(type(module)), *[""] * len(args)]  # a block may take *args
        positional = tuple(argument(name, value) for name, value in zip(names, args, strict=False))
        return positional, {name: argument(name, kwargs[name]) for name in kwargs}

    def forget(self) -> None:
        """Lets go of what blocks have shared, behind the last of them."""
        self._known = {}

    def _whole(self, hidden: torch.Tensor) -> int:
        """Tokens of the whole sequence, told by the part that goes from block to block."""
        return int(hidden.shape[TOKENS_DIM]) * self._order.size * self._order.within

    def _part(self, name: str, leaf: Any) -> Any:
        dim = tokens_dim(name, leaf, self._count) if isinstance(leaf, torch.Tensor) else None
        if dim is None:
            return leaf
        if (id(leaf), dim) not in self._known:
            self._known[id(leaf), dim] = leaf, self._order.part(leaf, dim)
        return self._known[id(leaf), dim][1]

    def _wrong_hidden(self, path: str, got: str) -> ModelError:
        return ModelError(
            f"{self._order.method}: {path} is not called with the part of the tokens that the block before it returned",
            expected="blocks called one after the other with hidden states (batch, tokens, features)",
            got=got,
            fix="use fsdp or tensor_parallel",
        )


def _argument_names(kind: type[nn.Module]) -> tuple[str, ...]:
    every = list(inspect.signature(kind.forward).parameters.values())[1:]
    return tuple(each.name for each in every if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD))


def tokens_dim(name: str, tensor: torch.Tensor, tokens: int) -> int | None:
    """Which dim of a block's argument counts the tokens that go with the hidden state; None: it is for attention.

    Hidden states, and cosines and sines of positions, are (…, tokens, features); position ids (…, tokens). Masks
    (…, tokens or 1, tokens) stay whole, since attention is over all tokens.
    """
    named = any(word in name for word in _OF_POSITIONS)
    if tensor.is_floating_point() or tensor.is_complex():
        fits = tensor.dim() >= 2 and tensor.shape[-2] == tokens and (named or tensor.shape[-1] != tokens)
        return tensor.dim() - 2 if fits else None
    return tensor.dim() - 1 if named and tensor.dim() and tensor.shape[-1] == tokens else None
