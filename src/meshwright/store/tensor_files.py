"""Write and read files of one state dict.

A file appears under its name only when it is complete; files may be written in the background, one after the other.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from meshwright.errors import CheckpointError, join_names
from meshwright.runtime import before_leaving, rank, same_on_every_rank

_SAFETENSORS = ".safetensors"


def make_folder(folder: Path) -> None:
    """Make a folder and its parents.

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
    """Write a state dict of host tensors; the file appears under its name when it is complete.

    Raises:
        CheckpointError: When the file cannot be written, or holds what safetensors cannot.
    """
    put_in_place(write_beside(path, state_dict), path)


def write_text(path: Path, text: str) -> None:
    """Write text; the file appears under its name when it is complete.

    Raises:
        CheckpointError: When the file cannot be written.
    """
    put_in_place(write_beside(path, text), path)


def write_beside(path: Path, content: dict[str, Any] | str) -> Path:
    """Write a state dict of host tensors, or text, under another name: :func:`put_in_place` moves it to ``path``.

    Raises:
        CheckpointError: As :func:`write_file` does; nothing is left then.
    """
    target = path.resolve()  # a link stays, and what it leads to is written
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.unfinished")
    try:
        with _writing(path):
            if isinstance(content, str):
                unfinished.write_text(content, encoding="utf-8")
            elif path.suffix == _SAFETENSORS:
                save_file(_separate(path, content), unfinished, metadata={"format": "pt"})
            else:
                torch.save(content, unfinished)
            with open(unfinished, "rb") as written:
                os.fsync(written.fileno())
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    return unfinished


def put_in_place(unfinished: Path, path: Path) -> None:
    """Give a file of :func:`write_beside` its name.

    Raises:
        CheckpointError: When that fails; the file is then deleted.
    """
    try:
        with _writing(path):
            os.replace(unfinished, path.resolve())
    finally:
        unfinished.unlink(missing_ok=True)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{path} was not written",
            expected="a writable folder with room for the file",
            got=str(error),
            fix="choose another place, or make room; a file of that name is as it was",
        ) from error


def _separate(path: Path, state_dict: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Clone tied tensors: safetensors knows no sharing, and every name must be in the file."""
    check_tensors(path, state_dict)
    seen: set[int] = set()
    separate = {}
    for name, tensor in state_dict.items():
        separate[name] = tensor.clone() if id(tensor) in seen else tensor.contiguous()
        seen.add(id(tensor))
    return separate


def check_tensors(path: Path, state_dict: dict[str, Any]) -> None:
    """Refuse a state dict for safetensors that holds more than tensors.

    Raises:
        CheckpointError: Naming the other entries.
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
    """Read a state dict; its tensors are mapped from the file, not loaded.

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
    except Exception as error:  # torch's reader raises errors of every kind on a file that it did not write
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


# --- Saves in the background
#
# One thread writes one file after the other. The interpreter waits for the thread at exit, so no file is lost.

_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="meshwright-save")
_pending: list[Future[None]] = []


def write_later(path: Path, state_dict: dict[str, Any]) -> None:
    """Write a state dict, which nobody may change meanwhile, in the background."""
    run_later(write_file, path.absolute(), state_dict)  # the working directory may have changed by then


def run_later(function: Callable[..., None], *arguments: Any) -> None:
    """Run a function in the background, after those of earlier calls."""
    _pending.append(_thread.submit(function, *arguments))


def wait_for_saves() -> None:
    """Wait until all background saves of this process are on disk.

    Raises:
        CheckpointError: When one of them failed; each failure is raised once.
    """
    while _pending:
        _pending.pop(0).result()


def failed_before(stacklevel: int = 3) -> bool:
    """Wait for all background saves, and return whether one failed; rank 0 warns of the first. Collective.

    A new save asks this first: an earlier failure must not keep the present state from being written, at once.
    """
    found: CheckpointError | None = None
    while True:
        try:
            with same_on_every_rank():
                wait_for_saves()
        except CheckpointError as error:
            found = found or error
        else:
            break
    if found is not None and rank() == 0:
        text = f"a save in the background failed, and this one is written at once: {found}"
        warnings.warn(text, stacklevel=stacklevel)
    return found is not None


@atexit.register
def _report_failures() -> None:
    for failure in (future.exception() for future in _pending):
        if failure is not None:
            print(f"meshwright: a background save failed: {failure}", file=sys.stderr, flush=True)


@before_leaving
def _finish() -> None:
    with same_on_every_rank():
        wait_for_saves()
