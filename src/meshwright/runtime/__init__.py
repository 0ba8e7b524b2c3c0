"""Ground floor: processes, mesh, seeds, device. Knows nothing of models."""

from meshwright.runtime.agreement import agreed, check_equal, gather_from, gather_objects, same_on_every_rank
from meshwright.runtime.device import measured_flops_per_s, memory_limit_bytes, peak_memory_bytes, synchronize_device
from meshwright.runtime.mesh import (
    AXES,
    Axes,
    axis_groups,
    build_mesh,
    check_axes,
    coordinate_of,
    fit_axes,
    rank_grid,
    world_mesh,
)
from meshwright.runtime.processes import (
    Settings,
    init_distributed,
    print_rank,
    rank,
    require_distributed,
    settings,
    shutdown_distributed,
    sum_loss,
    synchronize,
    world_size,
)
from meshwright.runtime.seeds import preserved_rng, seed_everything, seed_replica

__all__ = [
    "AXES",
    "Axes",
    "Settings",
    "agreed",
    "axis_groups",
    "build_mesh",
    "check_axes",
    "check_equal",
    "coordinate_of",
    "fit_axes",
    "gather_from",
    "gather_objects",
    "init_distributed",
    "measured_flops_per_s",
    "memory_limit_bytes",
    "peak_memory_bytes",
    "preserved_rng",
    "print_rank",
    "rank",
    "rank_grid",
    "require_distributed",
    "same_on_every_rank",
    "seed_everything",
    "seed_replica",
    "settings",
    "shutdown_distributed",
    "sum_loss",
    "synchronize",
    "synchronize_device",
    "world_mesh",
    "world_size",
]
