"""Run a stack of Blocks as one module, `TransformerBlockList`, and place such stacks on pipeline stages."""

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
from meshwright.runtime.torch_internals.autograd import current_graph_task_id
from meshwright.runtime.torch_internals.modules import buffers_of, parameters_of


class TransformerBlockList(nn.ModuleList):
    """Runs its Blocks one after another, gathering each while the one before it computes.

    ``layers(x, *constants)`` is ``for layer in layers: x = layer(x, *constants)``. Iterating works as well.

    Args:
        modules: Blocks, or modules that are then wrapped; the same module in several places shares its weights.
        num_hidden: Number of leading arguments that are hidden states: they flow from block to block, and a block
            returns as many. The other arguments are the same for every block.
        sqrt: Recompute on two levels, segments of about √L blocks and single blocks in them: √L + √L saved inputs
            instead of L, for one more forward (Chen et al. 2016, §4).

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
        """Run all blocks."""
        prepare_root(self)
        return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, return_hidden_states: bool = False, **kwargs: Any) -> Any:
        """Run all blocks.

        Args:
            args: ``num_hidden`` hidden states, then arguments of every block.
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
        """Return the hidden states and the other positional arguments."""
        if len(args) < self.num_hidden:
            raise ModelError(
                "A TransformerBlockList was called with too few hidden states",
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
        """Run some blocks; return the hidden states after them, and those before each of them."""
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
                    fix="let the block return its hidden states, and nothing else",
                )
            # When a segment is recomputed, its backward gathers each block again: hold one block at a time.
            if len(blocks) > 1 and current_graph_task_id() != -1:
                block.free()
        return hidden, inputs

    def link_prefetch(self) -> None:
        """Let every block prefetch the next one, in forward and in backward; called once FSDP2's root is known."""
        units = [block.unit for block in self if isinstance(block, Block)]
        for first, second in itertools.pairwise(units):
            if first is not second:
                first.set_modules_to_forward_prefetch([second])
                second.set_modules_to_backward_prefetch([first])


def check_listed(modules: Sequence[nn.Module], num_hidden: int) -> None:
    """Refuse modules that cannot form a list of Blocks.

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


# --- Placing blocks on pipeline stages


def stage_bounds(num_blocks: int, num_stages: int) -> list[int]:
    """Return ``num_stages + 1`` bounds of stages; the first stages get the blocks that are left over.

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
    """Return this stage's modules as Blocks sharded over its ranks, and placeholders for those of other stages.

    Collective over the world if modules hold distributed parameters, as Blocks do: these are gathered one block at a
    time.

    Raises:
        ModelError: For a Block that has run, too few modules, and a module that two stages would share.
    """
    bounds = stage_bounds(len(modules), pipe_size())
    owners = [stage for stage, (start, end) in enumerate(pairwise(bounds)) for _ in range(start, end)]
    _check(modules, owners)
    axes = stage_axes()  # the first call is collective, so every stage makes it here
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
    """Return a key that is equal for all Blocks of one module, which share their attributes."""
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
    """Gather parameters for the stage that holds them, and move all tensors to ``meta`` on the others."""
    made: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in parameters_of(owner).items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = _replacement(parameter, here)
            # By setattr, since recurrent modules keep a second list of their parameters.
            setattr(owner, name, made[id(parameter)])
        if not here:
            buffers_of(owner).update(
                {name: each.to("meta") for name, each in buffers_of(owner).items() if each is not None}
            )


def _replacement(parameter: nn.Parameter, here: bool) -> nn.Parameter:
    """Return a parameter sharded over its stage's ranks, or on ``meta`` elsewhere.

    One that is not distributed is equal on all ranks and stays.
    """
    record = record_of(parameter)
    if here and not isinstance(parameter, DTensor):
        return parameter
    # Gathering is collective: ranks that do not need the parameter take part.
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
    """Yield every parameter of the whole model once, and whether this rank holds it; in one order on all ranks."""
    seen: set[int] = set()
    for module in model.modules():
        parameters = module.outline.parameters() if isinstance(module, Elsewhere) else module.parameters(recurse=False)
        for parameter in parameters:
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter, not isinstance(module, Elsewhere)
