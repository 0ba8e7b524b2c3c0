"""What of a device's memory tensors can have: less than it holds, by what drivers, libraries and gaps take."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.cost import Cluster, Device

# What no tensor of a job can use: the driver's context, collectives' buffers, kernels' workspaces.
CONTEXT_BYTES = round(1.5 * 2**30)
# What an allocator that cannot join its segments leaves unused between tensors of mixed sizes; more where whole layers
# come and go between activations. Both are set on the runs of BMTrain's table that did and did not fit.
FRAGMENTED, FRAGMENTED_BY_LAYERS = 0.05, 0.12
_HOST_USABLE = 0.9  # of host memory: the rest is the system's, the processes' own, and of those that load data


def usable_bytes(device: Device) -> int:
    """What a caching allocator can take of a device; all of a host's memory."""
    return device.memory_bytes - (0 if device.is_host else CONTEXT_BYTES)


def usable_host_bytes(cluster: Cluster) -> int | None:
    """What of host memory a device's offloaded tensors can have; None: unknown."""
    share = cluster.host_memory_bytes
    return None if share is None else round(share * _HOST_USABLE)


def taken_bytes(reserved_bytes: int, device: Device) -> int:
    """What must be usable for tensors that need so many reserved bytes, gaps between them included."""
    return reserved_bytes if device.is_host else round(reserved_bytes * (1 + FRAGMENTED))
