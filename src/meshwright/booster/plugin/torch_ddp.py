"""``TorchDDPPlugin``: parameters replicated, gradients averaged by DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from meshwright.booster.plugin.base import Plugin, inert
from meshwright.booster.plugin.options import compressed, in_fp8
from meshwright.runtime import world_size
from meshwright.strategy import Strategy


def ddp_options(
    broadcast_buffers: bool, bucket_cap_mb: float, find_unused_parameters: bool, static_graph: bool
) -> dict[str, Any]:
    """Keyword arguments of DistributedDataParallel, of which a newer torch warns when its default is passed."""
    options = {
        "bucket_cap_mb": bucket_cap_mb,
        "find_unused_parameters": find_unused_parameters,
        "static_graph": static_graph,
    }
    return options if broadcast_buffers else {**options, "broadcast_buffers": False}


@dataclass(frozen=True, eq=False, repr=False)
class TorchDDPPlugin(Plugin):
    """Data parallelism over all ranks; arguments are those of DistributedDataParallel. Seed: ColossalAI.

    BatchNorm becomes SyncBatchNorm on CUDA, as in ColossalAI. ``Booster(mixed_precision=)`` chooses the precision.
    """

    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = inert(False, "torch ignores it")
    gradient_as_bucket_view: bool = inert(False, "gradients are always views of the buckets, which saves a copy")
    static_graph: bool = False
    fp8_communication: bool = compressed()

    def strategy(self, world: int) -> Strategy:
        """Data parallelism over all ranks."""
        fp8 = in_fp8(False, self.fp8_communication, gathers=False)
        return self.with_methods([("parallel_mode", {"data": world}), *fp8])

    @property
    def controls_precision(self) -> bool:
        """The precision is the Booster's."""
        return False

    @property
    def ddp_options(self) -> Mapping[str, Any]:
        """As given."""
        return ddp_options(self.broadcast_buffers, self.bucket_cap_mb, self.find_unused_parameters, self.static_graph)

    def prepare_model(self, model: nn.Module, device: torch.device) -> list[str]:
        """Converts BatchNorm, whose statistics would be those of each rank's own samples."""
        has_batch_norm = any(
            isinstance(part, _BatchNorm) and not isinstance(part, nn.SyncBatchNorm) for part in model.modules()
        )
        if not has_batch_norm or world_size() == 1:
            return []
        if device.type == "cuda" and not isinstance(model, _BatchNorm):
            nn.SyncBatchNorm.convert_sync_batchnorm(model)  # in place, with the same parameters
            return []
        return ["TorchDDPPlugin: BatchNorm keeps each rank's own statistics; SyncBatchNorm needs CUDA"]
