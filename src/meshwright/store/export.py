"""Write the weights of a checkpoint alone: one safetensors file, or a folder that transformers or peft loads."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from meshwright.errors import CheckpointError, join_names
from meshwright.runtime import rank, same_on_every_rank
from meshwright.store.dcp_folder import write_dcp
from meshwright.store.folder import write_folder
from meshwright.store.manifest import storage_errors
from meshwright.store.pretrained import checkpoint_tensors
from meshwright.store.stored_tensors import StoredTensor
from meshwright.store.tensor_files import make_folder, write_file

_MAKE_ROOM = "make room, or choose another folder"
_SHARD_BYTES = 5 * 10**9  # as transformers writes them
# What lies beside the weights of a pretrained model for those who use it, but is no part of the model.
_BESIDE = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model", "*.tiktoken",
    "chat_template*", "generation_config.json", "preprocessor_config.json", "processor_config.json", "LICENSE*",
)  # fmt: skip


def is_weights_file(out: Path) -> bool:
    """Return whether a path to export to names one file; all others name folders, also those with dots."""
    return out.suffix == ".safetensors"


def export_weights(
    checkpoint: Path,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    config: str | None = None,
    pretrained: Path | None = None,
    as_dcp: bool = False,
) -> dict[str, torch.Tensor]:
    """Write the weights and buffers of a checkpoint of any layout of ranks as whole tensors; collective.

    Into a folder every rank writes its files; each holds one file's tensors at a time.

    Args:
        checkpoint: Directory of one checkpoint that is whole: see :func:`meshwright.store.manifest.newest_valid`.
        out: A file that ends in ``.safetensors``, or a folder: ``model-00001-of-….safetensors`` and their index.
        dtype: Type of the floating-point tensors; None keeps the saved one, which is fp32 where there are masters.
        config: Text of a transformers ``config.json`` to write beside them; with it the folder is one that
            ``from_pretrained`` loads.
        pretrained: A folder whose tokenizer, chat template and generation config are copied beside them.
        as_dcp: Write a folder of torch's distributed checkpoint instead, with the model's names.

    Returns:
        The tensors written, by the model's names, without values.

    Raises:
        CheckpointError: On every rank, when ``out`` exists already or cannot be written.
    """
    weights = _Weights.of(checkpoint, out, dtype)
    if is_weights_file(out) and not as_dcp:
        weights.write_file(out)
        return weights.outlines
    if as_dcp:
        with _new_folder(out):
            write_dcp(weights.outlines, weights.whole, out)
        return weights.outlines
    metadata = {"format": "pt"}
    with _new_folder(out):
        write_folder(weights.outlines, out, "model", shard_bytes=_SHARD_BYTES, metadata=metadata, gather=weights.read)
        with same_on_every_rank(), storage_errors(f"{out} cannot be written", _MAKE_ROOM):
            if rank() == 0 and pretrained is not None:
                copy_beside(pretrained, out)
            if rank() == 0 and config is not None:
                (out / "config.json").write_text(config, encoding="utf-8")
    return weights.outlines


@contextlib.contextmanager
def _new_folder(out: Path) -> Iterator[None]:
    """Make a folder, and delete it again when the block fails; collective."""
    with same_on_every_rank():
        if rank() == 0:
            make_folder(out)
    try:
        yield
    except BaseException:
        if rank() == 0:
            shutil.rmtree(out, ignore_errors=True)
        raise


def copy_beside(pretrained: Path, folder: Path) -> list[str]:
    """Copy a pretrained model's tokenizer, chat template and generation config, on one process.

    Returns:
        The names of the files.
    """
    files = {file for pattern in _BESIDE for file in pretrained.glob(pattern) if file.is_file()}
    for file in sorted(files):
        shutil.copyfile(file, folder / file.name)
    return sorted(file.name for file in files)


def export_adapters(
    checkpoint: Path, out: Path, *, names: Mapping[str, str], config: str, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Write the adapters of a checkpoint as a folder that peft's ``PeftModel.from_pretrained`` loads; collective.

    Args:
        checkpoint: As for :func:`export_weights`.
        out: A new folder.
        names: Names of the adapters in peft's file, and for each the name in the model that was trained.
        config: Text of peft's ``adapter_config.json``.
        dtype: As for :func:`export_weights`.

    Returns:
        The tensors written, by peft's names, without values.

    Raises:
        CheckpointError: On every rank, when the checkpoint has other tensors, ``out`` exists or cannot be written.
    """
    weights = _Weights.of(checkpoint, out, dtype, names)
    with _new_folder(out):
        weights.write_file(out / "adapter_model.safetensors")
        with same_on_every_rank(), storage_errors(f"{out} cannot be written", _MAKE_ROOM):
            if rank() == 0:
                (out / "adapter_config.json").write_text(config, encoding="utf-8")
    return weights.outlines


@dataclass
class _Weights:
    """Tensors of a checkpoint, to be read one by one."""

    stored: dict[str, StoredTensor]
    outlines: dict[str, torch.Tensor]
    """Their shapes and types in the new files."""

    @classmethod
    def of(
        cls, checkpoint: Path, out: Path, dtype: torch.dtype | None, names: Mapping[str, str] | None = None
    ) -> _Weights:
        """Open a checkpoint; collective.

        Args:
            checkpoint: A directory.
            out: What must not exist yet.
            dtype: Type of floating-point tensors; None: as saved.
            names: New names, and for each the one in the model; None: all of the model's.
        """
        with same_on_every_rank():
            if out.exists():
                raise CheckpointError(
                    f"{out} exists already", expected="a new file or folder", got="nothing was overwritten",
                    fix="name another",
                )  # fmt: skip
            tensors, _ = checkpoint_tensors(checkpoint)
            names = {name: name for name in tensors} if names is None else names
            _check_held(checkpoint, names.values(), tensors)
        stored = {new: tensors[name] for new, name in names.items()}
        dtypes = {n: dtype if dtype and each.dtype.is_floating_point else each.dtype for n, each in stored.items()}
        empty = {name: torch.empty(each.shape, dtype=dtypes[name], device="meta") for name, each in stored.items()}
        return cls(stored, empty)

    def read(self, name: str, to: int = 0) -> torch.Tensor | None:
        """Read a whole tensor on one rank."""
        return self.whole(name) if rank() == to else None

    def whole(self, name: str) -> torch.Tensor:
        """Read a whole tensor."""
        whole = tuple(slice(0, size) for size in self.stored[name].shape)
        return self.stored[name].read(whole, self.outlines[name].dtype)

    def write_file(self, path: Path) -> None:
        """Write one file; collective."""
        with same_on_every_rank(), storage_errors(f"{path} cannot be written", _MAKE_ROOM):
            if rank() == 0:
                make_folder(path.parent)
                write_file(path, {name: self.read(name) for name in self.stored})


def _check_held(checkpoint: Path, names: Iterable[str], tensors: Mapping[str, StoredTensor]) -> None:
    wanted = list(names)
    absent = [name for name in wanted if name not in tensors]
    if absent:
        raise CheckpointError(
            f"{checkpoint} does not hold the adapters of its run",
            expected=f"{len(wanted)} tensors",
            got=f"none of the name {join_names(absent, 3)}",
            fix="name a checkpoint of the run that the directory describes",
        )
