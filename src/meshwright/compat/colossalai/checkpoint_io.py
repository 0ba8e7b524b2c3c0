"""Save and load models, optimizers, schedulers and LoRA adapters, each by itself, with ColossalAI's verbs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from meshwright.compat.colossalai import boost_checks as checks
from meshwright.compat.colossalai.boosted_optimizer import BoostedOptimizer
from meshwright.errors import ConfigError, ModelError
from meshwright.runtime import rank, same_on_every_rank
from meshwright.store import (
    load,
    load_lr_scheduler,
    load_optimizer,
    save,
    save_folder,
    save_lr_scheduler,
    save_optimizer,
)
from meshwright.store.entries import model_entries, stored_name
from meshwright.store.folder import adapter_names, peft_library
from meshwright.store.transfer import collect

_MIB = 2**20


class CheckpointVerbs:
    """Methods of a Booster that save and load."""

    def save_model(
        self,
        model: nn.Module,
        checkpoint: str | os.PathLike[str],
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_safetensors: bool = False,
        use_async: bool = False,
    ) -> None:
        """Write all weights, whole and under plain names; collective.

        Args:
            model: Boosted or plain.
            checkpoint: A file; safetensors when its name ends so, else as ``torch.save`` writes. A folder if ``shard``.
            shard: Write a folder of safetensors files with an index, as transformers reads it; a transformers model's
                ``config.json`` and ``generation_config.json`` lie beside them.
            gather_dtensor: Must be True.
            prefix: Prefix of the names of files in the folder.
            size_per_shard: Largest size of a file in the folder, in MiB.
            use_safetensors: Require a safetensors file; a folder always has them.
            use_async: Write in the background; see :func:`meshwright.store.wait_for_saves`.

        Raises:
            CheckpointError, ConfigError: On every rank, when the arguments are invalid or the path cannot be written.
        """
        checks.check_save(Path(checkpoint), shard, gather_dtensor, size_per_shard, use_safetensors)
        if shard:
            save_folder(model, checkpoint, prefix, size_per_shard * _MIB, use_async)
        else:
            save(model, checkpoint, non_blocking=use_async)

    def load_model(
        self,
        model: nn.Module,
        checkpoint: str | os.PathLike[str],
        strict: bool = True,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> None:
        """Load weights from a file or folder of :meth:`save_model`, of plain torch or of transformers; collective.

        fp32 master weights follow. A pickle is read with ``weights_only``: it cannot run code.

        Args:
            model: Boosted or plain; its values are replaced in place.
            checkpoint: A file, a folder, or the index in one.
            strict: Require the same names in the model and the checkpoint.
            low_cpu_mem_mode: No effect: tensors are always mapped from the file and sent one by one.
            num_threads: No effect.

        Raises:
            CheckpointError: On every rank, when it does not fit the model, which is then unchanged.
        """
        load(model, checkpoint, strict)

    def save_optimizer(
        self,
        optimizer: BoostedOptimizer,
        checkpoint: str | os.PathLike[str],
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_async: bool = False,
    ) -> None:
        """Write whole states, groups, fp32 master weights and loss scale by parameter names; collective.

        Args and errors are those of :meth:`save_model`; a folder holds safetensors, a file what ``torch.save`` writes.
        """
        checks.check_optimizer(optimizer)
        checks.check_save(Path(checkpoint), shard, gather_dtensor, size_per_shard, use_safetensors=False)
        checks.check_optimizer_file(Path(checkpoint), shard)
        options: dict[str, Any] = {"prefix": prefix, "shard_bytes": size_per_shard * _MIB, "non_blocking": use_async}
        save_optimizer(optimizer, optimizer.model, checkpoint, folder=shard, **options)

    def load_optimizer(
        self,
        optimizer: BoostedOptimizer,
        checkpoint: str | os.PathLike[str],
        prefix: str | None = None,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> None:
        """Load what :meth:`save_optimizer` wrote, under any plugin and on any number of ranks; collective.

        Args:
            optimizer: Boosted; replaced in place.
            checkpoint: The file or folder.
            prefix: Prefix of the names of files in the folder, if it has several checkpoints.
            low_cpu_mem_mode: No effect; see :meth:`load_model`.
            num_threads: No effect.

        Raises:
            CheckpointError: On every rank, when it does not fit; the optimizer is then unchanged.
        """
        checks.check_optimizer(optimizer)
        path = Path(checkpoint)
        path = path / f"{prefix}.optimizer.safetensors.index.json" if prefix and path.is_dir() else path
        load_optimizer(optimizer, optimizer.model, path)

    def save_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | os.PathLike[str]) -> None:
        """Write a scheduler's state as JSON, on rank 0; collective."""
        save_lr_scheduler(lr_scheduler, checkpoint)

    def load_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | os.PathLike[str]) -> None:
        """Load what :meth:`save_lr_scheduler` wrote; collective."""
        load_lr_scheduler(lr_scheduler, checkpoint)

    def save_lora_as_pretrained(
        self, model: nn.Module, checkpoint: str | os.PathLike[str], use_safetensors: bool = True
    ) -> None:
        """Write the adapters alone, whole, into a folder that ``peft`` and ``Booster.enable_lora`` read; collective.

        Raises:
            ModelError: When the model has no adapters.
            CheckpointError: When the folder cannot be written.
        """
        save_lora(model, checkpoint, use_safetensors)


def with_lora(model: nn.Module, pretrained_dir: str | os.PathLike[str] | None, lora_config: Any) -> nn.Module:
    """Put LoRA adapters of the peft library around a plain model, new ones or those of a folder.

    Raises:
        ConfigError: When peft is not installed, neither a folder nor a config is given, or there is no such folder.
    """
    peft = peft_library()
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
    """Write the adapters of a boosted model, whole, as ``PeftModel.from_pretrained`` reads them; collective.

    Raises:
        ModelError: When the model has no adapters.
        CheckpointError: When the folder cannot be written.
    """
    peft = peft_library()
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
