"""Fake tensors and dispatch modes, which let the planner run a model without memory or arithmetic.

Replaced by a public module for fake tensors, when there is one. ``TorchDispatchMode`` is documented, and only its
module has an underscore.
"""

from torch._subclasses.fake_tensor import (
    # Raised by operators whose result, or its shape, depends on data; the planner reports them to the user.
    DataDependentOutputException,
    DynamicOutputShapeException,
    # Tensors with a shape and a device but no data, and the mode in which they are made.
    FakeTensor,
    FakeTensorMode,
    # Run an operator's own kernel on meta tensors, to learn what it allocates.
    in_kernel_invocation_manager,
    # What it reports as errors, before it raises them.
    log as logger,
    # Real arithmetic for small proofs amid a fake pass.
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import (
    # Sees every operator that reaches the dispatcher: the planner counts FLOPs and bytes there.
    TorchDispatchMode,
    # Measure an operator outside all modes: entered, they would record the measurement itself.
    _disable_current_modes as disable_current_modes,
    # Tell DTensors and other wrappers, whose inner tensors hold the memory.
    is_traceable_wrapper_subclass,
)

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "disable_current_modes",
    "in_kernel_invocation_manager",
    "is_traceable_wrapper_subclass",
    "logger",
    "unset_fake_temporarily",
]
