"""Ground floor: processes, mesh, seeds, device. Knows nothing of models."""

from typing import TYPE_CHECKING

from meshwright.runtime.lazy import lazy_exports

if TYPE_CHECKING:
    from meshwright.runtime.agreement import (
        Difference as Difference,
        agreed as agreed,
        all_equal as all_equal,
        any_rank as any_rank,
        bit_sum as bit_sum,
        bit_sums as bit_sums,
        broadcast_object as broadcast_object,
        check_all_equal as check_all_equal,
        check_equal as check_equal,
        code_versions as code_versions,
        difference_between_ranks as difference_between_ranks,
        first_over_store as first_over_store,
        first_text as first_text,
        flat_bytes as flat_bytes,
        gather_from as gather_from,
        gather_numbers as gather_numbers,
        gather_objects as gather_objects,
        largest as largest,
        outvoted as outvoted,
        own_versions as own_versions,
        same_on_every_rank as same_on_every_rank,
        smallest as smallest,
        wait_for_all_ranks as wait_for_all_ranks,
    )
    from meshwright.runtime.device import (
        COMMUNICATOR_BYTES as COMMUNICATOR_BYTES,
        GeneratorState as GeneratorState,
        HostCopy as HostCopy,
        compute_deterministically as compute_deterministically,
        computes_on_gpu as computes_on_gpu,
        host_share_bytes as host_share_bytes,
        imitated_gpu as imitated_gpu,
        machine_name as machine_name,
        measured_flops_per_s as measured_flops_per_s,
        memory_limit_bytes as memory_limit_bytes,
        peak_memory_bytes as peak_memory_bytes,
        preserved_rng as preserved_rng,
        read_together as read_together,
        seed_everything as seed_everything,
        seed_in_use as seed_in_use,
        seed_replica as seed_replica,
        spread_seed as spread_seed,
        synchronize_device as synchronize_device,
        use_share_of_cores as use_share_of_cores,
    )
    from meshwright.runtime.mesh import (
        AXES as AXES,
        TOKEN_AXES as TOKEN_AXES,
        Axes as Axes,
        axis_groups as axis_groups,
        build_mesh as build_mesh,
        check_axes as check_axes,
        coordinate_of as coordinate_of,
        fit_axes as fit_axes,
        flat_mesh as flat_mesh,
        groups_along as groups_along,
        joint_axis as joint_axis,
        mesh_of_parts as mesh_of_parts,
        mesh_order as mesh_order,
        rank_grid as rank_grid,
        world_mesh as world_mesh,
    )
    from meshwright.runtime.processes import (
        Settings as Settings,
        agreeing_over as agreeing_over,
        background_group as background_group,
        before_leaving as before_leaving,
        init_distributed as init_distributed,
        is_pretended as is_pretended,
        make_group as make_group,
        make_groups as make_groups,
        print_rank as print_rank,
        rank as rank,
        require_distributed as require_distributed,
        settings as settings,
        shutdown_distributed as shutdown_distributed,
        sum_loss as sum_loss,
        synchronize as synchronize,
        world_size as world_size,
    )
    from meshwright.runtime.rendezvous import named_ranks as named_ranks, number_from as number_from
    from meshwright.runtime.stop_signals import StopSignals as StopSignals
    from meshwright.runtime.topology import (
        ShardAxes as ShardAxes,
        parameter_mesh as parameter_mesh,
        pipe_size as pipe_size,
        pipeline_mesh as pipeline_mesh,
        process_grid as process_grid,
        ranks_per_host as ranks_per_host,
        replica_index as replica_index,
        shard_axes as shard_axes,
        stage_axes as stage_axes,
        stage_index as stage_index,
        tensor_mesh as tensor_mesh,
        tensor_rank as tensor_rank,
        tensor_size as tensor_size,
        zero_mesh as zero_mesh,
    )
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
