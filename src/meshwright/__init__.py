"""Meshwright: plain PyTorch in; the best distributed plan out: predicted, explained, applied, trained."""

from meshwright.accelerated import Accelerated, StepResult
from meshwright.atorch import auto_accelerate
from meshwright.auto import accelerate, clip_grad_norm
from meshwright.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    LaunchError,
    MeshwrightError,
    ModelError,
    StrategyError,
)
from meshwright.planner import Plan, plan_table
from meshwright.runtime import init_distributed, print_rank, rank, sum_loss, synchronize, world_size
from meshwright.strategy import Strategy
from meshwright.version import __version__

__all__ = [
    "Accelerated",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "LaunchError",
    "MeshwrightError",
    "ModelError",
    "Plan",
    "StepResult",
    "Strategy",
    "StrategyError",
    "__version__",
    "accelerate",
    "auto_accelerate",
    "clip_grad_norm",
    "init_distributed",
    "plan_table",
    "print_rank",
    "rank",
    "sum_loss",
    "synchronize",
    "world_size",
]
