"""Modules and batches: layouts, FSDP2 units, changes in place, recomputation, 8-bit layers, collectives on hosts.

BMTrain's :class:`DistributedModule`, :class:`DistributedParameter`, :class:`Block` and :func:`BMTrainModelWrapper` can
be imported from here as well; they live in :mod:`meshwright.compat.bmtrain`.
"""

from typing import TYPE_CHECKING

from meshwright.runtime.lazy import lazy_exports

if TYPE_CHECKING:
    from meshwright.nn.bf16_on_cpu import carried as carried, widen as widen, widened as widened
    from meshwright.nn.fsdp_units import (
        CollectiveLog as CollectiveLog,
        abandon_units as abandon_units,
        align_deferred_gradients as align_deferred_gradients,
        average_gradients as average_gradients,
        follow_thawing as follow_thawing,
        gathered_root as gathered_root,
        parameter_groups as parameter_groups,
        recover_in_forward as recover_in_forward,
        reshard as reshard,
        reshard_at_updates as reshard_at_updates,
        reshard_units as reshard_units,
    )
    from meshwright.nn.host_exchange import Comm as Comm, exchange_on_host as exchange_on_host, is_mean as is_mean
    from meshwright.nn.model_layout import (
        RankOrder as RankOrder,
        fp32_buffer as fp32_buffer,
        fp32_buffers as fp32_buffers,
        keep_fp32 as keep_fp32,
        keep_rank_order as keep_rank_order,
        rank_orders as rank_orders,
        stages_of as stages_of,
        whole_model as whole_model,
    )
    from meshwright.nn.module_structure import (
        Part as Part,
        caches_off as caches_off,
        check_forward as check_forward,
        check_initialized as check_initialized,
        check_model as check_model,
        check_no_renorm as check_no_renorm,
        class_name as class_name,
        class_names as class_names,
        class_with as class_with,
        compile_forward as compile_forward,
        features as features,
        find_blocks as find_blocks,
        has_forward as has_forward,
        is_cache as is_cache,
        is_compiled as is_compiled,
        is_linear as is_linear,
        is_on_meta as is_on_meta,
        is_transposed as is_transposed,
        keep_part_of_whole as keep_part_of_whole,
        modules_of as modules_of,
        move_to as move_to,
        outermost as outermost,
        outside_compiled as outside_compiled,
        part_of_whole as part_of_whole,
        require_blocks as require_blocks,
        setting_of as setting_of,
        without_caches as without_caches,
        without_fast_path as without_fast_path,
        wrap_method as wrap_method,
    )
    from meshwright.nn.recompute_buffers import SameBuffers as SameBuffers, recompute_contexts as recompute_contexts
    from meshwright.nn.swapped_parameters import (
        FakeTensors as FakeTensors,
        SavedAttributes as SavedAttributes,
        call_with as call_with,
        run_with as run_with,
    )
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
