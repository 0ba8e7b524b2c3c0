"""What the outermost module prepares on its first call: one FSDP2 root over all units, and averaged gradients."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from meshwright.errors import ModelError, join_names
from meshwright.nn.averaging import average_gradients, is_alike_on_tensor_ranks
from meshwright.nn.parameter import record_of, was_moved
from meshwright.nn.renorm import check_no_renorm
from meshwright.runtime import replica_index, seed_replica, settings, world_size, zero_mesh

# In a module's __dict__: plain parameters that were frozen so far. Its presence says that the module is prepared.
_FROZEN = "_meshwright_frozen"


def prepare_root(module: nn.Module) -> None:
    """Prepares everything below ``module`` for training, once; modules below it have nothing left to do.

    The units below get one FSDP2 root, so that they share streams and gather ahead of one another. Gradients of plain
    parameters are averaged over the ranks: nobody else would. The first forward of all gives every rank its own seed.
    """
    frozen = module.__dict__.get(_FROZEN)
    if frozen is None:
        _refuse_left_behind(module)
        check_no_renorm(module, world_size())
        _refuse_adapters_of_shards(module)
        for inner in module.modules():
            inner.__dict__[_FROZEN] = []
        # All units are sharded now, before the first forward: what is no DTensor is plain.
        frozen = [p for p in module.parameters() if not isinstance(p, DTensor) or _reduced_by_unit_only(p)]
        _share_root(module)
        _seed_this_rank()
    if frozen:
        module.__dict__[_FROZEN] = average_gradients(frozen, world_size())


def _reduced_by_unit_only(parameter: nn.Parameter) -> bool:
    """In a unit: outside, gathering reduces over all ranks."""
    record = record_of(parameter)
    return is_alike_on_tensor_ranks(parameter) and not (record is not None and record.gather_on_use)


_seeded: object = None  # the world in which this rank has seeds of its own


def _seed_this_rank() -> None:
    """From the first forward of a world on, every replica draws its own dropout masks; models were made alike before.

    Ranks of a tensor group draw the same ones: some of what they drop from, all of them have.
    """
    global _seeded
    if world_size() > 1 and _seeded is not dist.group.WORLD:
        _seeded = dist.group.WORLD
        seed_replica(settings().seed, replica_index())


def _refuse_left_behind(module: nn.Module) -> None:
    """Refuses parameters that were tied to one that a Block has taken: they would train apart."""
    left = [name for name, parameter in module.named_parameters() if was_moved(parameter)]
    if left:
        raise ModelError(
            "A parameter was shared with a Block, which holds a sharded one in its place now",
            expected="parameters that are shared within one Block, or outside all Blocks",
            got=join_names(left),
            fix="share the whole module between Blocks, or keep the parameter out of them",
        )


def _refuse_adapters_of_shards(module: nn.Module) -> None:
    """Refuses the LoRA of peft that is as large as a rank's part: it takes sharded weights for tensor parallel ones."""
    wrong = []
    for path, layer in module.named_modules():
        base, downs, ups = (getattr(layer, name, None) for name in ("base_layer", "lora_A", "lora_B"))
        if isinstance(base, nn.Linear) and isinstance(downs, nn.ModuleDict) and isinstance(ups, nn.ModuleDict):
            off = any(getattr(each, "in_features", base.in_features) != base.in_features for each in downs.values())
            off |= any(getattr(each, "out_features", base.out_features) != base.out_features for each in ups.values())
            wrong += [path] if off else []
    if wrong:
        raise ModelError(
            "peft has made adapters for the shards of weights, and not for the weights",
            expected="adapters that are made before the model is wrapped",
            got=f"adapters of other sizes than their layers: {join_names(wrong)}",
            fix="change the order: BMTrainModelWrapper(get_peft_model(model, …))",
        )


def _share_root(module: nn.Module) -> None:
    units = [inner for inner in module.modules() if isinstance(inner, FSDPModule)]
    # A unit that ran on its own before is a root of its own, and stays one.
    if not units or module in units or any(has_run(unit) for unit in units):
        return
    # All parameters are ignored: those of the units are theirs, and the others gather on use. In a list, for torch 2.11
    # refuses what derives from ModuleList, even where it can be called.
    fully_shard([module], mesh=zero_mesh(), reshard_after_forward=False, ignored_params=set(module.parameters()))
    for inner in module.modules():
        link = getattr(inner, "link_prefetch", None)
        if link is not None:
            link()


def has_run(unit: FSDPModule) -> bool:
    """Whether FSDP2 has run a unit's forward: what it set up then is fixed."""
    return fully_shard.state(unit)._is_root is not None  # type: ignore[attr-defined]
