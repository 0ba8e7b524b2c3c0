"""Between the first and the last block of a list each rank has a contiguous part of the tokens."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from meshwright.errors import ModelError
from meshwright.methods.sequence.attention import AttentionCalls, SequenceRanks, attend_over_heads
from meshwright.methods.tensor.sequence_trial import TOKENS_DIM, hidden_argument
from meshwright.methods.tensor.tokens import change_hidden_output
from meshwright.nn import require_blocks

_OF_POSITIONS = ("position", "rotary", "rope", "freqs", "cos", "sin")  # in names of arguments that go with tokens

BlockList = list[tuple[str, nn.Module]]


def block_lists(model: nn.Module) -> list[BlockList]:
    """The blocks of a model with their paths, list by list.

    Raises:
        ModelError: When there are none.
    """
    blocks = require_blocks(model, method="sequence_parallel", option="an nn.ModuleList")
    return [list(group) for _, group in itertools.groupby(blocks, lambda block: block[0].rpartition(".")[0])]


def cut_tokens(blocks: BlockList, ranks: SequenceRanks) -> list[Any]:
    """Cuts tokens before the first block, and puts them together behind the last; returns the hooks."""
    tokens = TokenParts(ranks)
    hooks = [
        block.register_forward_pre_hook(
            functools.partial(tokens.enter, path, not place), with_kwargs=True, prepend=True
        )
        for place, (path, block) in enumerate(blocks)
    ]
    return [*hooks, change_hidden_output(blocks[-1][1], tokens.leave)]


def over_heads(path: str, ranks: SequenceRanks) -> Callable[..., Any]:
    """What goes around the forward of the block at ``path``, so that its attention is over all tokens."""

    def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        calls = AttentionCalls(functools.partial(attend_over_heads, ranks))
        with calls:
            output = forward(*args, **kwargs)
        if not calls.count:
            raise cannot_intercept(path)
        return output

    return run


def cannot_intercept(path: str) -> ModelError:
    """The error for a block in which no attention is seen."""
    return ModelError(
        f"sequence_parallel: {path} calls no attention that can be taken over",
        expected="calls of torch.nn.functional.scaled_dot_product_attention in every block",
        got="none",
        fix='use it in the block; load a transformers model with attn_implementation="sdpa"',
    )


class TokenParts:
    """Gives the blocks of one list this rank's part of whatever goes with tokens.

    Args:
        ranks: Who has the other parts.
    """

    def __init__(self, ranks: SequenceRanks) -> None:
        self._ranks = ranks
        self._count = 0  # all tokens of the sequence that runs
        self._known: dict[
            tuple[int, int], tuple[torch.Tensor, torch.Tensor]
        ] = {}  # what several blocks take: whole, and part

    def enter(
        self, path: str, is_first: bool, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the block at ``path``, of which the first one of the list gets all tokens.

        Raises:
            ModelError: When there is no hidden state, or not that of this rank's tokens.
        """
        where = hidden_argument(args, kwargs)
        if where is None:
            raise _wrong_hidden(path, "no tensor of that form")
        hidden = args[where] if isinstance(where, int) else kwargs[where]
        if is_first:
            self._count, self._known = check_tokens(hidden, self._ranks.size), {}
        elif hidden.shape[TOKENS_DIM] * self._ranks.size != self._count:
            raise _wrong_hidden(path, f"{hidden.shape[TOKENS_DIM]} of {self._count} tokens")

        def argument(name: str, value: Any) -> Any:
            if value is hidden:
                return self._narrowed(hidden, TOKENS_DIM) if is_first else hidden
            return tree_map(functools.partial(self._part, name), value)

        names = [*_argument_names(type(module)), *[""] * len(args)]  # a block may take *args
        positional = tuple(argument(name, value) for name, value in zip(names, args, strict=False))
        return positional, {name: argument(name, kwargs[name]) for name in kwargs}

    def leave(self, hidden: torch.Tensor) -> torch.Tensor:
        """Puts the tokens together behind the last block."""
        self._known = {}
        return self._ranks.gather(hidden)

    def _part(self, name: str, leaf: Any) -> Any:
        dim = tokens_dim(name, leaf, self._count) if isinstance(leaf, torch.Tensor) else None
        if dim is None:
            return leaf
        if (id(leaf), dim) not in self._known:
            self._known[id(leaf), dim] = leaf, self._narrowed(leaf, dim)
        return self._known[id(leaf), dim][1]

    def _narrowed(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        part = tensor.shape[dim] // self._ranks.size
        # In memory of its own: what is saved of it for backward must not keep all tokens.
        return tensor.narrow(dim, part * self._ranks.index, part).clone()


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


def check_tokens(hidden: torch.Tensor, ranks: int) -> int:
    """The number of tokens of a hidden state (batch, tokens, features).

    Raises:
        ModelError: When the axis does not divide it into parts of two or more; alike on every rank of the axis.
    """
    tokens = int(hidden.shape[TOKENS_DIM])
    if tokens % ranks or tokens < 2 * ranks:  # a single query looks like generation, which has no causal mask
        raise ModelError(
            "sequence_parallel: the axis does not divide the tokens into parts of two or more",
            expected=f"a multiple of {ranks} tokens, {2 * ranks} or more",
            got=str(tokens),
            fix="pad the sequences",
        )
    return tokens


def _wrong_hidden(path: str, got: str) -> ModelError:
    return ModelError(
        f"sequence_parallel: {path} is not called with the part of the tokens that the block before it returned",
        expected="blocks called one after the other with hidden states (batch, tokens, features)",
        got=got,
        fix="use fsdp or tensor_parallel",
    )
