"""Write and read folders of safetensors files with an index, as transformers and peft have them.

Beside weights lie the configs that ``from_pretrained`` reads; a checkpoint's weights can be exported as such a folder.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from meshwright.errors import CheckpointError, join_names
from meshwright.runtime import broadcast_object, rank, same_on_every_rank
from meshwright.runtime.agreement import gather_numbers
from meshwright.runtime.lazy import optional_library
from meshwright.runtime.processes import agreeing_over, background_group
from meshwright.store.tensor_files import (
    make_folder,
    put_in_place,
    read_file,
    run_later,
    write_beside,
)
from meshwright.store.transfer import collect

INDEX = ".index.json"
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
    gather: Callable[[str, int], torch.Tensor | None] | None = None,
    beside: Sequence[Any] = (),
) -> None:
    """Write tensors into files of at most ``shard_bytes`` each (or one tensor), and their index; collective.

    Ranks take turns: each gathers the tensors of every so many-th file and writes it, so it holds one file's tensors at
    a time (all of its files' when ``non_blocking``). Files get their names when all are written, and the index last: a
    folder without it was not finished. Files of the same stem that lay there are replaced only then.

    Args:
        tensors: The same names on every rank: plain tensors, equal on all ranks, or DTensors.
        folder: Made if it is missing.
        stem: ``stem-00001-of-00002.safetensors`` … and ``stem.safetensors.index.json``.
        shard_bytes: Largest size of a file.
        metadata: What the index holds beside the names, in JSON types.
        non_blocking: Write in the background.
        gather: Brings a tensor to the host of a rank, where ``tensors`` are on ``meta`` and give only shapes and types.
        beside: Configs and tokenizers, whose ``save_pretrained`` writes more files; rank 0's count.

    Raises:
        CheckpointError: On every rank, when the folder cannot be written; it is then as it was.
    """
    gather = gather or (lambda name, to: collect(tensors[name], to))
    shards = _cut(tensors, shard_bytes)
    files = [f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    total = sum(_bytes(tensor) for tensor in tensors.values())
    weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    text = json.dumps({"metadata": {"total_size": total, **metadata}, "weight_map": weight_map}, indent=1) + "\n"
    writers = _ranks_that_see(folder, stem)
    # The working directory may change before a file is written in the background.
    new = _NewFolder(folder.absolute(), stem, files, text)
    new.write_configs(beside)
    for number, (file, names) in enumerate(zip(files, shards, strict=True), start=1):
        turn = (number - 1) % len(writers)
        writer = writers[turn]
        gathered = {name: gather(name, writer) for name in names}
        if rank() == writer:
            new.gathered[file] = gathered
        del gathered
        if not non_blocking and (turn == len(writers) - 1 or number == len(files)):
            new.write()
    if non_blocking:
        run_later(_finish_later, new, background_group())
    else:
        new.finish()


def _ranks_that_see(folder: Path, stem: str) -> list[int]:
    """Make a folder on rank 0, and return the ranks to which it is the same one; collective.

    Hosts may have disks of their own: the ranks of the others do not write then.
    """
    trace: Path | None = None
    with same_on_every_rank():
        if rank() == 0:
            make_folder(folder)
            trace = write_beside(folder / stem, "")
    name = broadcast_object(trace and trace.name)
    seen = gather_numbers([(folder / name).exists()])
    if trace is not None:
        trace.unlink(missing_ok=True)
    return [number for number, [sees] in enumerate(seen) if sees]


class _NewFolder:
    """A folder in the making, as one rank sees it. Its methods are collective."""

    def __init__(self, folder: Path, stem: str, files: Sequence[str], index: str) -> None:
        self.gathered: dict[str, Any] = {}
        """Tensors of this rank's files that are not written yet."""
        self._folder, self._stem, self._files, self._index = folder, stem, files, index
        self._apart = folder / f".{stem}.{os.getpid()}.unfinished"
        self._unfinished: dict[Path, Path] = {}
        """Files that are written under another name yet."""

    def write_configs(self, beside: Sequence[Any]) -> None:
        """Let things save themselves, in a folder of their own."""
        with self._agreed():
            if rank() != 0 or not beside:
                return
            try:
                for each in beside:
                    each.save_pretrained(self._apart)
            except (OSError, ValueError) as error:
                raise CheckpointError(
                    f"The model's config was not written into {self._folder}",
                    expected="a writable folder, and a config and generation_config that transformers accepts",
                    got=f"{type(error).__name__}: {error}",
                    fix="correct what it names, or choose another folder",
                ) from error
            files = [path for path in self._apart.rglob("*") if path.is_file()]
            self._unfinished |= {self._folder / path.relative_to(self._apart): path for path in files}

    def write(self) -> None:
        """Write the gathered files, under other names."""
        with self._agreed():
            for file in list(self.gathered):
                self._write(file, self.gathered.pop(file))

    def finish(self) -> None:
        """Write the index, and give all files their names."""
        index = f"{self._stem}.safetensors{INDEX}"
        with self._agreed():
            if rank() == 0:
                self._write(index, self._index)
        with self._agreed():
            if rank() == 0:
                self._remove([self._folder / index])
        with self._agreed():
            for path in [path for path in self._unfinished if path.name != index]:
                make_folder(path.parent)
                put_in_place(self._unfinished.pop(path), path)
        with self._agreed():
            if rank() == 0:
                written = {self._folder / file for file in self._files}
                old = {*self._folder.glob(f"{self._stem}-?????-of-?????.safetensors")} - written
                # from_pretrained would prefer a single file.
                self._remove([*old, self._folder / f"{self._stem}.safetensors"])
                put_in_place(self._unfinished.pop(self._folder / index), self._folder / index)
                shutil.rmtree(self._apart, ignore_errors=True)

    def _write(self, file: str, content: Any) -> None:
        path = self._folder / file
        self._unfinished[path] = write_beside(path, content)

    def _remove(self, paths: Iterable[Path]) -> None:
        try:
            for path in paths:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"An earlier checkpoint in {self._folder} cannot be replaced",
                expected="a folder whose files may be deleted",
                got=str(error),
                fix="save into another folder",
            ) from error

    @contextlib.contextmanager
    def _agreed(self) -> Iterator[None]:
        """Raise an error of one rank on all, without what they have written."""
        try:
            with same_on_every_rank():
                yield
        except BaseException:
            for unfinished in self._unfinished.values():
                unfinished.unlink(missing_ok=True)
            shutil.rmtree(self._apart, ignore_errors=True)
            raise


