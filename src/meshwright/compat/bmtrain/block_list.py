"""`TransformerBlockList`: a stack of Blocks that is called as a whole, and its division over pipeline stages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from meshwright.compat.bmtrain.block import Block, BlockState, block_of, check_can_be_released, released
from meshwright.compat.bmtrain.distributed_module import prepare_root
from meshwright.compat.bmtrain.parameter import mark_moved, record_of, set_record
from meshwright.errors import ModelError
from meshwright.nn.model_layout import Elsewhere, local_piece, sharded, sharded_piece, tensor_dim
from meshwright.nn.recompute_buffers import recompute_contexts
from meshwright.runtime import pipe_size, stage_axes, stage_index


class TransformerBlockList(nn.ModuleList):
    """A stack of Blocks that run one after another, each gathered while the one before it computes.

    ``layers(x, *constants)`` is ``for layer in layers: x = layer(x, *constants)``. Iterating works as well.

    Args:
        modules: Blocks, or modules to wrap; the same module in several places shares its weights.
        num_hidden: Number of leading arguments that are hidden states: every block takes and returns so many. The other
            arguments are the same for every block.
        sqrt: Recompute in two levels, segments of about √L blocks and blocks in them: 2·√L saved inputs instead of L,
            for one more forward (Chen et al. 2016, §4).

    Raises:
        ModelError: When a Block is listed twice, or ``num_hidden`` is below 1.
    """

    def __init__(self, modules: Iterable[nn.Module], num_hidden: int = 1, sqrt: bool = False) -> None:
        listed = list(modules)
        check_listed(listed, num_hidden)
        super().__init__(m if isinstance(m, (Block, Elsewhere)) else Block(m) for m in listed)
        self.num_hidden = num_hidden
        self.sqrt = sqrt

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run all blocks."""
        prepare_root(self)
        return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, return_hidden_states: bool = False, **kwargs: Any) -> Any:
        """Run all blocks.

        Args:
            args: ``num_hidden`` hidden states, then the arguments of every block.
            return_hidden_states: Return the inputs of all blocks, too.
            kwargs: Keyword arguments of every block.

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
        """Run some blocks; return the last hidden states, and the inputs of each block."""
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
                # Recomputing a segment: its backward gathers blocks again, so that only one is whole at a time.
                block.free()
        return hidden, inputs

    def link_prefetch(self) -> None:
        """Let every block prefetch the next one, in forward and in backward; called when the FSDP2 root is set up."""
        units = [block.unit for block in self if isinstance(block, Block)]
        for first, second in itertools.pairwise(units):
            if first is not second:
                first.set_modules_to_forward_prefetch([second])
                second.set_modules_to_backward_prefetch([first])


def check_listed(modules: Sequence[nn.Module], num_hidden: int) -> None:
    """Check the arguments of a list of Blocks.

    Raises:
        ModelError: When a Block is listed twice, or ``num_hidden`` is below 1.
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


# --- Division over pipeline stages: Blocks of this stage, placeholders for those of others.


def stage_bounds(num_blocks: int, num_stages: int) -> list[int]:
    """Return ``num_stages + 1`` bounds of even stages; where blocks do not divide, the first stages have one more.

    Raises:
        ModelError: When a stage would have no block.
    """
    if num_blocks < num_stages:
        raise ModelError(
            "A pipeline has more stages than blocks",
            expected=f"at least {num_stages} blocks, one for each stage (init_distributed(pipe_size=))",
            got=str(num_blocks),
            fix="lower pipe_size",
        )
    size, more = divmod(num_blocks, num_stages)
    return [stage * size + min(stage, more) for stage in range(num_stages + 1)]


def staged(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return this stage's modules as Blocks over its ranks, and placeholders for the others.

    Collective over the world if modules have distributed parameters, as Blocks do: these are gathered one block at a
    time.

    Raises:
        ModelError: When a Block has run, there are too few modules, or two stages would share one.
    """
    bounds = stage_bounds(len(modules), pipe_size())
    owners = [stage for stage, (start, end) in enumerate(pairwise(bounds)) for _ in range(start, end)]
    _check(modules, owners)
    axes = stage_axes()  # its first call is collective, so all stages make it
    result: list[nn.Module] = []
    known: dict[int, tuple[nn.Module, BlockState | None]] = {}
    for listed, owner in zip(modules, owners, strict=True):
        here = owner == stage_index()
        if _identity(listed) not in known:
            block = block_of(listed)
            known[_identity(listed)] = released(block) if block is not None else (listed, None)
            _replace_tensors(known[_identity(listed)][0], here)
        module, state = known[_identity(listed)]
        options = (state.use_checkpoint, state.zero_level) if state is not None else ()
        result.append(Block(module, *options, axes=axes) if here else Elsewhere(module, owner))
    return result


def _identity(module: nn.Module) -> int:
    # All Blocks of one module share its ``__dict__``.
    return id(module.__dict__)


def _check(modules: Sequence[nn.Module], owners: Sequence[int]) -> None:
    first: dict[int, int] = {}
    for index, (module, owner) in enumerate(zip(modules, owners, strict=True)):
        block = block_of(module)
        if block is not None:
            check_can_be_released(block)
        if first.setdefault(_identity(module), owner) != owner:
            raise ModelError(
                "Two stages of a pipeline would share a module",
                expected="a module in several places of one stage only",
                got=f"the module at {index} on stages {first[_identity(module)]} and {owner}",
                fix="give every stage modules of its own",
            )


@torch.no_grad()
def _replace_tensors(module: nn.Module, here: bool) -> None:
    """Lay a module's parameters out over this stage's ranks, or move all its tensors to ``meta`` on other stages."""
    made: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = _replacement(parameter, here)
            # Not into _parameters directly: recurrent modules have a second list.
            setattr(owner, name, made[id(parameter)])
        if not here:
            owner._buffers.update({name: each.to("meta") for name, each in owner._buffers.items() if each is not None})


def _replacement(parameter: nn.Parameter, here: bool) -> nn.Parameter:
    record = record_of(parameter)
    # A plain parameter is equal on all ranks already.
    if here and not isinstance(parameter, DTensor):
        return parameter
    # All ranks take part in the gather, also those that do not need it.
    whole = parameter.full_tensor().detach() if isinstance(parameter, DTensor) else parameter.detach()
    mark_moved(parameter)
    dim = tensor_dim(parameter)
    if here and dim is not None:
        whole = sharded_piece(local_piece(whole, dim), dim, stage_axes())
    elif here and record is not None:
        whole = sharded(whole, stage_axes())
    replacement = nn.Parameter(whole if here else whole.to("meta"), requires_grad=parameter.requires_grad)
    if record is not None:
        set_record(replacement, replace(record, gather_on_use=True))  # until a Block takes it
    return replacement


def all_parameters(model: nn.Module) -> Iterator[tuple[nn.Parameter, bool]]:
    """Yield every parameter of the whole model once, and whether this rank has it; in one order on all ranks."""
    seen: set[int] = set()
    for module in model.modules():
        parameters = module.outline.parameters() if isinstance(module, Elsewhere) else module.parameters(recurse=False)
        for parameter in parameters:
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter, not isinstance(module, Elsewhere)
