"""Exchange tokens for heads around attention (Ulysses): `sequence_parallel`, and its trace."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from meshwright.cost import Boundary, BoundaryAxis, CollectiveKind, Moment, Step, send_boundaries
from meshwright.errors import ModelError, StrategyError
from meshwright.methods.base import Job, Method, Phase
from meshwright.methods.planner_hooks import within_node
from meshwright.methods.replace.model_changes import one_sequence_per_sample
from meshwright.methods.tensor.axis_exchange import TensorAxis
from meshwright.methods.tensor.split_proof import TOKENS_DIM
from meshwright.methods.tokens.attention_calls import (
    AttentionCalls,
    TokenOrder,
    TokenRanks,
    cannot_intercept,
    check_among_parts,
    check_mask,
    grouped_keys,
)
from meshwright.methods.tokens.token_split import (
    block_lists,
    check_parts,
    cut_tokens,
    whole_input_gradients,
    without_cache,
    work_on_parts,
)
from meshwright.nn import class_names
from meshwright.runtime.autograd_function import Function

METHOD = "sequence_parallel"


class SequenceRanks(TokenRanks):
    """Ranks that exchange tokens for heads; gradients pass through it.

    Args:
        axis: The mesh axis.
        ring: Ranks of the context axis, whose ring goes around these: together they have all tokens.
    """

    axis: ClassVar[str] = "sequence"

    def __init__(self, axis: TensorAxis, ring: int = 1) -> None:
        self._axis, self._ring = axis, ring
        self.order = TokenOrder(METHOD, axis.size, axis.index)

    def exchange(self, parts: torch.Tensor) -> torch.Tensor:
        """All-to-all of ``parts`` (n, elements): row r goes to rank r, and row r of the result is from rank r."""
        arrived: torch.Tensor = _Exchange.apply(parts, self._axis.group)
        return arrived

    def gather(self, hidden: torch.Tensor) -> torch.Tensor:
        """One all-gather; a reduce-scatter in backward."""
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
    ) -> torch.Tensor:
        """See :meth:`TokenRanks.attend`; the axis must divide the heads."""
        n = self.order.size
        check_among_parts(query, key, value, METHOD)
        check_heads(query, n)
        if attn_mask is not None:
            check_mask(attn_mask, query.shape[2] * n * self._ring, METHOD)
            attn_mask = self._own_heads(attn_mask, query.shape[1])
        if key.shape[1] % n:  # groups would be torn
            key, value = _ungrouped(query, key, value)
        q, k, v = self._heads_of_tokens((query, key, value))
        if attn_mask is not None and k.shape[1] != q.shape[1] and self._ring == 1:
            k, v = _ungrouped(q, k, v)  # torch has no fast kernel for both groups and masks on CUDA
        output = scaled_dot_product_attention(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa and k.shape[1] != q.shape[1]
        )
        return self._tokens_of_heads(output)

    def _heads_of_tokens(self, tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """CollectiveLog tokens for heads, all tensors in one message."""
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
    """Its own backward: what row r became of came from rank r."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return _all_to_all(gradient, ctx.group), None


