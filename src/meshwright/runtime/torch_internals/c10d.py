"""The store of the default process group, and the classes of stores."""

from torch._C._distributed_c10d import (
    # Public in ``torch.distributed``, which does not export them to type checkers.
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.distributed_c10d import (
    # What ranks agree on before their collectives, or beside them. Replaced by a public accessor.
    _get_default_store as default_store,
)

__all__ = ["HashStore", "PrefixStore", "Store", "TCPStore", "default_store"]
