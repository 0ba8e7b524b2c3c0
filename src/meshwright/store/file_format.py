"""Reading and writing a state dict in one file: safetensors, or what ``torch.save`` writes."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from meshwright.errors import CheckpointError, join_names

_SAFETENSORS = ".safetensors"


def make_folder(folder: Path) -> None:
    """Makes a folder and those above it.

    Raises:
        CheckpointError: When that fails.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"The folder {folder} cannot be made", got=str(error), expected="a folder", fix="choose another path"
        ) from error


def write_file(path: Path, state_dict: dict[str, Any]) -> None:
    """Writes a state dict of host tensors; under its name only when it is complete.

    Raises:
        CheckpointError: When the file cannot be written, or holds what safetensors cannot.
    """
    if path.suffix == _SAFETENSORS:
        _write(path, lambda to: save_file(_separate(path, state_dict), to, metadata={"format": "pt"}))
    else:
        _write(path, lambda to: torch.save(state_dict, to))


def write_text(path: Path, text: str) -> None:
    """Writes text; under its name only when it is complete.

    Raises:
        CheckpointError: When the file cannot be written.
    """
    _write(path, lambda to: to.write_text(text, encoding="utf-8"))


def _write(path: Path, write: Callable[[Path], object]) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        write(unfinished)
        with open(unfinished, "rb") as written:
            os.fsync(written.fileno())
        os.replace(unfinished, path)
    except (OSError, RuntimeError, SafetensorError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{path} was not written",
            expected="a writable folder with room for the file",
            got=str(error),
            fix="choose another place, or make room; a file of that name is as it was",
        ) from error
    finally:
        unfinished.unlink(missing_ok=True)


def _separate(path: Path, state_dict: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Tied tensors as tensors of their own: safetensors knows no sharing, and every name must be in the file."""
    check_tensors(path, state_dict)
    seen: set[int] = set()
    separate = {}
    for name, tensor in state_dict.items():
        separate[name] = tensor.clone() if id(tensor) in seen else tensor.contiguous()
        seen.add(id(tensor))
    return separate


def check_tensors(path: Path, state_dict: dict[str, Any]) -> None:
    """Refuses to put into safetensors what is not a tensor.

    Raises:
        CheckpointError: Naming it.
    """
    other = [name for name, value in state_dict.items() if not isinstance(value, torch.Tensor)]
    if other:
        raise CheckpointError(
            f"{path} cannot hold what is not a tensor",
            expected="tensors only in a .safetensors file",
            got=join_names(other),
            fix="save to a file with another suffix, such as .pt",
        )


def read_file(path: Path) -> dict[str, Any]:
    """Reads a state dict; tensors are mapped from the file, not loaded.

    Raises:
        CheckpointError: When the file is absent, damaged, or no state dict.
    """
    try:
        found = load_file(path) if path.suffix == _SAFETENSORS else _torch_load(path)
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL (\S+)", str(error))
        raise CheckpointError(
            f"{path} holds more than tensors and plain values; reading that could run code",
            expected="a state dict",
            got=wanted.group(1) if wanted else "a damaged or foreign pickle",
            fix="convert the file with a program you trust: torch.save(model.state_dict(), …)",
        ) from error
    except Exception as error:  # torch's reader fails in every way there is on what is no file of its own
        raise CheckpointError(
            f"{path} cannot be read",
            expected="a state dict written by torch.save, or a .safetensors file",
            got=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no more details'}",
            fix="check the path; a damaged file must be written again",
        ) from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise CheckpointError(
            f"{path} holds no state dict", expected="a dictionary of tensors by name", got=type(found).__name__,
            fix="save model.state_dict(), or use meshwright.save",
        )  # fmt: skip
    return found


def _torch_load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        return torch.load(path, map_location="cpu", weights_only=True)  # the format before torch 1.6
