"""Meshwright: plain PyTorch in; the best distributed plan out: predicted, explained, applied, trained."""

import importlib
from typing import TYPE_CHECKING, Any

from meshwright.collector import paused_collection

with paused_collection(to_stay=True):
    from meshwright import distributed, inspect, loss, lr_scheduler, nn, optim, store, utils
    from meshwright.accelerated import Accelerated, StepResult
    from meshwright.auto import accelerate, clip_grad_norm
    from meshwright.distributed import gather_result
    from meshwright.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        InspectError,
        LaunchError,
        LossSpikeError,
        MeshwrightError,
        ModelError,
        NonFiniteError,
        ReplicaError,
        StrategyError,
        UnsoundStepError,
    )
    from meshwright.methods import register_replace_pair
    from meshwright.nn import (
        Block,
        BMTrainModelWrapper,
        CheckpointBlock,
        DistributedModule,
        DistributedParameter,
        ParameterInitializer,
        PipelineTransformerBlockList,
        TransformerBlockList,
        grouped_parameters,
        init_parameters,
        no_sync,
    )
    from meshwright.planner import Plan, plan_table
    from meshwright.runtime import (
        config,
        init_distributed,
        print_rank,
        rank,
        shutdown_distributed,
        sum_loss,
        synchronize,
        world_size,
    )
    from meshwright.store import load, save, wait_for_saves
    from meshwright.strategy import Strategy
    from meshwright.utils import print_block, print_dict, see_memory
    from meshwright.version import __version__

if TYPE_CHECKING:
    from meshwright import benchmark, booster
    from meshwright.atorch import auto_accelerate
    from meshwright.booster.launch import launch, launch_from_torch
    from meshwright.planning import plan

__all__ = [
    "Accelerated",
    "BMTrainModelWrapper",
    "Block",
    "CheckpointBlock",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DistributedModule",
    "DistributedParameter",
    "InspectError",
    "LaunchError",
    "LossSpikeError",
    "MeshwrightError",
    "ModelError",
    "NonFiniteError",
    "ParameterInitializer",
    "PipelineTransformerBlockList",
    "Plan",
    "ReplicaError",
    "StepResult",
    "Strategy",
    "StrategyError",
    "TransformerBlockList",
    "UnsoundStepError",
    "__version__",
    "accelerate",
    "auto_accelerate",
    "benchmark",
    "booster",
    "clip_grad_norm",
    "config",
    "distributed",
    "gather_result",
    "grouped_parameters",
    "init_distributed",
    "init_parameters",
    "inspect",
    "launch",
    "launch_from_torch",
    "load",
    "loss",
    "lr_scheduler",
    "nn",
    "no_sync",
    "optim",
    "plan",
    "plan_table",
    "print_block",
    "print_dict",
    "print_rank",
    "rank",
    "register_replace_pair",
    "save",
    "see_memory",
    "shutdown_distributed",
    "store",
    "sum_loss",
    "synchronize",
    "utils",
    "wait_for_saves",
    "world_size",
]

# What training with ``accelerate`` does not need is imported when it is asked for: importing costs every rank's start.
_LATER = {
    "auto_accelerate": "meshwright.atorch",
    "launch": "meshwright.booster",
    "launch_from_torch": "meshwright.booster",
    "plan": "meshwright.planning",
}
_LATER_MODULES = ("benchmark", "booster")


def __getattr__(name: str) -> Any:
    if name in _LATER_MODULES:
        return importlib.import_module(f"meshwright.{name}")
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
