"""A stack of Blocks called as a whole. Seed: BMTrain."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.errors import ModelError
from meshwright.nn.block import Block
from meshwright.nn.roots import prepare_root
from meshwright.nn.same_buffers import recompute_contexts
from meshwright.nn.stages import Elsewhere


class TransformerBlockList(nn.ModuleList):
    """Runs its Blocks one after another, each gathered while the one before it computes.

    ``layers(x, *constants)`` is ``for layer in layers: x = layer(x, *constants)``. Iterating works as well.

    Args:
        modules: Blocks, or modules that are then wrapped; the same module in several places shares its weights.
        num_hidden: How many leading arguments are hidden states: they flow from block to block, and a block returns as
            many. The other arguments are the same for every block.
        sqrt: Recompute in two levels, segments of about √L blocks and blocks in them: √L + √L saved inputs in place of
            L, for one more forward (Chen et al. 2016, §4).

    Raises:
        ModelError: For a Block that stands in two places, and an impossible ``num_hidden``.
    """

    def __init__(self, modules: Iterable[nn.Module], num_hidden: int = 1, sqrt: bool = False) -> None:
        listed = list(modules)
        check_listed(listed, num_hidden)
        super().__init__(m if isinstance(m, (Block, Elsewhere)) else Block(m) for m in listed)
        self.num_hidden = num_hidden
        self.sqrt = sqrt

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs all blocks."""
        prepare_root(self)
        return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, return_hidden_states: bool = False, **kwargs: Any) -> Any:
        """Runs all blocks.

        Args:
            args: ``num_hidden`` hidden states, then what every block gets.
            return_hidden_states: Return the inputs of all blocks, too.
            kwargs: What every block gets.

        Returns:
            The last block's hidden states: one tensor, or a tuple of ``num_hidden``. With ``return_hidden_states`` a
            tuple of these and of ``num_hidden`` tensors of shape (L, …), the inputs of the L blocks; differentiable.
        """
        hidden, constants = self._divided(args)
        inputs: list[tuple[Any, ...]] = []
        for segment in self._segments():
            if len(segment) > 1 and torch.is_grad_enabled():
                hidden, entered = checkpoint(
                    self._run, segment, hidden, constants, kwargs, use_reentrant=False, **recompute_contexts(segment)
                )
            else:
                hidden, entered = self._run(segment, hidden, constants, kwargs)
            inputs += entered
        if not return_hidden_states:
            return hidden[0] if self.num_hidden == 1 else hidden
        return (*hidden, *(torch.stack(states) for states in zip(*inputs, strict=True)))

    def _divided(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Hidden states, and what every block gets."""
        if len(args) < self.num_hidden:
            raise ModelError(
                "A TransformerBlockList got too few hidden states",
                expected=f"{self.num_hidden} leading arguments",
                got=str(len(args)),
                fix="pass hidden states by position, or change num_hidden",
            )
        return args[: self.num_hidden], args[self.num_hidden :]

    def _segments(self) -> list[list[Block]]:
        length = math.isqrt(max(len(self) - 1, 0)) + 1 if self.sqrt else 1
        blocks: list[Any] = list(self)
        return [blocks[start : start + length] for start in range(0, len(blocks), length)]

    def _run(
        self, blocks: Sequence[Block], hidden: tuple[Any, ...], constants: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], list[tuple[Any, ...]]]:
        """Runs some blocks; returns the hidden states after them, and those before each of them."""
        inputs = []
        for block in blocks:
            inputs.append(hidden)
            output = block(*hidden, *constants, **kwargs)
            hidden = (output,) if self.num_hidden == 1 else tuple(output)
            if len(hidden) != self.num_hidden:
                raise ModelError(
                    "A block returned another number of hidden states than it was given",
                    expected=f"{self.num_hidden} (num_hidden)",
                    got=str(len(hidden)),
                    fix="let the block return what flows on, and nothing else",
                )
            if len(blocks) > 1 and torch._C._current_graph_task_id() != -1:
                # Recomputing a segment: its backward gathers the block again, and so holds one block at a time.
                block.free()
        return hidden, inputs

    def link_prefetch(self) -> None:
        """Lets every block gather the next one ahead, in forward and in backward; called when the root is known."""
        units = [block.unit for block in self if isinstance(block, Block)]
        for first, second in itertools.pairwise(units):
            if first is not second:
                first.set_modules_to_forward_prefetch([second])
                second.set_modules_to_backward_prefetch([first])


def check_listed(modules: Sequence[nn.Module], num_hidden: int) -> None:
    """Refuses what no list of Blocks can be made of.

    Raises:
        ModelError: For a Block that stands in two places, and an impossible ``num_hidden``.
    """
    blocks = [id(module) for module in modules if isinstance(module, Block)]
    if len(set(blocks)) < len(blocks):
        twice = next(index for index, module in enumerate(modules) if blocks.count(id(module)) > 1)
        raise ModelError(
            "A Block stands in a TransformerBlockList twice",
            expected="every Block once",
            got=f"the Block at {twice} again",
            fix="to share weights, list the module itself several times, or wrap it in a Block for each place",
        )
    if num_hidden < 1:
        raise ModelError(
            "num_hidden is not a count", expected="1 or more", got=repr(num_hidden), fix="leave it out for one"
        )
