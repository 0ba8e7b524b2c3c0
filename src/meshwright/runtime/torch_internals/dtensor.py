"""DTensors and device meshes: the local shard without autograd, specs for shards that are laid out by hand."""

from operator import attrgetter, methodcaller

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import (
    # Layouts of whole tensors are computed and compared before there is any DTensor, and DTensors are made of shards
    # whose global shape is known; ``DTensor.from_local`` would derive it with a collective. Replaced by a public spec.
    DTensorSpec,
    TensorMeta,
)
from torch.distributed.tensor.placement_types import (
    # FSDP2 over tensor parallelism shards one dim twice, and describes it by this placement: found in models, and made
    # for optimizer states. Replaced by torch's order of shards, once that is public.
    _StridedShard as StridedShard,
)

__all__ = [
    "LOCAL_SHARD",
    "DTensorSpec",
    "StridedShard",
    "TensorMeta",
    "clear_sharding_cache",
    "dtensor_of",
    "flattened",
    "local_shard",
    "side_by_side",
    "spec_of",
]

ATTRIBUTES_OF = ("torch.distributed.tensor._api", "torch.distributed.device_mesh")

# The shard itself: ``to_local()`` adds a node to the graph where gradients are on.
local_shard = attrgetter("_local_tensor")
LOCAL_SHARD = "_local_tensor"

# Mesh and placements, compared by identity: FSDP2 gives a gradient the spec of its parameter.
spec_of = attrgetter("_spec")


def dtensor_of(shard: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Return a shard as a DTensor of a known layout; ``DTensor.from_local`` would derive and check it."""
    return DTensor(shard, spec, requires_grad=shard.requires_grad)


# One axis out of several: a mesh's ``[...]`` takes several names, but has no group of all their ranks.
flattened = methodcaller("_flatten")

# Meshes of one dim each as one of several, in a root that all share. Slicing several flattened axes out of the root is
# deprecated, and this is to replace it.
side_by_side = DeviceMesh._concatenate


def clear_sharding_cache() -> None:
    """Forget the sharding of operators that DTensor has seen.

    Its cache holds process groups that are gone after a restart. Replaced by a public function, or a cache by weak
    references.
    """
    # Only where DTensor is in use: the module takes long to import.
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
