"""Process groups and what averages gradients over them.

The store of the default group, classes of stores, the device of small messages, what groups record, and
DistributedDataParallel's reducer: its buckets, their hooks, its state after a failure, and what it leaves alone.
"""

import functools
from collections.abc import Callable
from datetime import timedelta
from operator import attrgetter, methodcaller

import torch
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import (
    # Public in ``torch.distributed``, which does not export them to type checkers.
    BarrierOptions,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import (
    # What ranks agree on before their collectives, or beside them. Replaced by a public accessor.
    _get_default_store as default_store,
    # Where a group carries what lies on the host, as torch decides for objects: with NCCL alone on the GPU.
    _get_object_coll_device as object_device,
    # Meshes make their groups with torch's default limit of time, whatever that of the world is. Replaced by a
    # ``timeout`` of DeviceMesh.
    _set_pg_timeout as set_timeout,
    # All process groups by name. Replaced by a public list of groups.
    _world as world_state,
)

__all__ = [
    "COMM_HOOKS",
    "IGNORED",
    "BarrierOptions",
    "HashStore",
    "PrefixStore",
    "Store",
    "TCPStore",
    "check_reducer_finalized",
    "default_store",
    "enable_timings",
    "flight_recorders",
    "ignored_names",
    "object_device",
    "ranks_of_groups",
    "rebuild_buckets",
    "reset_reducer",
    "set_timeout",
    "timeout_of",
]

ATTRIBUTES_OF = (
    "torch._C._distributed_c10d",
    "torch._C._distributed_c10d.ProcessGroup",
    "torch._C._distributed_c10d.Backend.Options",
    "torch._C._distributed_c10d.Reducer",
    "torch.nn.parallel.distributed",
)

_enable_timings = methodcaller("_enable_collectives_timing")

# What process groups have recorded of their collectives, as JSON: NCCL's recorder, in builds for CUDA, and gloo's. Both
# take whether to include collectives, and only what is under way. torch's own debug server reads them so, too.
_RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")


_backend_for = methodcaller("_get_backend", torch.device("cpu")), methodcaller("_get_backend", torch.device("cuda"))


def timeout_of(group: ProcessGroup) -> timedelta | None:
    """Return how long a collective of this group may take; None where its backend does not tell."""
    for backend_for in _backend_for:
        try:
            options = getattr(backend_for(group), "options", None)
        except RuntimeError:  # no backend for this type of device
            continue
        if options is not None:
            return options._timeout
    return None


def flight_recorders() -> list[Callable[[], bytes]]:
    """Return functions that dump the flight recorders that this torch has."""
    found = [getattr(_distributed_c10d, name, None) for name in _RECORDERS]
    return [functools.partial(dump, True, False) for dump in found if dump is not None]


def ranks_of_groups() -> dict[str, list[int]]:
    """Return the global ranks of each process group of this process, by its name."""
    # By ``get``, for another thread may destroy a group meanwhile.
    found = {name: world_state.pg_group_ranks.get(group) for group, name in list(world_state.pg_names.items())}
    return {name: sorted(ranks) for name, ranks in found.items() if ranks}


def enable_timings() -> None:
    """Let NCCL's groups record when the device begins a collective, as DDP does to log its statistics.

    Without it only ends are recorded. ``TORCH_NCCL_ENABLE_TIMING=1`` does the same from the start.
    """
    for group in list(world_state.pg_names):
        if "nccl" in str(world_state.pg_backend_config.get(group)):
            _enable_timings(group)


# --- DistributedDataParallel

# Forget a backward pass that failed; else the next raises "Expected to have finished reduction". No public way.
reset_reducer = methodcaller("_reset_state")

# Rebuild the buckets by the order in which one backward pass was ready. DDP does it in ``forward``, which pipelines
# and several passes per step call more than once. No public way.
rebuild_buckets = methodcaller("_rebuild_buckets")

# Raise where parameters went unused, as DDP's own next ``forward`` would: a step asks at its own end.
check_reducer_finalized = methodcaller("_check_reducer_finalized")

# The names that DDP does not broadcast or reduce. torch's own setter is private, too
# (``_set_params_and_buffers_to_ignore_for_model``), and replaces the list instead of adding to it.
IGNORED = "_ddp_params_and_buffers_to_ignore"
ignored_names = attrgetter(IGNORED)

# The hooks that average buckets, each with its state: DDP's own copy has them listed, and not in use.
COMM_HOOKS = "_comm_hooks"