def _all_to_all(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    arrived = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(arrived, parts.contiguous(), group=group)
    return arrived


def _ungrouped(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values with one head for each of the query's."""
    return (
        key.repeat_interleave(query.shape[1] // key.shape[1], 1),
        value.repeat_interleave(query.shape[1] // value.shape[1], 1),
    )


def check_heads(query: torch.Tensor, ranks: int) -> None:
    """Refuse queries (batch, heads, …) whose heads the axis does not divide.

    Raises:
        ModelError: Alike on every rank of the axis.
    """
    if query.shape[1] % ranks:
        raise ModelError(
            "sequence_parallel: the axis does not divide the attention heads, which it exchanges for tokens",
            expected=f"a multiple of {ranks} heads",
            got=str(query.shape[1]),
            fix="use a smaller sequence axis in parallel_mode, or context_parallel, which divides no heads",
        )


# --- Axes that divide the tokens in a trace: one rank's part of them, and what it would send. For predictions.


class Ledger(Protocol):
    """Notes what would be sent."""

    def __call__(self, axis: BoundaryAxis, kind: CollectiveKind, moment: Moment, num_bytes: int) -> None:
        """Note one collective."""


class Ranks(Protocol):
    """Makes the ranks of a trace, which send nothing and note all."""

    def __call__(self, note: Ledger) -> TokenRanks:
        """Ranks that note what they would send."""


class TracedSequence(SequenceRanks):
    """The first rank of a sequence axis.

    Args:
        size: Of the axis.
        ring: See :class:`SequenceRanks`.
        note: Told what would be sent.
    """

    def __init__(self, size: int, ring: int, note: Ledger) -> None:
        self._ring, self._note = ring, note
        self.order = TokenOrder("sequence_parallel", size, 0)

    def exchange(self, parts: torch.Tensor) -> torch.Tensor:
        """Note an exchange and the one of its gradients."""
        self._note("sequence", "all_to_all", "forward", tensor_bytes(parts))
        if parts.requires_grad:
            self._note("sequence", "all_to_all", "backward", tensor_bytes(parts))
        return parts.contiguous().clone()

    def gather(self, hidden: torch.Tensor) -> torch.Tensor:
        """See :func:`traced_gather`."""
        return traced_gather(self, hidden, self._note)


def traced_gather(ranks: TokenRanks, hidden: torch.Tensor, note: Ledger) -> torch.Tensor:
    """Note the gathering of the tokens and the sum of their gradients."""
    whole = torch.cat([hidden] * ranks.order.size, TOKENS_DIM)
    note(ranks.axis, "all_gather", "forward", tensor_bytes(whole))  # type: ignore[arg-type]
    if hidden.requires_grad:
        note(ranks.axis, "reduce_scatter", "backward", tensor_bytes(whole))  # type: ignore[arg-type]
    return ranks.order.in_order(whole, TOKENS_DIM)


class TokensTrace:
    """Lets a plain model run as the first of the ranks would that have parts of its tokens; all they send is counted.

    Args:
        model: The model.
        axes: The ranks of each axis, the innermost first.
    """

    divides_batch: ClassVar[bool] = True

    def __init__(self, model: nn.Module, *axes: Ranks) -> None:
        self._every = [axis(self._note) for axis in axes]
        self._lists = block_lists(model, self._every[0].order.method)
        self.dims: dict[nn.Parameter, int] = {}
        """The dims of parameters that the axes divide: none."""
        self._path = ""  # of the block that runs, or ran last
        self._stack: list[nn.Module] = []  # the modules that run, blocks and what is in them
        self._log: list[tuple[nn.Module, ...]] = []
        self._sent: list[tuple[Boundary, int, tuple[nn.Module, ...]]] = []

    def local_shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """Return the shape that one rank holds."""
        return tuple(parameter.shape)

    def _note(self, axis: BoundaryAxis, kind: CollectiveKind, moment: Moment, num_bytes: int) -> None:
        self._sent.append(
            (Boundary(kind, moment, num_bytes, axis=axis, path=self._path), len(self._log), (*self._stack,))
        )

    @contextlib.contextmanager
    def running(self, log: list[tuple[nn.Module, ...]]) -> Iterator[None]:
        """Around one forward pass, with what :func:`cut_tokens` and ``answering`` do.

        Args:
            log: Grows with every tensor saved for backward.
        """
        self._log, self._sent, self._stack, self._path = log, [], [], ""
        hooks = []
        for blocks in self._lists:
            for path, block in blocks:
                for ranks in reversed(self._every):
                    hooks += self._answering(path, block, ranks)
                for module in block.modules():
                    hooks.append(module.register_forward_pre_hook(self._enter))
                    hooks.append(module.register_forward_hook(self._leave, prepend=True))
            for ranks in self._every:
                hooks += cut_tokens(blocks, ranks)
        try:
            with grouped_keys(), one_sequence_per_sample():
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

    def boundaries(self, model: nn.Module, log: list[tuple[nn.Module, ...]]) -> tuple[Boundary, ...]:
        """Return what the last run sends in one micro-batch."""
        found = []
        for boundary, position, around in self._sent:
            needed = {module for stack in log[position:] for module in stack}
            needed_in = _names([module for module in around if module in needed])
            found.append(dataclasses.replace(boundary, inside=_names(around), needed_in=needed_in))
        return tuple(found)


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of its elements."""
    return tensor.numel() * tensor.element_size()


def _names(modules: Any) -> tuple[str, ...]:
    return tuple(sorted({name for module in modules for name in class_names(module)}))


# --- ``sequence_parallel``: each rank works on a part of the tokens; attention exchanges tokens for heads (Ulysses).

AXIS: Final = "sequence"

# What ATorch asks for: a size, and the method of the model's modules that it calls with it.
_REFUSED = frozenset({"sp_size", "module", "set_sp_func_name", "batch_sp_processing_fn"})


class SequenceParallel(Method):
    """Ranks along the axis ``sequence`` take the same samples; each runs the blocks on a contiguous part of the tokens.

    Inside attention an all-to-all exchanges tokens for heads, and another one goes back (Jacobs et al. 2023,
    DeepSpeed-Ulysses). The model stays as it is: its blocks lie in an ``nn.ModuleList`` and call
    ``torch.nn.functional.scaled_dot_product_attention``, as plain models do and transformers' with ``sdpa``.

    What is before the blocks (embeddings, masks, positions) and behind them (norm, head, loss) runs on all tokens on
    every rank: tokens are cut before the first block and gathered behind the last, so that positions, masks and a loss
    across the cut (the next token's) are those of one process. Every rank computes the same loss; averaging gradients
    over the axis, as over ``data``, gives those of one process, since each collective's backward is its transpose.

    Beside ``context_parallel`` the tokens of each context rank are divided once more, and the ring goes around these
    ranks (Fang and Zhao 2024, USP).
    """

    method_name: ClassVar[str] = "sequence_parallel"
    phase: ClassVar[Phase] = Phase.SEQUENCE
    summary: ClassVar[str] = "splits the tokens over the sequence axis; attention exchanges them for heads"
    effect: ClassVar[str] = (
        "memory: activations / n. Time: the blocks' / n. Communication: four all-to-alls per attention and pass"
    )
    seed_name: ClassVar[str | None] = "ColossalAI: all_to_all"
    axis: ClassVar[str | None] = AXIS

    @classmethod
    def normalised(cls, keys: dict[str, Any]) -> dict[str, Any]:
        """Refuse ATorch's keys, of which the mesh says one and the model none."""
        given = sorted(_REFUSED.intersection(keys))
        if given:
            raise StrategyError(
                f"{cls.method_name}: keys of ATorch mean nothing here",
                expected="no keys",
                got=", ".join(given),
                fix="leave them out, and give the size of the axis sequence: ('parallel_mode', [('sequence', 2)])",
            )
        return keys

    @classmethod
    def axis_sizes(cls, divisors: Sequence[int], node: int) -> tuple[int, ...]:
        """Stay within a node: attention waits for every exchange."""
        return within_node(divisors, node)

    def traced_tokens(self, sizes: Mapping[str, int]) -> Ranks | None:
        """See :class:`~meshwright.methods.planner_hooks.PlannerHooks`."""
        ranks = sizes.get(AXIS, 1)
        return functools.partial(TracedSequence, ranks, sizes.get("context", 1)) if ranks > 1 else None

    def check(self, job: Job) -> None:
        """Refuse models whose blocks cannot work on a part of the tokens, found out on a sample where there is one."""
        size = job.size(AXIS)
        if size > 1:
            divisor = size * job.size("tensor")  # which has divided the heads before
            check_parts(job, TokenOrder(self.method_name, size, 0), functools.partial(check_heads, ranks=divisor))

    def apply(self, job: Job) -> None:
        """Cut and gather tokens in hooks around the blocks, and take over attention inside them."""
        if job.size(AXIS) > 1:
            axis = TensorAxis(job.require_mesh()[AXIS])
            work_on_parts(job.model, SequenceRanks(axis, job.size("context")))
            whole_input_gradients(job.model, axis)
            without_cache(job, self.method_name)

    def cost(self, step: Step) -> Step:
        """Return what is exchanged in every micro-batch.

        Activations and operations are traced with a part of the tokens.
        """
        return send_boundaries(step, AXIS)
