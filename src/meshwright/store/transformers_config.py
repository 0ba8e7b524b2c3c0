"""What transformers' ``from_pretrained`` reads beside weights: ``config.json`` and ``generation_config.json``."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from meshwright.errors import CheckpointError
from meshwright.store.file_format import make_folder


def write_config(model: nn.Module, folder: Path) -> None:
    """Writes a transformers model's configs; for other models, and around adapters, nothing. For one process.

    They name the model's own class, and the dtype of its weights as they are now: ``from_pretrained`` takes both.

    Args:
        model: Without DDP and torch.compile around it.
        folder: Made if it is missing.

    Raises:
        CheckpointError: When they cannot be written, or transformers finds them wrong.
    """
    configs = _configs(model)
    if not configs:
        return
    make_folder(folder)
    try:
        for config in configs:
            config.save_pretrained(folder)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"The model's config was not written into {folder}",
            expected="a writable folder, and a config and generation_config that transformers accepts",
            got=f"{type(error).__name__}: {error}",
            fix="correct what it names, or choose another folder",
        ) from error


def _configs(model: nn.Module) -> list[Any]:
    config: Any = getattr(model, "config", None)
    generation: Any = getattr(model, "generation_config", None)
    # Names of adapted layers are peft's: with a config beside them from_pretrained would leave those layers random.
    if not _can_save(model) or not _can_save(config) or hasattr(model, "peft_config"):
        return []
    config = copy.deepcopy(config)
    # fully_shard has put a class of its own before the model's.
    config.architectures = [next(each for each in type(model).__mro__ if not issubclass(each, FSDPModule)).__name__]
    dtype = next((each.dtype for each in model.parameters() if each.is_floating_point()), None)
    if dtype is not None:
        setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", str(dtype).removeprefix("torch."))
    return [config, generation] if _can_save(generation) else [config]


def _can_save(thing: Any) -> bool:
    return callable(getattr(thing, "save_pretrained", None))
