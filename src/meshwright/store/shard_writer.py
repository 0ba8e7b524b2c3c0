"""Writes a rank's shards without holding up the thread that trains, and without a second copy of them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint._hf_utils import (
    CUSTOM_METADATA_KEY,
    DCP_VERSION_KEY,
    FORMAT_KEY,
    FORMAT_VALUE,
    HF_DCP_VERSION,
    SAVED_OFFSETS_KEY,
)
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from meshwright.store.shards import file_prefix


class ShardWriter(HuggingFaceStorageWriter):
    """torch's writer of sharded safetensors, with another way to the disk.

    torch's own joins all tensors into one ``bytes`` first: that takes their memory once more, and holds the
    interpreter's lock for as long, a second per GB, in which no other thread of the process runs.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), save_distributed=True)
        self._folder = folder

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes what the plan gives this rank into one file, and waits until the disk has it."""
        done: Future[list[WriteResult]] = Future()
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
    """Where each shard lies in its whole tensor, as torch's reader looks for it."""
    offsets = {item.index.fqn: {SAVED_OFFSETS_KEY: item.tensor_data.chunk.offsets} for item in items}  # type: ignore[union-attr]
    return {
        CUSTOM_METADATA_KEY: json.dumps(offsets),
        DCP_VERSION_KEY: str(HF_DCP_VERSION),
        FORMAT_KEY: FORMAT_VALUE,
    }
