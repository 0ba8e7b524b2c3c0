"""Meshwright: plain PyTorch in; the best distributed plan out: predicted, explained, applied, trained."""

from meshwright import benchmark, booster, distributed, inspect, loss, lr_scheduler, nn, optim, store, utils
from meshwright.accelerated import Accelerated, StepResult
from meshwright.atorch import auto_accelerate
from meshwright.auto import accelerate, clip_grad_norm
from meshwright.booster import launch, launch_from_torch
from meshwright.distributed import gather_result
from meshwright.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    InspectError,
    LaunchError,
    MeshwrightError,
    ModelError,
    NonFiniteError,
    StrategyError,
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
from meshwright.planning import plan
from meshwright.runtime import (
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
    "MeshwrightError",
    "ModelError",
    "NonFiniteError",
    "ParameterInitializer",
    "PipelineTransformerBlockList",
    "Plan",
    "StepResult",
    "Strategy",
    "StrategyError",
    "TransformerBlockList",
    "__version__",
    "accelerate",
    "auto_accelerate",
    "benchmark",
    "booster",
    "clip_grad_norm",
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
