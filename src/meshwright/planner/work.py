"""Floating-point operations by place: before the blocks that a pipeline cuts, in each of them, and behind them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from meshwright.cost import Placed
    from meshwright.planner.profile.flops import FlopCount

BACKWARD_FLOPS = 2  # the two products of backward, each as large as the one of forward


class PlacedWork:
    """Counts forward, and backward after it, of a model that runs under a FLOP counter.

    Args:
        model: The model.
        blocks: Of the list that is cut; they run in this order.
        counter: Counts while the model runs.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], counter: FlopCount) -> None:
        self._model, self._counter = model, counter
        self._index = {block: index for index, block in enumerate(blocks)}
        self._place, self._before = -1, 0
        self.forward = dict.fromkeys(range(-1, len(blocks) + 1), 0)
        self._arrived: dict[int, int] = {}  # block -> FLOPs before its backward

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Around the forward pass."""
        hooks = []
        for module in self._index:
            hooks.append(module.register_forward_pre_hook(self._enter))
            hooks.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self._switch(self._place)

    def everything(self, loss: torch.Tensor) -> Placed:
        """Forward and backward; the latter runs now. Where it cannot, it counts as twice the forward."""
        start = self._counter.total
        try:
            loss.backward()
        except Exception:  # what a user's function does to tensors without data; time is an estimate all the same
            return tuple(((place,), flops * (1 + BACKWARD_FLOPS)) for place, flops in self.forward.items())
        return tuple(((place,), flops + self._backward(place, start)) for place, flops in self.forward.items())

    def _backward(self, place: int, start: int) -> int:
        """From the arrival of the gradient of a block's output to that of the block before."""
        marks = {**self._arrived, len(self._index): start}
        if place not in marks:
            return 0  # before the blocks, where the first block's end cannot be told from it; or all is frozen
        following = [marks[earlier] for earlier in range(place) if earlier in marks]
        return (following[-1] if following else self._counter.total) - marks[place]

    def _switch(self, place: int) -> None:
        now = self._counter.total
        self.forward[self._place] += now - self._before
        self._place, self._before = place, now

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._switch(self._index[module])

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        index = self._index[module]
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._note(index))
        if index == len(self._index) - 1:
            self._switch(index + 1)

    def _note(self, index: int) -> None:
        self._arrived.setdefault(index, self._counter.total)
