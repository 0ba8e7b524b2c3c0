"""Trying out blocks on parts of the tokens: one that counts positions by the tokens it sees would be wrong silently.

Each kind of block runs once on all tokens, with random values, and once on each part. A part's attention is answered
from the run of the whole: its queries, keys and values must be those of the whole, and so must its output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_leaves

from meshwright.errors import ModelError
from meshwright.methods.sample import SampleRun
from meshwright.methods.sequence.calls import AttentionCalls, cannot_intercept, grouped_keys
from meshwright.methods.sequence.order import TokenOrder
from meshwright.methods.sequence.tokens import TokenParts
from meshwright.methods.tensor.calls import RecordedBlock, record_calls, signature
from meshwright.methods.tensor.compare import Refuted, close
from meshwright.methods.tensor.sequence_trial import TOKENS_DIM, first_hidden
from meshwright.methods.tensor.trial import evaluating
from meshwright.nn import call_with

_TOKENS_DIM = 2  # of queries, keys and values
_SEED = 11


def prove_blocks(
    model: nn.Module,
    sample: SampleRun | None,
    order: TokenOrder,
    check_queries: Callable[[torch.Tensor], None] = lambda queries: None,
) -> str | None:
    """Holds every kind of block against the same block on parts of the tokens.

    Args:
        model: A plain module; its weights are not used, and nothing of it is changed.
        sample: Runs the model once, to see how it calls its blocks.
        order: How tokens are dealt; every rank's part is tried out.
        check_queries: Refuses queries (batch, heads, tokens, features) of whole blocks.

    Returns:
        What there is to say when no sample runs; None when all is proved.

    Raises:
        ModelError: When a block does not compute the same on parts of the tokens, with the reason.
    """
    unknown = f"{order.method}: there is no sample to see that blocks treat parts of the tokens as the whole"
    try:
        blocks = record_calls(model, sample, 2 * order.size)
    except ModelError:
        return unknown
    if any(not _divides(block, order) for block in blocks):
        return unknown  # a model's own dummy input, say; real inputs are checked when they come
    known = set()
    for block in blocks:
        key = signature(block)
        if key in known:
            continue
        known.add(key)
        try:
            _prove(block, order, check_queries)
        except Refuted as refuted:
            raise ModelError(
                f"{order.method}: {block.path} does not compute the same on a part of the tokens",
                expected="a block in which tokens meet in attention only, and positions are handed in from outside",
                got=str(refuted),
                fix="make what depends on positions before the first block; or use fsdp or tensor_parallel",
            ) from None
    return None


def _divides(block: RecordedBlock, order: TokenOrder) -> bool:
    """Whether the sample's tokens can be cut; blocks without a hidden state are left to the proof."""
    assert block.call is not None
    leaves = tree_leaves((block.call.args, block.call.kwargs))
    place = first_hidden(leaves)
    try:
        order.check(leaves[place].shape[TOKENS_DIM]) if place is not None else None
    except ModelError:
        return False
    return True


@torch.no_grad()
def _prove(block: RecordedBlock, order: TokenOrder, check_queries: Callable[[torch.Tensor], None]) -> None:
    assert block.call is not None
    args, kwargs = block.call.tree(block.call.values())
    whole = _Whole()
    output = _run(block.module, args, kwargs, calls := AttentionCalls(whole.attend))
    if not calls.count:
        raise cannot_intercept(block.path, order.method)
    for tensors, _ in whole.calls:
        check_queries(tensors[0])
    for place in map(order.at, range(order.size)):
        part_args, part_kwargs = TokenParts(place).enter(block.path, "first", block.module, args, kwargs)
        attend = functools.partial(whole.answer, place, iter(whole.calls))
        try:
            part = _run(block.module, part_args, part_kwargs, AttentionCalls(attend))
        except (RuntimeError, ValueError, IndexError) as error:
            raise Refuted(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}") from error
        if part is None or output is None or not close(part, place.part(output, TOKENS_DIM), 0.0):
            raise Refuted("its output is another one")


class _Whole:
    """Attention of the whole block: what each call got and gave."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[Any], torch.Tensor]] = []

    def attend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Computes and notes it."""
        output = scaled_dot_product_attention(*args, **kwargs)
        self.calls.append((_inputs(*args, **kwargs), output))
        return output

    def answer(self, place: TokenOrder, calls: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The part of the next output, when the inputs are the parts of the whole's."""
        inputs, output = next(calls, (None, None))
        found = _inputs(*args, **kwargs)
        if inputs is None or output is None:
            raise Refuted("it calls attention more often")
        for what, mine, expected in zip(("queries", "keys", "values"), found[:3], inputs[:3], strict=True):
            if expected.dim() != 4 or not close(mine, place.part(expected, _TOKENS_DIM), 0.0):
                raise Refuted(
                    f"the {what} of its attention are others: positions, or something else, are counted inside"
                )
        mask, expected = found[3], inputs[3]
        same = (mask is None) == (expected is None) and (mask is None or close(mask, expected, 0.0))
        if not same or found[4:] != inputs[4:]:
            raise Refuted("the mask of its attention is made inside")
        return place.part(output, _TOKENS_DIM)


def _inputs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> list[Any]:
    return [query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa]


def _run(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], calls: AttentionCalls) -> torch.Tensor | None:
    """The block's hidden state, with random weights."""
    generator = torch.Generator().manual_seed(_SEED)
    state: dict[str, torch.Tensor] = {}
    for name, parameter in block.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        state[name] = values / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else values
    for name, buffer in block.named_buffers():
        wide = torch.float32 if buffer.is_floating_point() else buffer.dtype
        state[name] = torch.zeros(buffer.shape, dtype=wide) if buffer.is_meta else buffer.detach().cpu().to(wide)
    with evaluating(block), torch.no_grad(), grouped_keys(), calls:
        leaves = tree_leaves(call_with(block, state, args, kwargs))
    place = first_hidden(leaves)
    return None if place is None else leaves[place]
