"""What a checkpoint holds, and what loading one tells."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


@dataclass
class TrainingState:
    """The live objects of one training run: ``save`` reads them, ``load`` fills them in place."""

    model: nn.Module
    """Plain, DDP or FSDP2; every rank holds the whole model or its shards of it."""
    optim: Optimizer | None = None
    """Any torch optimizer, or a GuardedOptimizer, whose master weights and loss scale are then stored too."""
    lr_scheduler: LRScheduler | None = None
    step: int = 0
    """Optimizer steps done."""
    samples_seen: int = 0
    """Position in the data, counted over all ranks."""
    strategy: str = ""
    """JSON text of the strategy; recorded for information, never applied."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Anything else that is plain: numbers, strings, lists, tuples and dictionaries of them; rank 0's is stored."""
    frozen: bool = True
    """Whether parameters that are not trained are stored too. Without them (adapters around a large model) a
    checkpoint loads only into a model that has them already; those of one that holds them are then left alone."""


@dataclass(frozen=True)
class CheckpointInfo:
    """Where a loaded checkpoint came from, and what it says of the run that wrote it."""

    path: Path
    step: int
    samples_seen: int
    strategy: str
    extra: dict[str, Any]
    world_size: int
    """Ranks of the run that wrote it."""
    rng_restored: bool
    """Whether this rank's random generators go on where they stopped; False when the ranks or devices are others."""
    damaged: tuple[str, ...] = ()
    """What is wrong with newer checkpoints, which were passed over; empty when the checkpoint was named."""
