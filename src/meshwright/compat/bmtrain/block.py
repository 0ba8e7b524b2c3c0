"""BMTrain's ``Block``: a module that is gathered when it runs, and recomputed in backward.

FSDP2 does the work: a Block is an FSDP2 unit. Beside the class there are two mechanisms: Blocks count what they gather,
so that ``OptimManager`` can compare the ranks; and a Block that has not run can be released, so that the ranks of a
pipeline stage may shard its module.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from meshwright.compat.bmtrain.distributed_module import has_run, prepare_root, shard_as_unit
from meshwright.compat.bmtrain.parameter import keeping_records
from meshwright.errors import ModelError
from meshwright.inspect import Record, captured, hand_over, recording_active
from meshwright.nn.fsdp_units import parameter_groups
from meshwright.nn.module_structure import subclass_like
from meshwright.nn.recompute_buffers import recompute_contexts
from meshwright.runtime import ShardAxes, require_distributed, settings
from meshwright.runtime.torch_internals.fsdp import undo_fully_shard

BlockMode = Literal["BLOCK", "PIPE"]
_STATE = "_meshwright_block"


@dataclass(frozen=True)
class BlockState:
    """Options of a Block. They lie in the module, so all Blocks of one module share them."""

    use_checkpoint: bool
    zero_level: int
    unit: Any
    """The first Block of the module, which is the FSDP2 unit."""
    place: int | None
    """Its number, equal on all ranks that gather in every call; None in a pipeline stage or below level 3."""


_PLACES = itertools.count()


class Block(nn.Module):
    """``Block(module)`` shards a module over all ranks, gathers it when it runs, and recomputes it in backward.

    The result is the module in all but identity: an instance of its class with the same attributes, submodules,
    parameter names and hooks. Any arguments, keywords and results pass through; tensors nested in them keep their
    gradients. Several Blocks of one module share its weights.

    Args:
        module: The module to wrap. Its plain parameters must be equal on all ranks: each keeps its part of them.
        use_checkpoint: Keep only the block's inputs and run its forward again in backward (Chen et al. 2016).
        zero_level: 3 frees the gathered parameters after forward and gathers them again in backward; 2 keeps them in
            between; 1 also accumulates whole gradients under :func:`no_sync`. None takes ``init_distributed``'s.
        initialized: Accepted for BMTrain's callers; parameters are sharded as they are either way.
        mode: Accepted for BMTrain's callers, ``"BLOCK"`` or ``"PIPE"``: a PipelineTransformerBlockList takes both.
        axes: The axes of a pipeline stage, over which distributed parameters are sharded already; None for all ranks.

    Raises:
        LaunchError: Before ``init_distributed``.
        ModelError: When the module cannot be sharded, or another Block of it has other options.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an instance of a subclass of the module's class, around the module's own ``__dict__``."""
        # Code of the wrapped class makes another instance of it, as slices of nn.Sequential do.
        if cls is not Block:
            return _wrapped_class(cls)(*args, **kwargs)
        return _around(*args, **kwargs)

    def __init__(
        self,
        module: nn.Module,
        use_checkpoint: bool = True,
        zero_level: int | None = None,
        initialized: bool = False,
        mode: BlockMode = "BLOCK",
        *,
        axes: ShardAxes | None = None,
    ) -> None:
        # No nn.Module.__init__: ``__dict__`` is the module's, which is initialised.
        _check_mode(mode)
        level = settings().zero_level if zero_level is None else zero_level
        known: BlockState | None = self.__dict__.get(_STATE)
        if known is None:
            _check_level(level)
            shard_as_unit(self, reshard_after_forward=level == 3, axes=axes)
            place = next(_PLACES) if axes is None else None
            self.__dict__[_STATE] = BlockState(use_checkpoint, level, self, place if level == 3 else None)
        elif (known.use_checkpoint, known.zero_level) != (use_checkpoint, level):
            raise ModelError(
                "A module is wrapped in two Blocks with different options",
                expected=f"use_checkpoint={known.use_checkpoint}, zero_level={known.zero_level}, as in its first Block",
                got=f"use_checkpoint={use_checkpoint}, zero_level={level}",
                fix="wrap it alike in all places: its parameters are gathered in one way",
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block; parameters gathered without autograd are freed at once."""
        prepare_root(self)
        if self._state.place is not None:
            note_gather(self._state.place)
        result = super().__call__(*args, **kwargs)
        if isinstance(result, _Recorded):
            hand_over(result.records, result.tensors)
            result = result.output
        if not torch.is_grad_enabled():
            self.free()  # no backward frees them, and the next step changes the shards
        return result

    def after_failure(self) -> None:
        """Gather and free as a successful forward does: ranks that have not failed wait for this gather."""
        self.unit.unshard()
        if self._state.zero_level == 3 or not torch.is_grad_enabled():
            self.free()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        if has_run(self.unit):
            _refuse_other_dtypes(self, fn)
        with keeping_records(self.parameters()):
            return super()._apply(fn, recurse)

    def free(self) -> None:
        """Free the gathered parameters; the shards remain."""
        self.unit.reshard()

    @property
    def unit(self) -> Any:
        """Return the first Block of this module: the FSDP2 unit, with FSDP2's own methods."""
        return self._state.unit

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward, to be recomputed in backward with ``use_checkpoint``."""
        run = super().forward
        if recording_active():
            run = functools.partial(_recorded, run)
        if self._state.use_checkpoint and torch.is_grad_enabled():
            return checkpoint(run, *args, use_reentrant=False, **recompute_contexts([self]), **kwargs)
        return run(*args, **kwargs)

    @property
    def _state(self) -> BlockState:
        state: BlockState | None = self.__dict__.get(_STATE)
        if state is None:
            raise ModelError(
                "A Block was used that has moved to another stage of a pipeline",
                expected="calls of the PipelineTransformerBlockList that it was put into",
                got=f"one of a {_wrapped_class(type(self)).__name__} by itself",
                fix="call the list",
            )
        return state


class _Recorded(NamedTuple):
    """Result of a block's forward while an inspector records: FSDP2's hooks must see the recorded tensors, too."""

    output: Any
    records: list[Record]
    tensors: list[torch.Tensor]


def _recorded(run: Callable[..., Any], *args: Any, **kwargs: Any) -> _Recorded:
    with captured() as records:
        output = run(*args, **kwargs)
    return _Recorded(output, records, [record.tensor for record in records])


def block_of(module: nn.Module) -> Block | None:
    """Return the first Block of a module or of one of its Blocks; None if there is none."""
    state: BlockState | None = module.__dict__.get(_STATE)
    return state.unit if state is not None else None


def _around(module: nn.Module, *_: Any, **__: Any) -> Block:
    require_distributed("A Block")
    if not isinstance(module, nn.Module) or isinstance(module, Block):
        raise ModelError(
            "A Block needs a module to wrap",
            expected="an nn.Module that is no Block yet",
            got="a Block" if isinstance(module, Block) else type(module).__name__,
            fix="pass the module itself; wrap it once for every place in which it is used",
        )
    block: Block = object.__new__(subclass_like(type(module), Block))
    object.__setattr__(block, "__dict__", module.__dict__)
    return block


def _wrapped_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class of the module inside a class made by :func:`_around`."""
    return cls.__mro__[cls.__mro__.index(Block) + 1]


