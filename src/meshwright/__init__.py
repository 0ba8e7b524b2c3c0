"""Meshwright: plain PyTorch in; the best distributed plan out: predicted, explained, applied, trained."""

from typing import TYPE_CHECKING

from meshwright.collector import paused_collection
from meshwright.on_demand import on_demand

with paused_collection(to_stay=True):
    from meshwright import methods as _methods  # noqa: F401 - it tells strategies which methods there are

if TYPE_CHECKING:
    from meshwright import benchmark, booster, distributed, inspect, loss, lr_scheduler, nn, optim, store, utils
    from meshwright.accelerated import Accelerated, StepResult
    from meshwright.atorch import auto_accelerate
    from meshwright.auto import accelerate, clip_grad_norm
    from meshwright.booster.launch import launch, launch_from_torch
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
    from meshwright.planning import plan
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
else:
    on_demand(
        __name__,
        """
        accelerated: Accelerated StepResult
        auto: accelerate clip_grad_norm
        distributed: gather_result
        errors: CheckpointError ConfigError DataError InspectError LaunchError LossSpikeError MeshwrightError
        errors: ModelError NonFiniteError ReplicaError StrategyError UnsoundStepError
        methods: register_replace_pair
        nn: Block BMTrainModelWrapper CheckpointBlock DistributedModule DistributedParameter
        nn: ParameterInitializer PipelineTransformerBlockList TransformerBlockList grouped_parameters
        nn: init_parameters no_sync
        planner: Plan plan_table
        runtime: config init_distributed print_rank rank shutdown_distributed sum_loss synchronize world_size
        store: load save wait_for_saves
        strategy: Strategy
        utils: print_block print_dict see_memory
        version: __version__
        atorch: auto_accelerate
        booster.launch: launch launch_from_torch
        planning: plan
        """,
    )

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
