"""Write and read tensor files: one state dict per file, shards through torch's DCP, and writes in the background."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from meshwright.errors import CheckpointError, join_names
from meshwright.optim.dtensors import local_tensor
from meshwright.runtime import before_leaving, rank, same_on_every_rank
from meshwright.runtime.processes import agreement_group
from meshwright.runtime.torch_internals.checkpoint import (
    CUSTOM_METADATA_KEY,
    DCP_VERSION_KEY,
    FORMAT_KEY,
    FORMAT_VALUE,
    HF_DCP_VERSION,
    SAVED_OFFSETS_KEY,
)

_SAFETENSORS = ".safetensors"


def make_folder(folder: Path) -> None:
    """Make a folder and those above it.

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
    """Write a state dict of host tensors; under its name only when it is complete.

    Raises:
        CheckpointError: When the file cannot be written, or holds what safetensors cannot.
    """
    if path.suffix == _SAFETENSORS:
        _write(path, lambda to: save_file(_separate(path, state_dict), to, metadata={"format": "pt"}))
    else:
        _write(path, lambda to: torch.save(state_dict, to))


def write_text(path: Path, text: str) -> None:
    """Write text; under its name only when it is complete.

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
    """Refuse to put into safetensors what is not a tensor.

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
    """Read a state dict; tensors are mapped from the file, not loaded.

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


# --- Files written in the background, one at a time; none is lost at the end of the program.

_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="meshwright-save")  # the interpreter waits for it
_pending: list[Future[None]] = []


def write_later(path: Path, state_dict: dict[str, Any]) -> None:
    """Start writing a state dict nobody else changes."""
    run_later(write_file, path.absolute(), state_dict)  # the program may be elsewhere by then


def run_later(function: Callable[..., None], *arguments: Any) -> None:
    """Start a write; write are done one after the other, in the order of the calls."""
    _pending.append(_thread.submit(function, *arguments))


def wait_for_saves() -> None:
    """Wait until all background saves of this process are on disk.

    Raises:
        CheckpointError: When one of them failed; each failure is raised once.
    """
    while _pending:
        _pending.pop(0).result()


def failed_before(stacklevel: int = 3) -> bool:
    """Wait for all background saves, and warn on rank 0 of the first that failed; whether one did. Collective.

    For who saves anew: what failed before must not keep the state of now from being written, at once.
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
def _tell_failure() -> None:
    for failure in (future.exception() for future in _pending):
        if failure is not None:
            print(f"meshwright: a background save failed: {failure}", file=sys.stderr, flush=True)


@before_leaving
def _finish() -> None:
    with same_on_every_rank():
        wait_for_saves()


# --- Named tensors to and from safetensors shards through torch's distributed checkpoint; no pickle in any file.
#
# Each rank writes the shards it holds, replicas are written once, and each rank reads the parts that its layout needs.


def file_prefix(rank: int) -> str:
    """Return how the names of the files begin that ``rank`` writes."""
    return f"shard-{rank + 1:05d}-"


def save_shards(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write tensors into a folder, one file per rank that has something to write; collective.

    Args:
        tensors: The same names on every rank; plain tensors equal on all ranks, or DTensors.
        folder: An empty folder that all ranks share.

    Raises:
        CheckpointError: On every rank, when any of them cannot write.
    """
    # Imported here: torch's distributed checkpoint brings its launcher along, which every start of a rank would pay.
    from torch.distributed.checkpoint.state_dict_saver import save

    with _agreed_errors(
        f"Writing tensors into {folder} failed", "make room on the disk, and check who may write there"
    ):
        save(writable(tensors), storage_writer=ShardWriter(folder), process_group=agreement_group())


def load_shards(targets: dict[str, torch.Tensor], folder: Path) -> None:
    """Fill tensors in place from a folder that :func:`save_shards` wrote in any layout; collective.

    Raises:
        CheckpointError: On every rank, when any of them cannot read. The targets may then be partly filled.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    fix = "the model is partly loaded: build it anew before going on; then check the disk"
    with _agreed_errors(f"Reading tensors from {folder} failed", fix):
        load(
            {name: tensor.detach() for name, tensor in targets.items()},
            storage_reader=HuggingFaceStorageReader(str(folder)),
        )


@contextlib.contextmanager
def _agreed_errors(what: str, fix: str) -> Iterator[None]:
    """Convert DCP's exception, which all ranks get but no ``except Exception`` catches (it is a BaseException)."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            # A world of one needs no process group.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise CheckpointError(what, got=f"{type(cause).__name__}: {cause} (rank {rank})", fix=fix) from error


def writable(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what safetensors takes: contiguous tensors of which no two share memory."""
    seen: set[int] = set()
    writable: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous()
        address = local_tensor(tensor).untyped_storage().data_ptr()
        # Two parameters over one memory are stored twice, and both names load.
        writable[name] = tensor.clone() if address in seen else tensor
        seen.add(address)
    return writable


# --- Writes a rank's shards without holding up the thread that trains, and without a second copy of them.


class ShardWriter(HuggingFaceStorageWriter):
    """torch's writer of sharded safetensors, with another way to the disk.

    torch's own joins all tensors into one ``bytes`` first: that takes their memory once more, and holds the
    interpreter's lock for as long, a second per GB, in which no other thread of the process runs.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), save_distributed=True)
        self._folder = folder

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Write what the plan gives this rank into one file, and wait until the disk has it."""
        done: TorchFuture[list[WriteResult]] = TorchFuture()
        done.set_result(self._write(plan, planner) if plan.items else [])
        return done

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        tensors = {item.index.fqn: cast(torch.Tensor, planner.resolve_data(item)).cpu() for item in plan.items}
        path = self._folder / f"{file_prefix(plan.storage_data['shard_index'] - 1)}model-00001-of-00001.safetensors"
        save_file(tensors, path, _metadata(plan.items))
        with path.open("rb") as written:
            os.fsync(written.fileno())
        sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
        return [WriteResult(item.index, sizes[item.index.fqn], path.name) for item in plan.items]


def _metadata(items: Sequence[WriteItem]) -> dict[str, str]:
    """Return where each shard lies in its whole tensor, as torch's reader looks for it."""
    offsets = {item.index.fqn: {SAVED_OFFSETS_KEY: item.tensor_data.chunk.offsets} for item in items}  # type: ignore[union-attr]
    return {
        CUSTOM_METADATA_KEY: json.dumps(offsets),
        DCP_VERSION_KEY: str(HF_DCP_VERSION),
        FORMAT_KEY: FORMAT_VALUE,
    }
