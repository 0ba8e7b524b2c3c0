"""A sequence axis in a trace: one rank's part of the tokens, and what it would send. For predictions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn

from meshwright.cost import Boundary
from meshwright.methods.sequence.attention import AttentionCalls, SequenceRanks, attend_over_heads
from meshwright.methods.sequence.tokens import block_lists, cannot_intercept, cut_tokens
from meshwright.methods.tensor.sequence_trial import TOKENS_DIM
from meshwright.nn import class_names

_Sent = tuple[Literal["all_to_all", "all_gather", "reduce_scatter"], Literal["forward", "backward"], int, int]


class SequenceTrace(SequenceRanks):
    """Lets a plain model run as the first of the ranks of a sequence axis would; nothing is sent, all is counted.

    Args:
        model: The model.
        ranks: Size of the axis.
    """

    def __init__(self, model: nn.Module, ranks: int) -> None:
        self._lists = block_lists(model)
        self.size, self.index = ranks, 0
        self.dims: dict[nn.Parameter, int] = {}
        """The dims of parameters that the axis divides: none."""
        self._stack: list[nn.Module] = []  # the modules that run, blocks and what is in them
        self._log: list[tuple[nn.Module, ...]] = []
        self._sent: list[tuple[_Sent, tuple[nn.Module, ...]]] = []

    def local_shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """The shape that one rank holds."""
        return tuple(parameter.shape)

    def exchange(self, parts: torch.Tensor) -> torch.Tensor:
        """Counts an exchange and the one of its gradients."""
        self._count("all_to_all", "all_to_all", parts)
        return parts.contiguous().clone()

    def gather(self, hidden: torch.Tensor) -> torch.Tensor:
        """Counts the gathering of the tokens and the sum of their gradients."""
        whole = torch.cat([hidden] * self.size, TOKENS_DIM)
        self._count("all_gather", "reduce_scatter", whole)
        return whole

    def _count(
        self,
        forward: Literal["all_to_all", "all_gather"],
        backward: Literal["all_to_all", "reduce_scatter"],
        tensor: torch.Tensor,
    ) -> None:
        size, around = tensor.numel() * tensor.element_size(), tuple(self._stack)
        self._sent.append(((forward, "forward", size, len(self._log)), around))
        if tensor.requires_grad:
            self._sent.append(((backward, "backward", size, len(self._log)), around))

    @contextlib.contextmanager
    def running(self, log: list[tuple[nn.Module, ...]]) -> Iterator[None]:
        """Around one forward pass, with what :func:`cut_tokens` and ``over_heads`` do.

        Args:
            log: Grows with every tensor saved for backward.
        """
        self._log, self._sent, self._stack = log, [], []
        hooks = []
        for blocks in self._lists:
            for path, block in blocks:
                hooks += self._attending(path, block)
                for module in block.modules():
                    hooks.append(module.register_forward_pre_hook(self._enter))
                    hooks.append(module.register_forward_hook(self._leave, prepend=True))
            hooks += cut_tokens(blocks, self)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._stack.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()

    def _attending(self, path: str, block: nn.Module) -> list[Any]:
        running: list[AttentionCalls] = []

        def start(module: nn.Module, args: Any) -> None:
            running.append(AttentionCalls(lambda *args, **kwargs: attend_over_heads(self, *args, **kwargs)))
            running[-1].__enter__()

        def stop(module: nn.Module, args: Any, output: Any) -> None:
            calls = running.pop()
            calls.__exit__(None, None, None)
            if not calls.count and output is not None:
                raise cannot_intercept(path)

        return [
            block.register_forward_pre_hook(start),
            block.register_forward_hook(stop, prepend=True, always_call=True),
        ]

    def boundaries(self, model: nn.Module, log: list[tuple[nn.Module, ...]]) -> tuple[Boundary, ...]:
        """What the last run sends in one micro-batch."""
        found = []
        for (kind, moment, size, position), around in self._sent:
            needed = {module for stack in log[position:] for module in stack}
            needed_in = _names([module for module in around if module in needed])
            found.append(Boundary(kind, moment, size, _names(around), needed_in, axis="sequence"))
        return tuple(found)


def _names(modules: Any) -> tuple[str, ...]:
    return tuple(sorted({name for module in modules for name in class_names(module)}))
