"""Prove that blocks may run on parts of the tokens, by trying them; see `[Note: parts of the tokens]`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from meshwright.errors import ModelError
from meshwright.methods.base import Job
from meshwright.methods.tensor.block_trials import (
    RecordedBlock,
    Refuted,
    SampleRun,
    close,
    evaluating,
    random_state,
    reason_of,
    record_calls,
    signature,
)
from meshwright.methods.tensor.split_checks import refuse_router_loss
from meshwright.methods.tensor.split_proof import TOKENS_DIM, first_hidden
from meshwright.methods.tokens.attention_calls import (
    AttentionCalls,
    attention_with_sinks,
    cannot_intercept,
    grouped_keys,
)
from meshwright.methods.tokens.token_order import TokenOrder
from meshwright.methods.tokens.token_split import OutputWatch, TokenParts, block_lists
from meshwright.nn import call_with
from meshwright.runtime.torch_internals.pytree import tree_leaves

_TOKENS_DIM = 2  # of queries, keys and values
_SEED = 11


def prove_blocks(
    model: nn.Module,
    sample: SampleRun | None,
    order: TokenOrder,
    check_queries: Callable[[torch.Tensor], None] = lambda queries: None,
) -> str | None:
    """Compare every kind of block on all tokens with the same block on parts of them.

    Args:
        model: A plain module; its weights are not used, and it is not changed.
        sample: Runs the model once, to record how it calls its blocks.
        order: The distribution of tokens; every rank's part is tried.
        check_queries: Refuses queries (batch, heads, tokens, features) of whole blocks.

    Returns:
        A notice when no sample runs; None when all blocks are proved.

    Raises:
        ModelError: When a block does not compute the same on parts of the tokens, blocks run out of turn, or the
            model's output depends on a part of the tokens; with the reason.
    """
    unknown = f"{order.method}: there is no sample to check that blocks compute the same on parts of the tokens"
    outputs = OutputWatch(model, order.method)
    try:
        with outputs.watched():
            blocks = record_calls(model, sample, 2 * order.size)
    except ModelError:
        outputs.check()
        return unknown
    outputs.check()
    if any(not _divides(block, order) for block in blocks):
        return unknown  # such as a model's own dummy input; real inputs are checked in training
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
                expected="a block in which tokens meet in attention only, and positions come in as arguments",
                got=str(refuted),
                fix="compute what depends on positions before the first block; or use fsdp or tensor_parallel",
            ) from None
    return None


def _divides(block: RecordedBlock, order: TokenOrder) -> bool:
    """Return whether a block's tokens can be cut; blocks without a hidden state are left to the proof."""
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
    output = _run(block.module, args, kwargs, calls := AttentionCalls(whole.attend, _compare))
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
            raise Refuted(reason_of(error)) from error
        if part is None or output is None or not close(part, place.part(output, TOKENS_DIM), 0.0):
            raise Refuted("its output differs")


def _compare(own: torch.Tensor, ours: torch.Tensor) -> None:
    if not close(ours, own, 0.0):
        raise Refuted("its own attention is another than softmax with sinks")


class _Whole:
    """Attention in the run on all tokens: inputs and output of each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[Any], torch.Tensor]] = []

    def attend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute attention, and note its inputs and output."""
        attend = attention_with_sinks if kwargs.get("sinks") is not None else scaled_dot_product_attention
        output = attend(*args, **kwargs)
        self.calls.append((_inputs(*args, **kwargs), output))
        return output

    def answer(self, place: TokenOrder, calls: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the part of the next call's output, if its inputs are the parts of that call's.

        Raises:
            Refuted: If they are not.
        """
        inputs, output = next(calls, (None, None))
        found = _inputs(*args, **kwargs)
        if inputs is None or output is None:
            raise Refuted("it calls attention more often")
        for what, mine, expected in zip(("queries", "keys", "values"), found[:3], inputs[:3], strict=True):
            if expected.dim() != 4 or not close(mine, place.part(expected, _TOKENS_DIM), 0.0):
                raise Refuted(f"the {what} of its attention differ: positions, or something else, are counted inside")
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
    sinks: torch.Tensor | None = None,
) -> list[Any]:
    return [query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, sinks is None]


def _run(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], calls: AttentionCalls) -> torch.Tensor | None:
    """Run a block with random weights; return its hidden state."""
    with evaluating(block), torch.no_grad(), grouped_keys(), calls:
        leaves = tree_leaves(call_with(block, random_state(block, _SEED), args, kwargs))
    place = first_hidden(leaves)
    return None if place is None else leaves[place]


# --- Common steps of the methods that divide tokens


def check_parts(
    job: Job, order: TokenOrder, check_queries: Callable[[torch.Tensor], None] = lambda queries: None
) -> None:
    """Refuse models whose blocks cannot work on a part of the tokens; add a notice if there is no sample to try.

    Args:
        job: The job; its model is not changed.
        order: The distribution of tokens.
        check_queries: See :func:`prove_blocks`.

    Raises:
        ModelError: With the reason.
    """
    refuse_router_loss(job.model, order.method)
    block_lists(job.model, order.method)
    notice = prove_blocks(job.model, job.sample, order, check_queries)
    if notice:
        job.notices.append(notice)
