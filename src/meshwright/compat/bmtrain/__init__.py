"""BMTrain's surface: wrappers, block lists, ``OptimManager``, schedules and utilities."""

from typing import TYPE_CHECKING

from meshwright.runtime.lazy import lazy_exports

if TYPE_CHECKING:
    from meshwright.compat.bmtrain.block import Block as Block, CheckpointBlock as CheckpointBlock, no_sync as no_sync
    from meshwright.compat.bmtrain.block_list import TransformerBlockList as TransformerBlockList
    from meshwright.compat.bmtrain.distributed_module import DistributedModule as DistributedModule
    from meshwright.compat.bmtrain.layers import (
        ColumnParallelLinear as ColumnParallelLinear,
        Linear as Linear,
        RowParallelLinear as RowParallelLinear,
        VPEmbedding as VPEmbedding,
    )
    from meshwright.compat.bmtrain.model_setup import (
        BMTrainModelWrapper as BMTrainModelWrapper,
        grouped_parameters as grouped_parameters,
        init_parameters as init_parameters,
    )
    from meshwright.compat.bmtrain.optim_manager import OptimManager as OptimManager
    from meshwright.compat.bmtrain.parameter import (
        DistributedParameter as DistributedParameter,
        ParameterInitializer as ParameterInitializer,
    )
    from meshwright.compat.bmtrain.pipeline_block_list import (
        PipelineTransformerBlockList as PipelineTransformerBlockList,
    )
    from meshwright.compat.bmtrain.utils import (
        AverageRecorder as AverageRecorder,
        print_block as print_block,
        print_dict as print_dict,
        see_memory as see_memory,
    )
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
