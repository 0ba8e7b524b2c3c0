"""Gathered weights do not outlive an update of their shards, whoever gathered them and whoever updates."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from meshwright.nn.fsdp_groups import parameter_groups

_units: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_hooked = False


def reshard(model: nn.Module) -> None:
    """Frees what is gathered of a sharded model, else it would be taken for its weights after the shards have changed.

    Nothing is communicated, and nothing done where nothing is gathered.
    """
    reshard_units(model.modules())


def reshard_units(modules: Iterable[nn.Module]) -> None:
    """The same for those of these modules that are FSDP2 units; without a walk where they are known."""
    for module in modules:
        if isinstance(module, FSDPModule):  # what has been taken apart is no unit any more
            module.reshard()


def reshard_at_updates(units: Iterable[nn.Module]) -> None:
    """Frees what is gathered of FSDP2 units after every step of an optimizer of their parameters, from now on.

    Backward frees it; but a forward after that, for a metric say, gathers it again, and leaves it so where no backward
    is to gather it twice. FSDP2 would compute the next forward with these weights, of before the update.
    """
    global _hooked
    _units.update(units)
    if not _hooked:
        # torch's for all optimizers: nobody tells here which one will be built over these parameters.
        register_optimizer_step_post_hook(_reshard_updated)
        _hooked = True


def _reshard_updated(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    # What has been taken apart since is no unit any more.
    gathered = [unit for unit in list(_units) if isinstance(unit, FSDPModule) and _is_gathered(unit)]
    if not gathered:
        return
    # Only those that this optimizer updates: it may be one of few ranks, and to gather again takes all of them.
    updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for unit in gathered:
        if any(id(each.sharded_param) in updated for group in parameter_groups(unit) for each in group.fsdp_params):
            unit.reshard()


def _is_gathered(unit: FSDPModule) -> bool:
    return any(not group.is_sharded for group in parameter_groups(unit))


@contextlib.contextmanager
def gathered_root(model: nn.Module) -> Iterator[None]:
    """Whole weights outside of units while parts of a model are called by themselves; all are shards afterwards."""
    assert isinstance(model, FSDPModule)
    fully_shard.state(model)._lazy_init()  # type: ignore[attr-defined]  # else the part that is called becomes a root
    model.unshard()
    try:
        yield
    finally:
        reshard(model)
