"""Attend in a ring of ranks that divide the tokens: the method `context_parallel`, and its trace.

The attention itself is in ``ring_attention.py``; how blocks get a part of the tokens, in ``token_split.py``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist

from meshwright.cost import Step, send_boundaries
from meshwright.errors import ModelError
from meshwright.methods.base import Job, Method, Phase, parts_between_layers
from meshwright.methods.tensor.axis_exchange import TensorAxis, as_products
from meshwright.methods.tensor.traffic_log import tensor_bytes
from meshwright.methods.tokens.attention_calls import (
    TokenRanks,
    check_among_parts,
    check_mask,
    number_of,
    ring_in_compiled_code,
)
from meshwright.methods.tokens.ring_attention import (
    Arriving,
    attend_in_ring,
    bytes_in_backward,
)
from meshwright.methods.tokens.sequence_parallel import Ledger, Ranks, traced_gather, traced_total
from meshwright.methods.tokens.token_order import TokenOrder
from meshwright.methods.tokens.token_proof import check_parts
from meshwright.methods.tokens.token_split import whole_input_gradients, work_on_parts

METHOD = "context_parallel"


class ContextRanks(TokenRanks):
    """Ranks that pass keys and values around a ring, with gradients.

    Args:
        axis: The mesh axis.
        balance: See :class:`TokenOrder`.
        heads: Size of the sequence axis; its ranks divide this rank's tokens, and in attention its heads.
        within: Number of parts into which layers that are split divide the tokens of these between them.
    """

    axis: ClassVar[str] = "context"

    def __init__(self, axis: TensorAxis, *, balance: bool, heads: int = 1, within: int = 1) -> None:
        self._axis, self._number = axis, number_of(self)
        self.order = _nested(TokenOrder(METHOD, axis.size, axis.index, balance), heads, within)

    def total(self, part: torch.Tensor) -> torch.Tensor:
        """Sum over the axis; backward sums gradients, too."""
        return self._axis.total(part)

    def gather(self, hidden: torch.Tensor) -> torch.Tensor:
        """Gather all tokens, in order; reduce-scatter their gradients in backward."""
        return self.order.in_order(self._axis.gather_tokens(hidden), 1)

    def pass_on(self, tensors: list[torch.Tensor]) -> Arriving:
        """Start sending tensors to the next rank and receiving tensors of the same shapes from the one before."""
        sent = [tensor.contiguous() for tensor in tensors]
        arrived = [torch.empty_like(tensor) for tensor in sent]
        works = self._exchange(sent, arrived)

        def wait() -> list[torch.Tensor]:
            for work in works:
                work.wait()
            sent.clear()  # they had to stay alive until here
            return arrived

        return wait

    def _exchange(self, sent: list[torch.Tensor], arrived: list[torch.Tensor]) -> Sequence[dist.Work]:
        """Start an exchange between neighbours, and return what to wait for."""
        order, group = self.order, self._axis.group
        following, preceding = (order.index + 1) % order.size, (order.index - 1) % order.size
        works: list[dist.Work] = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, tensor, group=group, group_peer=following) for tensor in sent]
            + [dist.P2POp(dist.irecv, tensor, group=group, group_peer=preceding) for tensor in arrived]
        )
        return works

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend as :meth:`TokenRanks.attend` says, without dropout and gradients of the mask."""
        check_among_parts(query, key, value, METHOD)
        _check_groups(query, key, value, enable_gqa=enable_gqa)
        _check_kernels(dropout_p, attn_mask, is_causal=is_causal)
        tokens = self.whole(query.shape[2])
        if attn_mask is not None:
            check_mask(attn_mask, tokens, METHOD)
        if torch.compiler.is_compiling():
            tensors = map(as_products, (query, key, value))
            out, _ = ring_in_compiled_code(*tensors, attn_mask, sinks, self._number, is_causal, scale, tokens)
            return out
        return attend_in_ring(self, query, key, value, attn_mask, tokens, is_causal=is_causal, scale=scale, sinks=sinks)


def _nested(order: TokenOrder, heads: int, within: int) -> TokenOrder:
    """Return the order of ranks whose tokens others divide; ranks of the sequence axis add padding themselves."""
    return dataclasses.replace(order, within=heads * within, multiple=within if heads == 1 else 1)


def _check_groups(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, enable_gqa: bool) -> None:
    heads, groups = query.shape[1], key.shape[1]
    if groups != value.shape[1] or heads % groups or (heads != groups and not enable_gqa):
        raise ModelError(
            "context_parallel: keys and values do not fit the heads of the queries",
            expected=f"{heads} heads of both, or with enable_gqa a divisor of it",
            got=f"{groups} heads of keys and {value.shape[1]} of values",
            fix="pass enable_gqa=True, or expand keys and values to the heads of the queries",
        )


def _check_kernels(dropout_p: float, mask: torch.Tensor | None, *, is_causal: bool) -> None:
    if dropout_p > 0:
        raise ModelError(
            "context_parallel: a ring does not compute dropout in attention",
            expected="dropout_p=0 in scaled_dot_product_attention",
            got=str(dropout_p),
            fix="switch the dropout of attention weights off (transformers: attention_dropout=0, attn_pdrop=0, "
            "attention_probs_dropout_prob=0), or use sequence_parallel",
        )
    if mask is not None and is_causal:
        raise ModelError(
            "context_parallel: attention is both causal and masked",
            expected="one of is_causal and attn_mask, as torch takes them",
            got="both",
            fix="leave is_causal out, and mask later tokens in attn_mask",
        )
    if mask is not None and mask.requires_grad:
        raise ModelError(
            "context_parallel: a ring computes no gradient for an attention mask that is trained",
            expected="a mask without gradients",
            got="one that requires them",
            fix="use sequence_parallel",
        )


