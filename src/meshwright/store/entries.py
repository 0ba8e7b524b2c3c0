"""A model as named tensors: the same names whether it is plain, compiled, or wrapped in DDP or FSDP2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from meshwright.store.plain import from_plain, to_plain

# Wrapper modules that a name passes through; the root's own wrappers are taken off before.
_TRANSPARENT = ("_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True)
class ModelEntries:
    """The state dict of a model, cut into what is stored as tensors and what as JSON."""

    module: nn.Module
    """The model without DDP and torch.compile around it."""
    raw: dict[str, Any]
    """Its state dict with live parameters, under its own names."""
    tensors: dict[str, torch.Tensor]
    """Live tensors under the stored names; of tied ones only the first name."""
    values: dict[str, Any]
    """What is not a tensor (``get_extra_state``), in JSON types."""

    def load(self, values: dict[str, Any]) -> None:
        """Hands everything to the model after ``tensors`` were filled in place.

        For ordinary parameters this changes nothing more; modules with load hooks or extra state need it.
        """
        stored = {name: from_plain(values[stored_name(name)]) for name in self.raw if stored_name(name) in values}
        self.module.load_state_dict(self.raw | stored)


def model_entries(model: nn.Module) -> ModelEntries:
    """Names all persistent tensors of a model; does not communicate.

    Raises:
        CheckpointError: When a module's extra state cannot be stored.
    """
    module = unwrapped(model)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # after a forward without backward the root still holds the gathered weights
    raw: dict[str, Any] = module.state_dict(keep_vars=True)
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    seen: set[int] = set()
    for name, value in raw.items():
        if not isinstance(value, torch.Tensor):
            values[stored_name(name)] = to_plain(value, name)
        elif id(value) not in seen:
            seen.add(id(value))
            tensors[stored_name(name)] = value
    return ModelEntries(module, raw, tensors, values)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model without DDP and torch.compile around it."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(compiled := getattr(model, "_orig_mod", None), nn.Module):
            model = compiled
        else:
            return model


def stored_name(name: str) -> str:
    """The name without what wrappers add to it."""
    for wrapper in _TRANSPARENT:
        name = name.replace(wrapper, "")
    return name