def _refuse_other_dtypes(block: Block, fn: Callable[..., Any]) -> None:
    # FSDP2 keeps the buffers it gathers into, in the dtype of the first forward.
    for name, parameter in block.named_parameters():
        dtype = fn(torch.empty(0, dtype=parameter.dtype)).dtype
        if dtype != parameter.dtype:
            raise ModelError(
                "A Block that has run cannot change its dtype",
                expected=f"{name} to stay {parameter.dtype}",
                got=str(dtype),
                fix="convert the model before its first forward, or save it and load it into a new one",
            )


CheckpointBlock = Block
"""BMTrain 0.2.0's name."""


def _check_level(level: int) -> None:
    if level not in (1, 2, 3):
        raise ModelError(
            "zero_level is not a ZeRO level", expected="1, 2 or 3", got=repr(level), fix="use 3 to shard everything"
        )


def _check_mode(mode: str) -> None:
    if mode not in ("BLOCK", "PIPE"):
        raise ModelError(
            "mode is not one of BMTrain's", expected="'BLOCK' or 'PIPE'", got=repr(mode), fix="leave it out"
        )


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate whole gradients in Blocks of ``zero_level`` 1; the next backward outside reduces them all at once.

    Use it for all micro-batches but the last. Blocks of level 2 and 3 never hold whole gradients: they reduce in every
    backward, and accumulate the reduced ones.
    """
    units = {module.unit for module in model.modules() if isinstance(module, Block)}
    units = {unit for unit in units if unit._state.zero_level == 1}
    for unit in units:
        unit.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        for unit in units:
            unit.set_requires_gradient_sync(True)


# --- Releasing a Block. FSDP2 cannot undo ``fully_shard``, so this edits its hooks, registries and classes.


def check_can_be_released(block: Block) -> None:
    """Check that a Block has not run, for FSDP2 would have set up buffers for it.

    Raises:
        ModelError: When it has.
    """
    if has_run(block.unit):
        raise ModelError(
            "A Block that has run cannot move onto a pipeline stage",
            expected="Blocks that nobody has called yet",
            got=f"a {type(block).__name__} that has run",
            fix="put the blocks into the PipelineTransformerBlockList before the model's first forward",
        )


def released(block: Block) -> tuple[nn.Module, BlockState]:
    """Return the module of a Block, no longer an FSDP2 unit, and the options of the Block.

    Parameters stay the DTensors that they are. All Blocks of a module share its ``__dict__``: none of them can run
    until the module is in a Block again.
    """
    state = block._state
    for unit in [module for module in state.unit.modules() if isinstance(module, FSDPModule)]:
        undo_fully_shard(unit, parameter_groups(unit))
    del block.__dict__[_STATE]
    module: nn.Module = object.__new__(_wrapped_class(type(block)))
    object.__setattr__(module, "__dict__", block.__dict__)
    return module, state


# --- [Note: gather-order check of Blocks] Ranks pair gathers by order alone.
#
# Where ranks run other Blocks, or in another order, each gets a mixture of weights and no error. So every gather is
# hashed into a number, which OptimManager sends along with the overflow flag and compares.

_MODULUS = 2**20  # exact in fp32, in which the number travels

_order = 0


def note_gather(place: int) -> None:
    """Add a gather to the hash, by a number that it has on all ranks."""
    global _order
    if not torch.compiler.is_compiling():
        _order = (_order * 31 + place + 1) % _MODULUS


def take_gather_order() -> int:
    """Return the hash of all gathers since the last call, equal on ranks that gathered the same in one order."""
    global _order
    taken, _order = _order, 0
    return taken
