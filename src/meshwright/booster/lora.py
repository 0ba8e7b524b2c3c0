"""LoRA through the peft library: adapters around a plain model, and out of a boosted one into a folder."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from meshwright.errors import ConfigError, ModelError
from meshwright.runtime import rank, same_on_every_rank
from meshwright.store.entries import model_entries, stored_name
from meshwright.store.transfer import collect


def with_lora(model: nn.Module, pretrained_dir: str | os.PathLike[str] | None, lora_config: Any) -> nn.Module:
    """The model with adapters, new ones or those of a folder.

    Raises:
        ConfigError: When peft is not installed, neither a folder nor a config is given, or there is no such folder.
    """
    peft = _peft()
    if pretrained_dir is not None:
        if not Path(pretrained_dir).is_dir():
            raise ConfigError(
                "enable_lora finds no adapters",
                expected="a directory that save_lora_as_pretrained or peft has written; nothing is downloaded",
                got=str(pretrained_dir),
                fix="correct pretrained_dir",
            )
        return peft.PeftModel.from_pretrained(model, pretrained_dir, is_trainable=True)
    if lora_config is None:
        raise ConfigError(
            "enable_lora does not know which adapters to make",
            expected="lora_config, or pretrained_dir with saved adapters",
            got="neither",
            fix="pass lora_config=peft.LoraConfig(…)",
        )
    return peft.get_peft_model(model, lora_config)


def save_lora(model: nn.Module, folder: str | os.PathLike[str], use_safetensors: bool) -> None:
    """Writes the adapters of a boosted model, whole, as ``PeftModel.from_pretrained`` reads them; collective.

    Raises:
        ModelError: When the model has no adapters.
        CheckpointError: When the folder cannot be written.
    """
    peft = _peft()
    with same_on_every_rank():
        entries = model_entries(model)
        if not isinstance(entries.module, peft.PeftModel):
            raise ModelError(
                "The model has no LoRA adapters",
                expected="a model of enable_lora",
                got=type(entries.module).__name__,
                fix="call booster.enable_lora(model, …) before boost",
            )
        named = {stored_name(name): value for name, value in entries.raw.items() if isinstance(value, torch.Tensor)}
        wanted = adapter_names(entries.module, named)
    whole = {name: collect(named[name]) for name in wanted.values()}
    with same_on_every_rank():
        if rank() == 0:
            Path(folder).mkdir(parents=True, exist_ok=True)
            entries.module.save_pretrained(
                str(folder), state_dict=whole, safe_serialization=use_safetensors, save_embedding_layers=False
            )


def adapter_names(model: nn.Module, named: dict[str, torch.Tensor]) -> dict[str, str]:
    """The names of a model's adapters in peft's files, and those that they have in a state dict.

    Args:
        model: A ``PeftModel``.
        named: Its state dict, or a part of it.

    Raises:
        ConfigError: When peft is not installed.
    """
    names = {id(tensor): name for name, tensor in named.items()}
    kept = _peft().get_peft_model_state_dict(model, state_dict=named, save_embedding_layers=False)
    return {name: names[id(tensor)] for name, tensor in kept.items()}


def _peft() -> ModuleType:
    try:
        import peft
    except ImportError:
        raise ConfigError(
            "LoRA needs the peft library", expected="peft", got="no such package", fix="pip install peft"
        ) from None
    return peft
