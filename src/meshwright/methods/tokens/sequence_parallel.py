"""Exchange tokens for heads around attention (Ulysses): the method `sequence_parallel`, and its trace.

:class:`TokensTrace` also traces the context axis: it runs a model on one rank's tokens and notes what ranks would send.
How blocks get a part of the tokens, in real runs and traces: [Note: parts of the tokens] in ``token_split.py``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from meshwright.cost import Boundary, BoundaryAxis, CollectiveKind, Moment, Step, send_boundaries
from meshwright.errors import ModelError
from meshwright.methods.base import Job, Method, Phase, parts_between_layers
from meshwright.methods.planner_hooks import within_node
from meshwright.methods.tensor.axis_exchange import TensorAxis, TokenWise, TracedAxis
from meshwright.methods.tensor.split_proof import TOKENS_DIM
from meshwright.methods.tensor.traffic_log import SaveLog, TrafficLog, tensor_bytes
from meshwright.methods.tokens.attention_calls import (
    Attend,
    AttentionCalls,
    TokenRanks,
    attention_with_sinks,
    cannot_intercept,
    check_among_parts,
    check_mask,
    grouped_keys,
)
from meshwright.methods.tokens.token_order import TokenOrder
from meshwright.methods.tokens.token_proof import check_parts
from meshwright.methods.tokens.token_split import (
    block_lists,
    cut_tokens,
    whole_input_gradients,
    work_on_parts,
)
from meshwright.runtime.torch_internals.autograd import Function

METHOD = "sequence_parallel"


class SequenceRanks(TokenRanks):
    """Ranks that exchange tokens for heads, with gradients.

    Args:
        axis: The mesh axis.
        ring: Size of the context axis; its ranks and these together have all tokens.
        within: Number of parts into which layers that are split divide this rank's tokens between them.
    """

    axis: ClassVar[str] = "sequence"

    def __init__(self, axis: TensorAxis, ring: int = 1, within: int = 1) -> None:
        self._axis, self._ring = axis, ring
        self.order = TokenOrder(METHOD, axis.size, axis.index, within=within, multiple=within)

    def exchange(self, parts: torch.Tensor) -> torch.Tensor:
        """Send row r of ``parts`` (n, elements) to rank r; row r of the result comes from rank r."""
        arrived: torch.Tensor = _Exchange.apply(parts, self._axis.group)
        return arrived

    def total(self, part: torch.Tensor) -> torch.Tensor:
        """Sum over the axis; backward sums gradients, too."""
        return self._axis.total(part)

    def gather(self, hidden: torch.Tensor) -> torch.Tensor:
        """Gather all tokens; reduce-scatter their gradients in backward."""
        return self._axis.gather_tokens(hidden)

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
        """Attend as :meth:`TokenRanks.attend` says; the axis must divide the heads."""
        n = self.order.size
        check_among_parts(query, key, value, METHOD)
        check_heads(query, n)
        tokens = self.whole(query.shape[2])
        if attn_mask is not None:
            if self._ring == 1:  # else the ring checks it, which has the other tokens
                check_mask(attn_mask, tokens, METHOD)
            attn_mask = self._own_heads(attn_mask, query.shape[1])
        if key.shape[1] % n:  # a group of heads would lie on several ranks
            key, value = _ungrouped(query, key, value)
        q, k, v = (each[:, :, :tokens] for each in self._heads_of_tokens((query, key, value)))
        attend: Attend = scaled_dot_product_attention
        if sinks is not None:
            attend = functools.partial(attention_with_sinks, sinks=sinks.chunk(n)[self.order.index])
        elif attn_mask is not None and k.shape[1] != q.shape[1] and self._ring == 1:
            k, v = _ungrouped(q, k, v)  # torch has no fast kernel for both groups and masks on CUDA
        grouped = enable_gqa and k.shape[1] != q.shape[1]
        output = attend(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=grouped)
        padding = query.shape[2] * n - tokens
        return self._tokens_of_heads(F.pad(output, (0, 0, 0, padding)) if padding else output)

    def _heads_of_tokens(self, tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """Exchange tokens for heads, all tensors in one message."""
        n = self.order.size
        # (n, batch, heads / n, tokens / n, features)
        parts = [tensor.unflatten(1, (n, -1)).transpose(0, 1) for tensor in tensors]
        arrived = self.exchange(torch.cat([part.flatten(1) for part in parts], 1))
        rows = arrived.split([part[0].numel() for part in parts], 1)
        return [
            row.unflatten(1, part.shape[1:]).permute(1, 2, 0, 3, 4).flatten(2, 3)
            for row, part in zip(rows, parts, strict=True)
        ]

    def _tokens_of_heads(self, output: torch.Tensor) -> torch.Tensor:
        # (n, batch, heads / n, tokens / n, features)
        parts = output.unflatten(2, (self.order.size, -1)).permute(2, 0, 1, 3, 4)
        arrived = self.exchange(parts.flatten(1))
        return arrived.unflatten(1, parts.shape[1:]).transpose(0, 1).flatten(1, 2)

    def _own_heads(self, mask: torch.Tensor, heads: int) -> torch.Tensor:
        if mask.dim() < 3 or mask.shape[-3] == 1:
            return mask
        own = heads // self.order.size
        return mask.narrow(-3, own * self.order.index, own)


class _Exchange(Function):
    """All-to-all of equal rows, which is its own transpose; without a group nothing arrives, for a trace."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return _all_to_all(gradient, ctx.group), None


