"""Trying out a split whose blocks hand on a part of the tokens: what is exchanged in it. See ``proof``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from meshwright.methods.tensor.compare import Refuted, close
from meshwright.methods.tensor.plan import PlannedLayer
from meshwright.methods.tensor.trial import Exchanged

TOKENS_DIM = 1
Where = int | str
"""An argument of a module: its place, or its name."""


def hidden_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Where | None:
    """Which argument is a hidden state (batch, tokens, features): the first of such a form; None when there is none."""
    every: list[tuple[Where, Any]] = [*enumerate(args), *kwargs.items()]
    for where, value in every:
        if isinstance(value, torch.Tensor) and value.dim() == 3 and value.is_floating_point():
            return where
    return None


def with_argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a module with its hidden state changed."""
    where = hidden_argument(args, kwargs)
    if where is None:
        return args, kwargs
    if isinstance(where, int):
        return (*args[:where], change(args[where]), *args[where + 1 :]), kwargs
    return args, {**kwargs, where: change(kwargs[where])}


class _Exchange(torch.autograd.Function):
    """Gives ``value`` for a tensor; in backward notes the gradient and goes on with what the note returns."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, value: torch.Tensor, note: Callable[..., torch.Tensor]) -> torch.Tensor:
        ctx.note = note
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return ctx.note(gradient), None, None


class SequenceTrial:
    """Gathers tokens where modules need them all, and scatters sums of row layers.

    Args:
        scopes: Paths of the modules that take all tokens.
        ranks: Size of the axis.
    """

    def __init__(self, scopes: tuple[str, ...], ranks: int) -> None:
        self._scopes, self._ranks = scopes, ranks
        self._inputs: dict[tuple[str, int], torch.Tensor] = {}  # of the whole block's scopes
        self._slopes: dict[tuple[str, int], torch.Tensor] = {}  # gradients of the whole block's row outputs

    @contextlib.contextmanager
    def meeting(
        self, block: nn.Module, layers: list[PlannedLayer], own: Exchanged, whole: Exchanged | None, rank: int
    ) -> Iterator[None]:
        """Around one run; the first one is that of the whole block."""
        hooks = []
        for path in self._scopes:
            hook = self._gathering(path, own, whole, rank)
            hooks.append(block.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True, prepend=True))
        for layer in layers:
            if layer.style.output == "all_reduce":
                hooks.append(layer.module.register_forward_hook(self._scattering(layer.path, own, whole, rank)))
        try:
            yield
        finally:
            for each in hooks:
                each.remove()

    def _part(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        return tensor.chunk(self._ranks, TOKENS_DIM)[rank]

    def _gathering(self, path: str, own: Exchanged, whole: Exchanged | None, rank: int) -> Callable[..., Any]:
        count = 0

        def gather(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal count
            key, count = (path, count), count + 1

            def note(gradient: torch.Tensor) -> torch.Tensor:
                own.gradients[key] = gradient.detach()
                return gradient if whole is None else self._part(whole.gradients[key], rank)

            def change(tensor: torch.Tensor) -> torch.Tensor:
                if whole is None:
                    self._inputs[key] = tensor.detach().clone()
                elif not close(tensor, self._part(self._inputs[key], rank), 0.0):
                    raise Refuted(f"{path} does not get a part of the tokens")
                return _Exchange.apply(tensor, self._inputs[key], note)

            if hidden_argument(args, kwargs) is None:
                raise Refuted(f"{path} takes no hidden state")
            return with_argument(args, kwargs, change)

        return gather

    def _scattering(self, path: str, own: Exchanged, whole: Exchanged | None, rank: int) -> Callable[..., Any]:
        count = 0

        def scatter(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            nonlocal count
            key, count = (path, count), count + 1
            own.values[key] = output.detach().clone()

            def note(gradient: torch.Tensor) -> torch.Tensor:
                if whole is None:
                    self._slopes[key] = gradient.detach()
                    return gradient
                if not close(gradient, self._part(self._slopes[key], rank), 0.0):
                    raise Refuted(f"the gradient of the output of {path} is not that of the whole block")
                return self._slopes[key]

            if whole is None:
                return _Exchange.apply(output, output.detach(), note)
            if output.shape != whole.values[key].shape:
                raise Refuted(f"the output of {path} has another shape")
            return _Exchange.apply(output, self._part(whole.values[key], rank), note)

        return scatter


def first_hidden(leaves: Any) -> int | None:
    """The place of the hidden state among the leaves of a tree."""
    for place, leaf in enumerate(tree_leaves(leaves)):
        if isinstance(leaf, torch.Tensor) and leaf.dim() == 3 and leaf.is_floating_point():
            return place
    return None