def _finish_later(new: _NewFolder, group: ProcessGroup | None) -> None:
    with agreeing_over(group):
        new.write()
        new.finish()


def _cut(tensors: Mapping[str, torch.Tensor], limit: int) -> list[list[str]]:
    """Divide the names, in order, where the next tensor would make a file too large."""
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


def is_folder(path: Path) -> bool:
    """Return whether a path names a folder of tensors, or its index, rather than one file."""
    return path.is_dir() or path.name.endswith(INDEX)


def read_folder(path: Path, kind: str = "model") -> tuple[dict[str, Any], dict[str, Any]]:
    """Read all tensors of a folder: of :func:`write_folder`, or of transformers (.bin files as weights only).

    Args:
        path: The folder, or the index in it. Without an index the folder must hold one weights file.
        kind: ``"model"`` or ``"optimizer"``, where both lie in one folder.

    Returns:
        The tensors, mapped from the files, and the index's metadata.

    Raises:
        CheckpointError: When index or files are absent, damaged, or do not fit each other.
    """
    indices = [each for each in sorted(path.glob(f"*{INDEX}")) if (_OPTIMIZER in each.name) == (kind == "optimizer")]
    index = path if path.name.endswith(INDEX) else _only(path, _preferred(indices), "index")
    if index is None:
        files = [file for file in sorted(path.iterdir()) if file.suffix in _WEIGHTS and "optimizer" not in file.name]
        files = _preferred(files)
        single = _only(path, files, "weights file")
        if single is None:
            raise CheckpointError(
                f"{path} holds no weights",
                expected=f"an index (*{INDEX}), or one weights file",
                got=join_names(sorted(file.name for file in path.iterdir())),
                fix="check the path; a folder without its index was never finished",
            )
        return read_file(single), {}
    weight_map, metadata = read_index(index)
    tensors: dict[str, Any] = {}
    for file in sorted(set(weight_map.values())):
        tensors |= read_file(index.parent / file)
    absent = sorted(weight_map.keys() - tensors.keys())
    if absent:
        raise _damaged(index, f"its files lack {join_names(absent)}")
    return {name: tensors[name] for name in weight_map}, metadata


def _preferred(files: list[Path]) -> list[Path]:
    """Choose the weights among the files of transformers and its trainer, safetensors before pickles; else all."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        own = [file for file in files if file.name.removesuffix(INDEX) == name]
        safe = [file for file in files if file.name.removesuffix(INDEX).endswith(".safetensors")]
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


def read_index(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Read the files of tensors by name, and the metadata, of an index.

    Raises:
        CheckpointError: When it is damaged.
    """
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


# --- The configs that ``from_pretrained`` reads beside weights: config.json and generation_config.json


def configs_of(model: nn.Module) -> list[Any]:
    """Return a transformers model's configs, to be saved beside its weights; none of other models and around adapters.

    They name the model's own class, and the present dtype of its weights: ``from_pretrained`` uses both.

    Args:
        model: Without DDP and torch.compile around it.
    """
    config: Any = getattr(model, "config", None)
    generation: Any = getattr(model, "generation_config", None)
    # Names of adapted layers are peft's: with a config beside them, from_pretrained would leave those layers random.
    if not _can_save(model) or not _can_save(config) or hasattr(model, "peft_config"):
        return []
    config = copy.deepcopy(config)
    # fully_shard has derived a class of its own from the model's.
    config.architectures = [next(each for each in type(model).__mro__ if not issubclass(each, FSDPModule)).__name__]
    dtype = next((each.dtype for each in model.parameters() if each.is_floating_point()), None)
    if dtype is not None:
        setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", str(dtype).removeprefix("torch."))
    return [config, generation] if _can_save(generation) else [config]


def _can_save(thing: Any) -> bool:
    return callable(getattr(thing, "save_pretrained", None))


# --- Adapters, by the names in peft's files


def adapter_names(model: nn.Module, named: dict[str, torch.Tensor]) -> dict[str, str]:
    """Return the names of a model's adapters in peft's files, and for each the name in a state dict.

    Args:
        model: A ``PeftModel``.
        named: Its state dict, or a part of it.

    Raises:
        ConfigError: When peft is not installed.
    """
    names = {id(tensor): name for name, tensor in named.items()}
    adapters = peft_library().get_peft_model_state_dict(model, state_dict=named, save_embedding_layers=False)
    return {name: names[id(tensor)] for name, tensor in adapters.items()}


def peft_library() -> ModuleType:
    """Import peft; raise a ConfigError where it is not installed."""
    return optional_library("peft", "LoRA", "pip install peft")