# --- The trace


class TracedContext(ContextRanks):
    """The first rank of a context axis in a trace.

    Args:
        size: Size of the axis.
        balance: See :class:`TokenOrder`.
        heads: See :class:`ContextRanks`.
        within: See :class:`ContextRanks`.
        note: Notes what would be sent.
    """

    def __init__(self, size: int, balance: bool, heads: int, within: int, note: Ledger) -> None:
        self._note = note
        self._travelling: list[torch.Tensor] = []  # keys and values of the attention that runs now
        self.order = _nested(TokenOrder(METHOD, size, 0, balance), heads, within)

    def gather(self, hidden: torch.Tensor) -> torch.Tensor:
        """Note the gather of tokens; see :func:`traced_gather`."""
        return traced_gather(self, hidden, self._note)

    def total(self, part: torch.Tensor) -> torch.Tensor:
        """Note the sums of losses and of their gradients."""
        return traced_total(self, part, self._note)

    def pass_on(self, tensors: list[torch.Tensor]) -> Arriving:
        """Pass on tensors, and keep the last ones."""
        self._travelling = tensors
        return super().pass_on(tensors)

    def _exchange(self, sent: list[torch.Tensor], arrived: list[torch.Tensor]) -> Sequence[dist.Work]:
        """Note what is sent; what arrives has its memory from now on, as on a real rank."""
        self._note("context", "send", "forward", sum(map(tensor_bytes, sent)))
        return ()

    def attend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Attend, and note what travels in backward."""
        out = super().attend(*args, **kwargs)
        if out.requires_grad:
            self._note("context", "send", "backward", bytes_in_backward(self._travelling, self.order.size))
        return out


# --- The method

AXIS: Final = "context"
_MOST_TOKEN_RANKS = 16


class ContextParallel(Method):
    """Divides the tokens over ranks, each running the blocks on its part; keys and values travel around a ring.

    Ranks along the axis ``context`` take the same samples. Inside attention each rank keeps its queries, and keys and
    values travel around the ring, the next ones while it attends to those it has; outputs are merged by their
    log-sum-exp (Liu et al. 2023, Ring Attention). The number of heads does not matter, and grouped keys and values are
    sent without repetition. Requirements on the model, and what runs before and after the blocks, are as in
    ``sequence_parallel``.

    Config: None, or ``{"balance": False}``.
    """

    method_name: ClassVar[str] = "context_parallel"
    phase: ClassVar[Phase] = Phase.CONTEXT
    summary: ClassVar[str] = "splits the tokens over the context axis; keys and values travel around a ring"
    effect: ClassVar[str] = (
        "memory: activations / n. Time: the blocks' / n. Communication: keys and values n - 1 times around a ring"
    )
    seed_name: ClassVar[str | None] = "ColossalAI: ring_attn"
    axis: ClassVar[str | None] = AXIS

    balance: bool = True
    """Give rank r of n the chunks r and 2 n - 1 - r of the tokens, so that causal attention is equal work on each.

    False gives it one contiguous part: there are half as many chunks, and the last rank works the most.
    """

    @classmethod
    def axis_sizes(cls, divisors: Sequence[int], node: int) -> tuple[int, ...]:
        """Go beyond a node, as far as a rank's part of a sample is worth dividing."""
        return tuple(size for size in divisors if size <= _MOST_TOKEN_RANKS)

    @property
    def surcharge(self) -> float:
        """Ask much: it is for samples that do not fit otherwise, where it is the only way, or much the fastest."""
        return 0.05

    @property
    def chunks_per_rank(self) -> int:
        """See :attr:`balance`."""
        return 2 if self.balance else 1

    def traced_tokens(self, sizes: Mapping[str, int], within: int) -> Ranks | None:
        """See :class:`~meshwright.methods.planner_hooks.PlannerHooks`."""
        ranks, heads = sizes.get(AXIS, 1), sizes.get("sequence", 1)
        return functools.partial(TracedContext, ranks, self.balance, heads, within) if ranks > 1 else None

    def _order(self, size: int) -> TokenOrder:
        return TokenOrder(self.method_name, size, 0, self.balance)

    def check(self, job: Job) -> None:
        """Refuse models whose blocks cannot work on a part of the tokens, as tried on a sample if there is one."""
        if job.size(AXIS) > 1:
            check_parts(job, self._order(job.size(AXIS)))

    def apply(self, job: Job) -> None:
        """Cut and gather tokens in hooks around the blocks, and replace attention inside them."""
        if job.size(AXIS) > 1:
            axis = TensorAxis(job.require_mesh()[AXIS])
            within = parts_between_layers(job.strategy, job.size)
            ranks = ContextRanks(axis, balance=self.balance, heads=job.size("sequence"), within=within)
            work_on_parts(job.model, ranks)
            whole_input_gradients(job.model, axis)

    def cost(self, step: Step) -> Step:
        """Add what travels in every micro-batch; the trace has seen a part of the tokens already."""
        return send_boundaries(step, AXIS)
