"""Running one block with random values, and what is exchanged in it: the parts that a proof is made of."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from meshwright.methods.tensor.compare import Refuted
from meshwright.methods.tensor.plan import PlannedLayer
from meshwright.methods.tensor.styles import LINEAR

_SEED = 5


@dataclass(frozen=True)
class Adjustment:
    """An attribute of a module that counts what a rank has only a part of."""

    path: str
    name: str
    value: int


@dataclass(frozen=True)
class BlockCall:
    """The arguments of one block: a tree whose tensors tell shape, type and whether they have a gradient."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    split: tuple[tuple[int, int], ...] = ()  # leaves that an earlier block gives split, and their dims
    fill: tuple[int, bool] = (0, True)  # what integers and booleans are: nobody can tell masks and indices apart

    def values(self) -> list[Any]:
        """Random leaves, integers and booleans as ``fill`` says. The same at every call."""
        generator = torch.Generator().manual_seed(_SEED)
        return [_random(leaf, generator, *self.fill) for leaf in tree_leaves((self.args, self.kwargs))]

    def filled(self) -> list[BlockCall]:
        """The same with other integers and booleans, where there are any: a mask may hide everything, or nothing."""
        leaves = tree_leaves((self.args, self.kwargs))
        kinds = {leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_floating_point()}
        integers = (0, 1) if kinds - {torch.bool} else (0,)
        booleans = (True, False) if torch.bool in kinds else (True,)
        return [replace(self, fill=fill) for fill in itertools.product(integers, booleans)]

    def tree(self, leaves: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments made of leaves."""
        args, kwargs = tree_unflatten(leaves, tree_flatten((self.args, self.kwargs))[1])
        return args, kwargs


def _random(leaf: Any, generator: torch.Generator, integer: int, boolean: bool) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if not leaf.is_floating_point():
        return torch.full(leaf.shape, boolean if leaf.dtype == torch.bool else integer, dtype=leaf.dtype)
    values = torch.randn(leaf.shape, generator=generator)
    return values.requires_grad_(leaf.requires_grad)


@dataclass
class Exchanged:
    """What the whole block has at the places where ranks exchange something; of a rank: what it contributes."""

    values: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)  # outputs of row layers
    gradients: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)  # of inputs of column layers


class _Meet(torch.autograd.Function):
    """Identity; in backward notes the gradient and goes on with ``whole``, as an all-reduce would."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, note: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        ctx.note = note
        return tensor.clone()  # a view could not be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return ctx.note(gradient), None


@contextlib.contextmanager
def evaluating(block: nn.Module) -> Iterator[None]:
    """Without dropout; modules go back to the mode they were in."""
    training = [module for module in block.modules() if module.training]
    block.eval()
    try:
        with torch.enable_grad():
            yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def adjusted(block: nn.Module, adjustments: tuple[Adjustment, ...]) -> Iterator[None]:
    """Sets attributes for a while."""
    before = [(a, getattr(block.get_submodule(a.path), a.name)) for a in adjustments]
    for adjustment in adjustments:
        setattr(block.get_submodule(adjustment.path), adjustment.name, adjustment.value)
    try:
        yield
    finally:
        for adjustment, value in before:
            setattr(block.get_submodule(adjustment.path), adjustment.name, value)


@contextlib.contextmanager
def meeting(layers: list[PlannedLayer], own: Exchanged, whole: Exchanged | None) -> Iterator[None]:
    """Lets row layers give what the whole block has, and column layers' inputs the gradients that it has."""
    hooks = []
    for layer in layers:
        if layer.style.output == "all_reduce":
            hooks.append(layer.module.register_forward_hook(_giving(layer.path, own, whole)))
        elif layer.style.name in LINEAR:
            hooks.append(layer.module.register_forward_pre_hook(_taking(layer.path, own, whole), prepend=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _giving(path: str, own: Exchanged, whole: Exchanged | None) -> Callable[..., torch.Tensor]:
    def give(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        key = (path, sum(1 for known, _ in own.values if known == path))
        own.values[key] = output.detach().clone()  # it may be changed in place
        if whole is None:
            return output
        expected = whole.values.get(key)
        if expected is None or expected.shape != output.shape:
            raise Refuted(f"the output of {path} has another shape")
        return output + (expected - output).detach()

    return give


def _taking(path: str, own: Exchanged, whole: Exchanged | None) -> Callable[..., tuple[Any, ...]]:
    count = 0

    def take(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        nonlocal count
        key, count = (path, count), count + 1

        def note(gradient: torch.Tensor) -> torch.Tensor:
            own.gradients[key] = gradient.detach()
            return gradient if whole is None else whole.gradients[key]

        return (_Meet.apply(args[0], note), *args[1:])

    return take
