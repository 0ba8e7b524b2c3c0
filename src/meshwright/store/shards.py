"""Named tensors to and from safetensors shards through torch's distributed checkpoint; no pickle in any file.

Each rank writes the shards it holds, replicas are written once, and each rank reads the parts that its layout needs.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from meshwright.errors import CheckpointError
from meshwright.optim.clip import local_tensor
from meshwright.runtime.background import agreement_group


def file_prefix(rank: int) -> str:
    """How the names of the files begin that ``rank`` writes."""
    return f"shard-{rank + 1:05d}-"


def save_shards(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Writes tensors into a folder, one file per rank that has something to write; collective.

    Args:
        tensors: The same names on every rank; plain tensors equal on all ranks, or DTensors.
        folder: An empty folder that all ranks share.

    Raises:
        CheckpointError: On every rank, when any of them cannot write.
    """
    # Imported here: torch's distributed checkpoint brings its launcher along, which every start of a rank would pay.
    from torch.distributed.checkpoint.state_dict_saver import save

    from meshwright.store.shard_writer import ShardWriter

    with _agreed_errors(
        f"Writing tensors into {folder} failed", "make room on the disk, and check who may write there"
    ):
        save(writable(tensors), storage_writer=ShardWriter(folder), process_group=agreement_group())


def load_shards(targets: dict[str, torch.Tensor], folder: Path) -> None:
    """Fills tensors in place from a folder that :func:`save_shards` wrote in any layout; collective.

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
    """Converts DCP's exception, which all ranks get but no ``except Exception`` catches (it is a BaseException)."""
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
    """What safetensors takes: contiguous tensors of which no two share memory."""
    seen: set[int] = set()
    writable: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous()
        address = local_tensor(tensor).untyped_storage().data_ptr()
        # Two parameters over one memory are stored twice, and both names load.
        writable[name] = tensor.clone() if address in seen else tensor
        seen.add(address)
    return writable
