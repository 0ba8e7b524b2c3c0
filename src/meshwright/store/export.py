"""The weights of a checkpoint on their own: one safetensors file, or a folder that transformers or peft loads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from meshwright.errors import CheckpointError, join_names
from meshwright.store.choice import TENSORS, verify
from meshwright.store.file_format import write_file
from meshwright.store.folder import write_folder
from meshwright.store.manifest import storage_errors
from meshwright.store.plain import dtype_named
from meshwright.store.record import Record
from meshwright.store.shards import load_shards

_MODEL = "model."
_SHARD_BYTES = 5 * 10**9  # what transformers writes


def export_weights(
    checkpoint: Path, out: Path, *, dtype: torch.dtype | None = None, config: str | None = None
) -> dict[str, torch.Tensor]:
    """Writes the weights and buffers of a checkpoint, whole, whatever layout of ranks saved them. For one process.

    Args:
        checkpoint: Directory of one checkpoint; verified first.
        out: A file that ends in ``.safetensors``, or a folder: ``model-00001-of-….safetensors`` and their index.
        dtype: Type of the floating-point tensors; None keeps what was saved, which is fp32 where there are masters.
        config: Text of a transformers ``config.json`` to write beside them; with it the folder is one that
            ``from_pretrained`` loads.

    Returns:
        What was written, by the model's names.

    Raises:
        CheckpointError: When the checkpoint is damaged, ``out`` exists already or cannot be written.
    """
    record = verify(checkpoint)
    _check_new(out)
    targets = _loaded(checkpoint, record, [name for name in record.tensors if name.startswith(_MODEL)])
    weights = {name.removeprefix(_MODEL): _in_dtype(tensor, dtype) for name, tensor in targets.items()}
    if out.suffix == ".safetensors":
        out.parent.mkdir(parents=True, exist_ok=True)
        write_file(out, dict(weights))
        return weights
    write_folder(weights, out, "model", shard_bytes=_SHARD_BYTES, metadata={})
    if config is not None:
        with storage_errors(f"{out} cannot be written", "make room, or choose another folder"):
            (out / "config.json").write_text(config, encoding="utf-8")
    return weights


def export_adapters(
    checkpoint: Path, out: Path, *, names: Mapping[str, str], config: str, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Writes the adapters of a checkpoint as a folder that peft's ``PeftModel.from_pretrained`` loads.

    Args:
        checkpoint: Directory of one checkpoint; verified first.
        out: A new folder.
        names: Of the adapters in peft's file, and in the model that was trained.
        config: Text of peft's ``adapter_config.json``.
        dtype: As of :func:`export_weights`.

    Returns:
        What was written, by peft's names.

    Raises:
        CheckpointError: When the checkpoint is damaged or has other tensors, ``out`` exists or cannot be written.
    """
    record = verify(checkpoint)
    _check_new(out)
    absent = [name for name in names.values() if _MODEL + name not in record.tensors]
    if absent:
        raise CheckpointError(
            f"{checkpoint} does not hold the adapters of its run",
            expected=f"{len(names)} tensors",
            got=f"none of the name {join_names(absent, 3)}",
            fix="name a checkpoint of the run that the directory describes",
        )
    found = _loaded(checkpoint, record, [_MODEL + name for name in names.values()])
    adapters = {name: _in_dtype(found[_MODEL + stored], dtype) for name, stored in names.items()}
    with storage_errors(f"{out} cannot be written", "make room, or choose another folder"):
        out.mkdir(parents=True)
        (out / "adapter_config.json").write_text(config, encoding="utf-8")
        write_file(out / "adapter_model.safetensors", dict(adapters))
    return adapters


def _check_new(out: Path) -> None:
    if out.exists():
        raise CheckpointError(
            f"{out} exists already", expected="a new file or folder", got="nothing was overwritten", fix="name another"
        )


def _loaded(checkpoint: Path, record: Record, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Whole tensors of a checkpoint."""
    told = {name: record.tensors[name] for name in names}
    targets = {name: torch.empty(entry.shape, dtype=dtype_named(entry.dtype)) for name, entry in told.items()}
    load_shards(targets, checkpoint / TENSORS)
    return targets


def _in_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
