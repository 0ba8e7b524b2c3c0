"""Which blocks a pipeline stage holds, and what stands in the place of those that others hold."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NoReturn, Self

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.errors import ModelError
from meshwright.inspect import OUTLINE
from meshwright.nn.block import Block, BlockState, block_of
from meshwright.nn.layout import local_piece, sharded, sharded_piece, tensor_dim
from meshwright.nn.parameter import mark_moved, record_of, set_record
from meshwright.nn.release import check_can_be_released, released
from meshwright.runtime import pipe_size, stage_axes, stage_index


class Elsewhere(nn.Module):
    """Stands for a block of another stage, so that names and positions are those of the whole model.

    Args:
        block: What is there; its tensors are replaced by ones without memory.
        stage: Where it is.
    """

    def __init__(self, block: nn.Module, stage: int) -> None:
        super().__init__()
        self.stage = stage
        self.__dict__[OUTLINE] = block  # not a submodule: this rank has no such parameters

    @property
    def outline(self) -> nn.Module:
        """The block, without memory."""
        block: nn.Module = self.__dict__[OUTLINE]
        return block

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuses to run.

        Raises:
            ModelError: Always.
        """
        raise ModelError(
            "A block was called on a rank that does not hold it",
            expected=f"a call on stage {self.stage} of the pipeline",
            got=f"stage {stage_index()}",
            fix="call the PipelineTransformerBlockList as a whole; its blocks cannot be iterated",
        )

    def _load_from_state_dict(self, *args: Any) -> None:
        """Its entries are for other ranks: neither missing nor unexpected here."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if _whole_model:
            destination.update(self.outline.state_dict(prefix=prefix, keep_vars=keep_vars))

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Follows a conversion: dtypes are those that the block has on its stage."""
        self.outline._apply(lambda each: each.to(fn(torch.empty(0, dtype=each.dtype)).dtype))
        return super()._apply(fn, recurse)


_whole_model: list[None] = []  # not empty inside `whole_model`


@contextlib.contextmanager
def whole_model() -> Iterator[None]:
    """Lets ``state_dict()`` name what other stages hold too, as tensors on ``meta``: names are alike on all ranks."""
    _whole_model.append(None)
    try:
        yield
    finally:
        _whole_model.pop()


def stages_of(model: nn.Module, names: Iterable[str]) -> dict[str, int]:
    """The stage of every entry of a model's state dict that is on one; without those that all ranks hold."""
    paths: dict[str, int] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        children = module._modules
        if any(isinstance(child, Elsewhere) for child in children.values()):
            for key, child in children.items():
                paths[f"{prefix}{key}."] = child.stage if isinstance(child, Elsewhere) else stage_index()
    return {name: stage for name in names for path, stage in paths.items() if name.startswith(path)}


def stage_bounds(num_blocks: int, num_stages: int) -> list[int]:
    """Where stages begin and the last one ends: ``num_stages + 1`` numbers; the first stages get one block more.

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
    """This stage's modules as Blocks sharded over its ranks, and stand-ins for the others.

    Collective over the world where modules hold distributed parameters, as in Blocks: these are gathered one block at a
    time.

    Raises:
        ModelError: For a Block that has run; for too few modules; and for one that two stages would share.
    """
    bounds = stage_bounds(len(modules), pipe_size())
    owners = [stage for stage, (start, end) in enumerate(pairwise(bounds)) for _ in range(start, end)]
    _check(modules, owners)
    axes = stage_axes()  # collective where it is the first call: not on one stage alone
    result: list[nn.Module] = []
    known: dict[int, tuple[nn.Module, BlockState | None]] = {}
    for listed, owner in zip(modules, owners, strict=True):
        here = owner == stage_index()
        if _identity(listed) not in known:
            block = block_of(listed)
            module, asked = released(block) if block is not None else (listed, None)
            known[_identity(listed)] = module, asked
            _replace_tensors(module, here)
        module, asked = known[_identity(listed)]
        options = (asked.use_checkpoint, asked.zero_level) if asked is not None else ()
        result.append(Block(module, *options, axes=axes) if here else Elsewhere(module, owner))
    return result


def _identity(module: nn.Module) -> int:
    """The same for all Blocks of one module, which share their attributes."""
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
    """Makes parameters whole where they are needed, and takes away the memory of all tensors elsewhere."""
    made: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = _replacement(parameter, here)
            setattr(owner, name, made[id(parameter)])  # not into _parameters: recurrent modules keep a second list
        if not here:
            owner._buffers.update({name: each.to("meta") for name, each in owner._buffers.items() if each is not None})


def _replacement(parameter: nn.Parameter, here: bool) -> nn.Parameter:
    """On the ranks of its stage, or without memory; what is not distributed is equal on all ranks, and stays."""
    record = record_of(parameter)
    if here and not isinstance(parameter, DTensor):
        return parameter
    # All ranks gather, whoever needs it.
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
    """Every parameter of the whole model once, in its order, and whether this rank holds it; alike on all ranks."""
    seen: set[int] = set()
    for module in model.modules():
        parameters = module.outline.parameters() if isinstance(module, Elsewhere) else module.parameters(recurse=False)
        for parameter in parameters:
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter, not isinstance(module, Elsewhere)
