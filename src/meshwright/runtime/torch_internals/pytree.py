"""Nested containers (``torch.utils._pytree``): what batches, arguments and outputs of modules are walked with.

Replaced by ``torch.utils.pytree`` where that is the oldest supported torch's: it has these functions with the same
signatures, but neither registers dataclasses itself nor tells which classes are registered.
"""

from torch.utils._pytree import (
    # The classes that torch goes into; ``nn/batches.py`` goes into other mappings and dataclasses itself.
    SUPPORTED_NODES as SUPPORTED_NODES,
    TreeSpec as TreeSpec,
    tree_flatten as tree_flatten,
    tree_leaves as tree_leaves,
    tree_map as tree_map,
    tree_map_only as tree_map_only,
    tree_unflatten as tree_unflatten,
)