def _all_to_all(parts: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    arrived, sent = torch.empty_like(parts, memory_format=torch.contiguous_format), parts.contiguous()
    if group is not None:
        dist.all_to_all_single(arrived, sent, group=group)
    return arrived


def _ungrouped(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Repeat the heads of keys and values to as many as the query has."""
    return (
        key.repeat_interleave(query.shape[1] // key.shape[1], 1),
        value.repeat_interleave(query.shape[1] // value.shape[1], 1),
    )


def check_heads(query: torch.Tensor, ranks: int) -> None:
    """Refuse queries (batch, heads, …) whose heads the axis does not divide.

    Raises:
        ModelError: On every rank of the axis.
    """
    if query.shape[1] % ranks:
        raise ModelError(
            "sequence_parallel: the axis does not divide the attention heads, which it exchanges for tokens",
            expected=f"a multiple of {ranks} heads",
            got=str(query.shape[1]),
            fix="use a smaller sequence axis in parallel_mode, or context_parallel, which divides no heads",
        )


# --- Traces of axes that divide the tokens


class Ledger(Protocol):
    """Notes collectives that would be sent."""

    def __call__(self, axis: BoundaryAxis, kind: CollectiveKind, moment: Moment, num_bytes: int) -> None:
        """Note one collective."""


class Ranks(Protocol):
    """Makes ranks that send nothing and note what they would send."""

    def __call__(self, note: Ledger) -> TokenRanks:
        """Make the ranks of one axis."""


class TracedSequence(SequenceRanks):
    """The first rank of a sequence axis in a trace.

    Args:
        size: Size of the axis.
        ring: See :class:`SequenceRanks`.
        within: See :class:`SequenceRanks`.
        note: Notes what would be sent.
    """

    def __init__(self, size: int, ring: int, within: int, note: Ledger) -> None:
        self._ring, self._note = ring, note
        self.order = TokenOrder(METHOD, size, 0, within=within, multiple=within)

    def exchange(self, parts: torch.Tensor) -> torch.Tensor:
        """Note an exchange and the one of its gradients."""
        self._note("sequence", "all_to_all", "forward", tensor_bytes(parts))
        if parts.requires_grad:
            self._note("sequence", "all_to_all", "backward", tensor_bytes(parts))
        arrived: torch.Tensor = _Exchange.apply(parts, None)
        return arrived

    def gather(self, hidden: torch.Tensor) -> torch.Tensor:
        """Note the gather of tokens; see :func:`traced_gather`."""
        return traced_gather(self, hidden, self._note)

    def total(self, part: torch.Tensor) -> torch.Tensor:
        """Note the sums of losses and of their gradients."""
        return traced_total(self, part, self._note)


def traced_gather(ranks: TokenRanks, hidden: torch.Tensor, note: Ledger) -> torch.Tensor:
    """Note the gather of tokens and the reduce-scatter of their gradients; return as many tokens."""
    whole = TracedAxis(ranks.order.size).gather_tokens(hidden, TOKENS_DIM)
    note(ranks.axis, "all_gather", "forward", tensor_bytes(whole))  # type: ignore[arg-type]
    if hidden.requires_grad:
        note(ranks.axis, "reduce_scatter", "backward", tensor_bytes(whole))  # type: ignore[arg-type]
    return ranks.order.in_order(whole, TOKENS_DIM)


def traced_total(ranks: TokenRanks, part: torch.Tensor, note: Ledger) -> torch.Tensor:
    """Note the sum of a tensor over the ranks, and that of its gradients; single numbers count in no plan."""
    for moment in ("forward", "backward")[: 1 + part.requires_grad] if part.dim() else ():
        note(ranks.axis, "all_reduce", moment, tensor_bytes(part))  # type: ignore[arg-type]
    return TracedAxis(ranks.order.size).total(part)


class TokensTrace:
    """Runs a plain model as the first of the ranks that divide its tokens, and notes what they would send.

    Args:
        model: The model.
        axes: The ranks of each axis, the innermost first.

    Attributes:
        dims: The dims of parameters that the axes divide: none.
    """

    divides_batch: ClassVar[bool] = True

    def __init__(self, model: nn.Module, *axes: Ranks) -> None:
        self._model = model
        self._every = [axis(self._note) for axis in axes]
        self._lists = block_lists(model, self._every[0].order.method)
        self._token_wise = TokenWise(model, [path for blocks in self._lists for path, _ in blocks])
        self.dims: dict[nn.Parameter, int] = {}
        self._path = ""  # of the block that runs, or ran last
        self._stack: list[nn.Module] = []  # the blocks and modules in them that run now
        self._traffic = TrafficLog(AXIS)

    def local_shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """Return the shape that one rank holds."""
        return tuple(parameter.shape)

    def _note(self, axis: BoundaryAxis, kind: CollectiveKind, moment: Moment, num_bytes: int) -> None:
        self._traffic.note(kind, moment, num_bytes, self._path, self._stack, axis)

    @contextlib.contextmanager
    def running(self, log: SaveLog) -> Iterator[None]:
        """Cut tokens and answer attention in a forward pass inside, as the methods do in real runs.

        Args:
            log: Grows with every tensor saved for backward.
        """
        self._traffic.begin(log)
        self._stack, self._path = [], ""
        hooks = self._token_wise.take_parts()
        for blocks in self._lists:
            for path, block in blocks:
                for ranks in reversed(self._every):
                    hooks += self._answering(path, block, ranks)
                for module in block.modules():
                    hooks.append(module.register_forward_pre_hook(self._enter))
                    hooks.append(module.register_forward_hook(self._leave, prepend=True))
            for ranks in self._every:
                hooks += cut_tokens(self._model, blocks, ranks)
        try:
            with grouped_keys():
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._stack.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()

    def _answering(self, path: str, block: nn.Module, ranks: TokenRanks) -> list[Any]:
        running: list[AttentionCalls] = []

        def start(module: nn.Module, args: Any) -> None:
            self._path = path
            running.append(AttentionCalls(ranks.attend))
            running[-1].__enter__()

        def stop(module: nn.Module, args: Any, output: Any) -> None:
            calls = running.pop()
            calls.__exit__(None, None, None)
            if not calls.count and output is not None:
                raise cannot_intercept(path, ranks.order.method)

        return [
            block.register_forward_pre_hook(start),
            block.register_forward_hook(stop, prepend=True, always_call=True),
        ]

    def boundaries(self, model: nn.Module, log: SaveLog) -> tuple[Boundary, ...]:
        """Return the collectives of the last run in one micro-batch."""
        return self._traffic.boundaries()


# --- The method

AXIS: Final = "sequence"

# Keys of ATorch: the size of the axis, and the modules' method that it calls with it.
_FOREIGN = dict.fromkeys(
    ("sp_size", "module", "set_sp_func_name", "batch_sp_processing_fn"),
    "leave it out, and give the size of the axis sequence: ('parallel_mode', [('sequence', 2)])",
)


class SequenceParallel(Method):
    """Divides the tokens over ranks, each running the blocks on a contiguous part; attention exchanges them for heads.

    Ranks along the axis ``sequence`` take the same samples. Inside attention an all-to-all exchanges tokens for heads,
    and another one reverses it (Jacobs et al. 2023, DeepSpeed-Ulysses). The model is not changed: its blocks lie in an
    ``nn.ModuleList`` and call ``torch.nn.functional.scaled_dot_product_attention``, as plain models do, and
    transformers' with ``sdpa``.

    Code before the blocks (embeddings, masks, positions), and the head and the loss, runs on all tokens on every rank:
    tokens are cut before the first block and gathered behind the last norm, so that positions, masks and a loss across
    the cut (the next token's) are those of one process. Every rank computes the same loss; averaging gradients over the
    axis, as over ``data``, gives those of one process, since each collective's backward is its transpose.

    Together with ``context_parallel`` the tokens of each context rank are divided once more, and the ring connects
    ranks with the same heads (Fang and Zhao 2024, USP). ``tensor_parallel`` with ``sequence=True`` divides what is left
    once more between its layers.
    """

    method_name: ClassVar[str] = "sequence_parallel"
    phase: ClassVar[Phase] = Phase.SEQUENCE
    summary: ClassVar[str] = "splits the tokens over the sequence axis; attention exchanges them for heads"
    effect: ClassVar[str] = (
        "memory: activations / n. Time: the blocks' / n. Communication: four all-to-alls per attention and pass"
    )
    seed_name: ClassVar[str | None] = "ColossalAI: all_to_all"
    axis: ClassVar[str | None] = AXIS
    foreign_keys: ClassVar[Mapping[str, str]] = _FOREIGN
    foreign_off: ClassVar[Mapping[str, tuple[Any, ...]]] = {"sp_size": (None, 0, 1)}

    @classmethod
    def axis_sizes(cls, divisors: Sequence[int], node: int) -> tuple[int, ...]:
        """Stay within a node: attention waits for every exchange."""
        return within_node(divisors, node)

    @property
    def surcharge(self) -> float:
        """Ask much: it is for samples that do not fit otherwise, where it is the only way, or much the fastest."""
        return 0.05

    def traced_tokens(self, sizes: Mapping[str, int], within: int) -> Ranks | None:
        """See :class:`~meshwright.methods.planner_hooks.PlannerHooks`."""
        ranks = sizes.get(AXIS, 1)
        return functools.partial(TracedSequence, ranks, sizes.get("context", 1), within) if ranks > 1 else None

    def check(self, job: Job) -> None:
        """Refuse models whose blocks cannot work on a part of the tokens, as tried on a sample if there is one."""
        size = job.size(AXIS)
        if size > 1:
            divisor = size * job.size("tensor")  # the tensor axis divides the heads, too
            check_parts(job, TokenOrder(self.method_name, size, 0), functools.partial(check_heads, ranks=divisor))

    def apply(self, job: Job) -> None:
        """Cut and gather tokens in hooks around the blocks, and replace attention inside them."""
        if job.size(AXIS) > 1:
            axis = TensorAxis(job.require_mesh()[AXIS])
            within = parts_between_layers(job.strategy, job.size)
            work_on_parts(job.model, SequenceRanks(axis, job.size("context"), within))
            whole_input_gradients(job.model, axis)

    def cost(self, step: Step) -> Step:
        """Add the exchanges of every micro-batch; the trace has seen a part of the tokens already."""
        return send_boundaries(step, AXIS)
