"""Axes that divide the tokens in a trace: one rank's part of them, and what it would send. For predictions."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from meshwright.cost import Boundary, BoundaryAxis, CollectiveKind, Moment
from meshwright.methods.sequence.attention import SequenceRanks
from meshwright.methods.sequence.calls import AttentionCalls, TokenRanks, cannot_intercept, grouped_keys
from meshwright.methods.sequence.order import TokenOrder
from meshwright.methods.sequence.tokens import block_lists, cut_tokens
from meshwright.methods.tensor.sequence_trial import TOKENS_DIM
from meshwright.methods.traced_transformers import one_sequence_per_sample
from meshwright.nn import class_names


class Ledger(Protocol):
    """Notes what would be sent."""

    def __call__(self, axis: BoundaryAxis, kind: CollectiveKind, moment: Moment, num_bytes: int) -> None:
        """Notes one collective."""


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
        """Notes an exchange and the one of its gradients."""
        self._note("sequence", "all_to_all", "forward", tensor_bytes(parts))
        if parts.requires_grad:
            self._note("sequence", "all_to_all", "backward", tensor_bytes(parts))
        return parts.contiguous().clone()

    def gather(self, hidden: torch.Tensor) -> torch.Tensor:
        """See :func:`traced_gather`."""
        return traced_gather(self, hidden, self._note)


def traced_gather(ranks: TokenRanks, hidden: torch.Tensor, note: Ledger) -> torch.Tensor:
    """Notes the gathering of the tokens and the sum of their gradients."""
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
        """The shape that one rank holds."""
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
        """What the last run sends in one micro-batch."""
        found = []
        for boundary, position, around in self._sent:
            needed = {module for stack in log[position:] for module in stack}
            needed_in = _names([module for module in around if module in needed])
            found.append(dataclasses.replace(boundary, inside=_names(around), needed_in=needed_in))
        return tuple(found)


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of its elements."""
    return tensor.numel() * tensor.element_size()


def _names(modules: Any) -> tuple[str, ...]:
    return tuple(sorted({name for module in modules for name in class_names(module)}))
