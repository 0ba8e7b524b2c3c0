"""Tensors and storages: wrappers without memory, versions, identity and history of memory, checks on the device."""

from operator import attrgetter
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass  # run a subclass's operators as a plain tensor's; no public name

__all__ = [
    "DisableTorchFunctionSubclass",
    "assert_async",
    "base_of",
    "flatten_dense",
    "is_view",
    "make_wrapper",
    "memory_snapshot",
    "record_memory_history",
    "storage_identity",
    "unflatten_dense",
    "version_of",
]

ATTRIBUTES_OF = ("torch.UntypedStorage",)

_T: Any = torch.Tensor

# A tensor of a shape without memory: logits that are computed when something reads them. Documented under "extending
# torch" for ``__torch_dispatch__``, and private all the same.
make_wrapper = _T._make_wrapper_subclass

# What FSDP2 and autograd ask of a module's outputs.
base_of = _T._base.__get__
is_view = _T._is_view

# How often a tensor was written in place: tells whether a copy of it is still right. Autograd's own check uses it, and
# ``torch.autograd.graph.increment_version`` is public, but nothing reads it.
version_of = _T._version.__get__

# Raise on the device, without the host waiting for a result. Replaced by a public ``torch.assert_async``.
assert_async: Any = torch._assert_async

# Identity of memory, as torch.multiprocessing's ``StorageWeakRef`` has it.
storage_identity = attrgetter("_cdata")

# Several tensors as one and back; ``torch.cat`` and ``split`` need more calls. DDP uses the same through
# ``torch._utils``.
flatten_dense: Any = torch._C._nn.flatten_dense_tensors
unflatten_dense: Any = torch._C._nn.unflatten_dense_tensors

# Every allocation of the CUDA allocator with its place in the code, as https://pytorch.org/memory_viz draws it. torch's
# manual documents both under these names.
record_memory_history: Any = torch.cuda.memory._record_memory_history
memory_snapshot: Any = torch.cuda.memory._snapshot
