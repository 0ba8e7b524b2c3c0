"""The store of the default process group, the classes of stores, and the device of small messages."""

from torch._C._distributed_c10d import (
    # Public in ``torch.distributed``, which does not export them to type checkers.
    BarrierOptions,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.distributed_c10d import (
    # What ranks agree on before their collectives, or beside them. Replaced by a public accessor.
    _get_default_store as default_store,
    # Where a group carries what lies on the host, as torch decides for objects: with NCCL alone on the GPU.
    _get_object_coll_device as object_device,
)

__all__ = ["BarrierOptions", "HashStore", "PrefixStore", "Store", "TCPStore", "default_store", "object_device"]
