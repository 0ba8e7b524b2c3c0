"""Models for many ranks: wrappers that shard, and what methods need to know of modules.

A model is written with :class:`DistributedModule`, :class:`DistributedParameter` and :class:`Block` (BMTrain's way), or
wrapped whole with :func:`BMTrainModelWrapper`. Of layers made for tensor parallelism (``init_distributed(tp_size=)``)
every rank of a tensor group computes a part.
"""

from typing import TYPE_CHECKING

from meshwright.on_demand import on_demand

if TYPE_CHECKING:
    from meshwright.nn.averaging import average_gradients
    from meshwright.nn.block import Block, CheckpointBlock, no_sync
    from meshwright.nn.block_list import TransformerBlockList
    from meshwright.nn.blocks import find_blocks, require_blocks
    from meshwright.nn.caches import is_cache, without_caches
    from meshwright.nn.classes import class_name, class_names, modules_of, outermost
    from meshwright.nn.compiled import compile_forward, is_compiled, outside_compiled
    from meshwright.nn.exchanges import Exchanges
    from meshwright.nn.forward import class_with, without_fast_path, wrap_method, wrap_methods
    from meshwright.nn.fresh_weights import gathered_root, reshard, reshard_at_updates, reshard_units
    from meshwright.nn.fsdp_exchange import Comm, exchange_on_host, is_mean
    from meshwright.nn.fsdp_failure import abandon_units, recover_in_forward
    from meshwright.nn.fsdp_groups import parameter_groups
    from meshwright.nn.half_attention import carried
    from meshwright.nn.half_wide import widen, widened
    from meshwright.nn.initialization import grouped_parameters, init_parameters
    from meshwright.nn.kept import KeptAttributes
    from meshwright.nn.lazy import check_initialized
    from meshwright.nn.lent import call_with, run_with
    from meshwright.nn.linear import ColumnParallelLinear, Linear, RowParallelLinear
    from meshwright.nn.model_wrapper import BMTrainModelWrapper
    from meshwright.nn.module import DistributedModule
    from meshwright.nn.parallel_linear import OpParallelLinear, ReduceType
    from meshwright.nn.parameter import DistributedParameter, ParameterInitializer
    from meshwright.nn.part import Part, keep_part_of_whole, part_of_whole
    from meshwright.nn.pipeline_list import PipelineTransformerBlockList
    from meshwright.nn.rank_order import RankOrder, keep_rank_order, rank_orders
    from meshwright.nn.renorm import check_no_renorm
    from meshwright.nn.same_buffers import SameBuffers, recompute_contexts
    from meshwright.nn.stages import stages_of, whole_model
    from meshwright.nn.vocabulary import VPEmbedding
else:
    on_demand(
        __name__,
        """
        averaging: average_gradients
        block: Block CheckpointBlock no_sync
        block_list: TransformerBlockList
        blocks: find_blocks require_blocks
        caches: is_cache without_caches
        classes: class_name class_names modules_of outermost
        compiled: compile_forward is_compiled outside_compiled
        exchanges: Exchanges
        forward: class_with without_fast_path wrap_method wrap_methods
        fresh_weights: gathered_root reshard reshard_at_updates reshard_units
        fsdp_exchange: Comm is_mean exchange_on_host
        fsdp_failure: abandon_units recover_in_forward
        fsdp_groups: parameter_groups
        half_attention: carried
        half_wide: widen widened
        initialization: grouped_parameters init_parameters
        kept: KeptAttributes
        lazy: check_initialized
        lent: call_with run_with
        linear: ColumnParallelLinear Linear RowParallelLinear
        model_wrapper: BMTrainModelWrapper
        module: DistributedModule
        parallel_linear: OpParallelLinear ReduceType
        parameter: DistributedParameter ParameterInitializer
        part: Part keep_part_of_whole part_of_whole
        pipeline_list: PipelineTransformerBlockList
        rank_order: RankOrder keep_rank_order rank_orders
        renorm: check_no_renorm
        same_buffers: SameBuffers recompute_contexts
        stages: stages_of whole_model
        vocabulary: VPEmbedding
        """,
    )

__all__ = [
    "BMTrainModelWrapper",
    "Block",
    "CheckpointBlock",
    "ColumnParallelLinear",
    "Comm",
    "DistributedModule",
    "DistributedParameter",
    "Exchanges",
    "KeptAttributes",
    "Linear",
    "OpParallelLinear",
    "ParameterInitializer",
    "Part",
    "PipelineTransformerBlockList",
    "RankOrder",
    "ReduceType",
    "RowParallelLinear",
    "SameBuffers",
    "TransformerBlockList",
    "VPEmbedding",
    "abandon_units",
    "average_gradients",
    "call_with",
    "carried",
    "check_initialized",
    "check_no_renorm",
    "class_name",
    "class_names",
    "class_with",
    "compile_forward",
    "exchange_on_host",
    "find_blocks",
    "gathered_root",
    "grouped_parameters",
    "init_parameters",
    "is_cache",
    "is_compiled",
    "is_mean",
    "keep_part_of_whole",
    "keep_rank_order",
    "modules_of",
    "no_sync",
    "outermost",
    "outside_compiled",
    "parameter_groups",
    "part_of_whole",
    "rank_orders",
    "recompute_contexts",
    "recover_in_forward",
    "require_blocks",
    "reshard",
    "reshard_at_updates",
    "reshard_units",
    "run_with",
    "stages_of",
    "whole_model",
    "widen",
    "widened",
    "without_caches",
    "without_fast_path",
    "wrap_method",
    "wrap_methods",
]
