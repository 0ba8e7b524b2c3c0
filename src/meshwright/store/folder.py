"""Tensors in a folder: safetensors files of limited size and an index, as transformers' ``from_pretrained`` reads."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from meshwright.errors import CheckpointError, join_names
from meshwright.runtime import rank, same_on_every_rank
from meshwright.store.file_format import make_folder, read_file, write_file, write_text
from meshwright.store.transfer import collect
from meshwright.store.writer import run_later

_INDEX = ".index.json"
_OPTIMIZER = "optimizer.safetensors"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


def write_folder(
    tensors: Mapping[str, torch.Tensor],
    folder: Path,
    stem: str,
    *,
    shard_bytes: int,
    metadata: Mapping[str, Any],
    non_blocking: bool = False,
    gather: Callable[[str], torch.Tensor | None] | None = None,
) -> None:
    """Writes tensors into files of at most ``shard_bytes`` each (or one tensor), then the index; collective.

    Rank 0 gathers and writes one file after the other, so it holds one file's tensors at a time (all of them when
    ``non_blocking``). The index appears last: a folder without it was not finished.

    Args:
        tensors: The same names on every rank: plain tensors, equal on all ranks, or DTensors.
        folder: Made if it is missing; files of the same stem are replaced.
        stem: ``stem-00001-of-00002.safetensors`` … and ``stem.safetensors.index.json``.
        shard_bytes: Largest size of a file.
        metadata: What the index holds beside the names, in JSON types.
        non_blocking: Write in the background.
        gather: Brings a tensor to the host of rank 0, where ``tensors`` are ones on ``meta`` that tell what will come.

    Raises:
        CheckpointError: On every rank, when the folder cannot be written.
    """
    folder = folder.absolute()  # the program may be elsewhere when a file is written in the background
    gather = gather or (lambda name: collect(tensors[name]))
    shards = _cut(tensors, shard_bytes)
    files = [f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    with same_on_every_rank():
        if rank() == 0:
            make_folder(folder)
            _remove_old(folder, stem)
    for file, names in zip(files, shards, strict=True):
        gathered = {name: gather(name) for name in names}
        with same_on_every_rank():
            if rank() == 0:
                _now_or_later(non_blocking, write_file, folder / file, gathered)
        del gathered
    weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    total = sum(_bytes(tensor) for tensor in tensors.values())
    index = {"metadata": {"total_size": total, **metadata}, "weight_map": weight_map}
    with same_on_every_rank():
        if rank() == 0:
            text = json.dumps(index, indent=1) + "\n"
            _now_or_later(non_blocking, write_text, folder / f"{stem}.safetensors{_INDEX}", text)


def _now_or_later(later: bool, function: Any, *arguments: Any) -> None:
    if later:
        run_later(function, *arguments)
    else:
        function(*arguments)


def _cut(tensors: Mapping[str, torch.Tensor], limit: int) -> list[list[str]]:
    """Names in order, cut where the next tensor would make a file too large."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + _bytes(tensor) > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += _bytes(tensor)
    return shards


def _bytes(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape) * tensor.element_size()


def _remove_old(folder: Path, stem: str) -> None:
    try:
        for old in (folder / f"{stem}.safetensors{_INDEX}", *folder.glob(f"{stem}-?????-of-?????.safetensors")):
            old.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"An earlier checkpoint in {folder} cannot be replaced",
            expected="a folder whose files may be deleted",
            got=str(error),
            fix="save into another folder",
        ) from error


def is_folder(path: Path) -> bool:
    """Whether a path names a folder of tensors or its index, rather than one file of them."""
    return path.is_dir() or path.name.endswith(_INDEX)


def read_folder(path: Path, kind: str = "model") -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads all tensors of a folder: of :func:`write_folder`, or of transformers (.bin files as weights only).

    Args:
        path: The folder, or the index in it. Without an index the folder must hold one weights file.
        kind: ``"model"`` or ``"optimizer"``, where both lie in one folder.

    Returns:
        The tensors, mapped from the files, and the index's metadata.

    Raises:
        CheckpointError: When index or files are absent, damaged, or not what the index says.
    """
    indices = [each for each in sorted(path.glob(f"*{_INDEX}")) if (_OPTIMIZER in each.name) == (kind == "optimizer")]
    index = path if path.name.endswith(_INDEX) else _only(path, _preferred(indices), "index")
    if index is None:
        files = [file for file in sorted(path.iterdir()) if file.suffix in _WEIGHTS and "optimizer" not in file.name]
        files = _preferred(files)
        single = _only(path, files, "weights file")
        if single is None:
            raise CheckpointError(
                f"{path} holds no weights",
                expected=f"an index (*{_INDEX}), or one weights file",
                got=join_names(sorted(file.name for file in path.iterdir())),
                fix="check the path; a folder without its index was never finished",
            )
        return read_file(single), {}
    weight_map, metadata = _read_index(index)
    tensors: dict[str, Any] = {}
    for file in sorted(set(weight_map.values())):
        tensors |= read_file(index.parent / file)
    absent = sorted(weight_map.keys() - tensors.keys())
    if absent:
        raise _damaged(index, f"its files lack {join_names(absent)}")
    return {name: tensors[name] for name in weight_map}, metadata


def _preferred(files: list[Path]) -> list[Path]:
    """Of what transformers and its trainer leave in a folder the weights, safetensors before pickles; else all."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        own = [file for file in files if file.name.removesuffix(_INDEX) == name]
        safe = [file for file in files if file.name.removesuffix(_INDEX).endswith(".safetensors")]
        if own and not set(safe) - set(own):
            return own
    return files


def _only(folder: Path, found: list[Path], what: str) -> Path | None:
    if len(found) > 1:
        raise CheckpointError(
            f"{folder} holds more than one {what}",
            expected=f"one {what}",
            got=join_names(file.name for file in found),
            fix="name the one to read",
        )
    return found[0] if found else None


def _read_index(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    try:
        found = json.loads(path.read_text())
        weight_map, metadata = found["weight_map"], found.get("metadata") or {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    files = weight_map.values() if isinstance(weight_map, dict) else [None]
    if not all(isinstance(file, str) and file == Path(file).name != ".." for file in files):
        raise _damaged(path, "names that are no files beside it")
    return weight_map, metadata


def _damaged(index: Path, got: str) -> CheckpointError:
    return CheckpointError(
        f"{index} cannot be used",
        expected='JSON with a "weight_map" from names to files beside it',
        got=got,
        fix="copy the folder again from its source",
    )
