"""Write and read tensor files.

A file of one state dict appears under its name only when it is complete; files may be written in the background, one
after the other. A folder of shards goes through torch's distributed checkpoint (DCP), in safetensors, without pickle.
"""

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
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.futures import Future as TorchFuture

from meshwright.errors import CheckpointError, join_names
from meshwright.optim.dtensors import local_tensor
from meshwright.runtime import before_leaving, rank, same_on_every_rank
from meshwright.runtime.processes import agreement_group

# torch's distributed checkpoint brings its launcher along, which every start of a rank would pay: the functions below
# that need it import it.
if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
    from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

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
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
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
            os.replace(unfinished, path)
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


# --- Shards, through torch's distributed checkpoint
#
# Each rank writes the shards it holds, replicas are written once, and each rank reads the parts that its layout needs.


def file_prefix(rank: int) -> str:
    """Return the first part of the names of the files that ``rank`` writes."""
    return f"shard-{rank + 1:05d}-"


def save_shards(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write tensors into a folder, one file per rank that has something to write; collective.

    Args:
        tensors: The same names on every rank; plain tensors equal on all ranks, or DTensors.
        folder: An empty folder that all ranks share.

    Raises:
        CheckpointError: On every rank, when any of them cannot write.
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    with _agreed_errors(
        f"Writing tensors into {folder} failed", "make room on the disk, and check who may write there"
    ):
        save(writable(tensors), storage_writer=_shard_writer(folder), process_group=agreement_group())


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
    """Convert DCP's exception: all ranks get it, but it is a BaseException, which no ``except Exception`` catches."""
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
    """Return the tensors as safetensors takes them: contiguous, and no two of them sharing memory.

    Raises:
        CheckpointError: For a sparse tensor.
    """
    seen: set[int] = set()
    writable: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided:
            raise CheckpointError(
                f"{name} cannot be saved: files hold dense tensors only",
                expected="dense tensors in the model and its optimizer",
                got=f"{tensor.layout} of shape {tuple(tensor.shape)}",
                fix="register a buffer that can be built anew with persistent=False, or keep it as dense tensors of "
                "indices and values",
            )
        tensor = tensor.detach().contiguous()
        address = local_tensor(tensor).untyped_storage().data_ptr()
        # Two parameters over one memory are stored twice, and both names load.
        writable[name] = tensor.clone() if address in seen else tensor
        seen.add(address)
    return writable


def _shard_writer(folder: Path) -> StorageWriter:
    """Return torch's writer of sharded safetensors, with another way to the disk.

    torch's own joins all tensors into one ``bytes`` first. That takes their memory once more, and holds the
    interpreter's lock for a second per GB, in which no other thread of the process runs: not the one that trains.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    class ShardWriter(HuggingFaceStorageWriter):
        def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
            done: TorchFuture[list[WriteResult]] = TorchFuture()
            done.set_result(_write_shards(folder, plan, planner) if plan.items else [])
            return done

    return ShardWriter(str(folder), save_distributed=True)


def _write_shards(folder: Path, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
    """Write what the plan gives this rank into one file, and wait until the disk has it."""
    from torch.distributed.checkpoint.storage import WriteResult

    tensors = {item.index.fqn: cast(torch.Tensor, planner.resolve_data(item)).cpu() for item in plan.items}
    path = folder / f"{file_prefix(plan.storage_data['shard_index'] - 1)}model-00001-of-00001.safetensors"
    save_file(tensors, path, _metadata(plan.items))
    with path.open("rb") as written:
        os.fsync(written.fileno())
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    return [WriteResult(item.index, sizes[item.index.fqn], path.name) for item in plan.items]


def _metadata(items: Sequence[WriteItem]) -> dict[str, str]:
    """Return where each shard lies in its whole tensor, in the form that torch's reader looks for."""
    from meshwright.runtime.torch_internals import checkpoint as keys

    offsets = {item.index.fqn: {keys.SAVED_OFFSETS_KEY: item.tensor_data.chunk.offsets} for item in items}  # type: ignore[union-attr]
    return {
        keys.CUSTOM_METADATA_KEY: json.dumps(offsets),
        keys.DCP_VERSION_KEY: str(keys.HF_DCP_VERSION),
        keys.FORMAT_KEY: keys.FORMAT_VALUE,
    }
