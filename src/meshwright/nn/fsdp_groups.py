"""What FSDP2 knows of a unit and does not say in public."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import FSDPModule, fully_shard


def parameter_groups(unit: FSDPModule) -> list[Any]:
    """FSDP2's groups of the parameters that it communicates together; none where the unit has none of its own."""
    return groups_of(fully_shard.state(unit))  # type: ignore[attr-defined]


def groups_of(state: Any) -> list[Any]:
    """The same of what FSDP2 keeps for a unit, its ``FSDPState``."""
    # torch 2.11 knows one group, later versions list them.
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]
