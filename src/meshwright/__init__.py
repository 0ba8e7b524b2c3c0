"""Meshwright: plain PyTorch in; the best distributed plan out: predicted, explained, applied, trained."""

from typing import TYPE_CHECKING

from meshwright.compat.aliases import install
from meshwright.runtime.lazy import lazy_exports, paused_collection

install()
with paused_collection(to_stay=True):
    from meshwright import methods as _methods  # noqa: F401 - it tells strategies which methods there are

if TYPE_CHECKING:
    from meshwright import (
        comm as distributed,  # noqa: F401
        inspect as inspect,
        loss as loss,
        lr_scheduler as lr_scheduler,
        nn as nn,
        optim as optim,
        store as store,
    )
    from meshwright.compat import colossalai as booster  # noqa: F401
    from meshwright.compat.atorch import auto_accelerate as auto_accelerate
    from meshwright.compat.bmtrain import benchmark as benchmark, debug as debug, utils as utils
    from meshwright.compat.bmtrain.block import Block as Block, CheckpointBlock as CheckpointBlock, no_sync as no_sync
    from meshwright.compat.bmtrain.block_list import TransformerBlockList as TransformerBlockList
    from meshwright.compat.bmtrain.config import config as config
    from meshwright.compat.bmtrain.distributed_module import DistributedModule as DistributedModule
    from meshwright.compat.bmtrain.model_setup import (
        BMTrainModelWrapper as BMTrainModelWrapper,
        grouped_parameters as grouped_parameters,
        init_parameters as init_parameters,
    )
    from meshwright.compat.bmtrain.parameter import (
        DistributedParameter as DistributedParameter,
        ParameterInitializer as ParameterInitializer,
    )
    from meshwright.compat.bmtrain.pipeline_block_list import (
        PipelineTransformerBlockList as PipelineTransformerBlockList,
    )
    from meshwright.compat.bmtrain.utils import (
        gather_result as gather_result,
        print_block as print_block,
        print_dict as print_dict,
        see_memory as see_memory,
        wait_loader as wait_loader,
    )
    from meshwright.compat.colossalai.environment import launch as launch, launch_from_torch as launch_from_torch
    from meshwright.errors import (
        CheckpointError as CheckpointError,
        ConfigError as ConfigError,
        DataError as DataError,
        InspectError as InspectError,
        LaunchError as LaunchError,
        LossSpikeError as LossSpikeError,
        MeshwrightError as MeshwrightError,
        ModelError as ModelError,
        NonFiniteError as NonFiniteError,
        ReplicaError as ReplicaError,
        StrategyError as StrategyError,
        UnsoundStepError as UnsoundStepError,
    )
    from meshwright.methods.replace.user_pairs import register_replace_pair as register_replace_pair
    from meshwright.planner.plan_request import plan as plan
    from meshwright.planner.plans import Plan as Plan, plan_table as plan_table
    from meshwright.runtime.processes import (
        init_distributed as init_distributed,
        print_rank as print_rank,
        rank as rank,
        shutdown_distributed as shutdown_distributed,
        sum_loss as sum_loss,
        synchronize as synchronize,
        world_size as world_size,
    )
    from meshwright.store.model_file import load as load, save as save
    from meshwright.store.tensor_files import wait_for_saves as wait_for_saves
    from meshwright.strategy.value import Strategy as Strategy
    from meshwright.training.accelerate import accelerate as accelerate, clip_grad_norm as clip_grad_norm
    from meshwright.training.accelerated import Accelerated as Accelerated, StepResult as StepResult
    from meshwright.training.captured_step import CapturedStep as CapturedStep
    from meshwright.training.resilient import resilient as resilient
    from meshwright.version import __version__ as __version__
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
