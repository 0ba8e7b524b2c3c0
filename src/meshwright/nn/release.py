"""Taking a Block apart again, so that the ranks of a pipeline stage may shard its module. FSDP2 knows no way back."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule, fully_shard

from meshwright.errors import ModelError
from meshwright.nn.block import Block, BlockState, unwrapped
from meshwright.nn.fsdp_groups import parameter_groups
from meshwright.nn.roots import has_run


def check_can_be_released(block: Block) -> None:
    """Refuses a Block that has run: FSDP2 has set up buffers for it.

    Raises:
        ModelError: Saying so.
    """
    if has_run(block.unit):
        raise ModelError(
            "A Block that has run cannot move onto a pipeline stage",
            expected="Blocks that nobody has called yet",
            got=f"a {type(block).__name__} that has run",
            fix="put the blocks into the PipelineTransformerBlockList before the model's first forward",
        )


def released(block: Block) -> tuple[nn.Module, BlockState]:
    """The module of a Block without what sharding added, but for its parameters; and what the Block was asked for.

    The module shares its attributes with all Blocks of it: these cannot run until it is in a Block again.
    """
    state = block._state
    for unit in [module for module in state.unit.modules() if isinstance(module, FSDPModule)]:
        _unshard_unit(unit)
    return unwrapped(block), state


def _unshard_unit(unit: Any) -> None:
    """Undoes ``fully_shard`` of one module, whose parameters stay the DTensors that they are."""
    state = fully_shard.state(unit)  # type: ignore[attr-defined]
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    for group in parameter_groups(unit):
        for parameter in group.fsdp_params:
            parameter._post_load_hook_handle.remove()
    del _module_state_mapping[unit]
    unit.__dict__[STATE_KEY] = {key: kept for key, kept in unit.__dict__[STATE_KEY].items() if kept is not state}
    unit.__dict__[REGISTRY_KEY].pop("fully_shard", None)
    unit.__class__ = type(unit).__bases__[1]  # behind FSDPModule
