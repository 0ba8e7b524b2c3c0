"""Modules: base classes for ``isinstance``, dictionaries of members, and hooks that are carried over.

``named_parameters`` and its like walk all submodules and skip what they have seen; the dictionaries are the members of
one module, in order and assignable. They have had their names since the first torch.
"""

from operator import attrgetter

from torch.nn.modules.batchnorm import (
    # All batch norms, lazy and synchronised ones included: no public base class says "batch norm of any dimension".
    _BatchNorm as AnyBatchNorm,
    # Batch and instance norms: their statistics stay in full precision.
    _NormBase as AnyBatchOrInstanceNorm,
)
from torch.nn.modules.loss import _Loss as AnyLoss  # tells losses from models; no public base class

__all__ = [
    "AnyBatchNorm",
    "AnyBatchOrInstanceNorm",
    "AnyLoss",
    "buffers_of",
    "children_of",
    "compiled_call_of",
    "forward_hooks_of",
    "forward_pre_hooks_of",
    "non_persistent_of",
    "parameters_of",
]

ATTRIBUTES_OF = ("torch.nn.modules.module",)

# The members of one module.
parameters_of = attrgetter("_parameters")
buffers_of = attrgetter("_buffers")
children_of = attrgetter("_modules")
# Names of the buffers that a checkpoint does not have.
non_persistent_of = attrgetter("_non_persistent_buffers_set")
CHILDREN = "_modules"
PARAMETERS = "_parameters"

# Two blocks are one for the planner only if they have as many hooks.
forward_hooks_of = attrgetter("_forward_hooks")
forward_pre_hooks_of = attrgetter("_forward_pre_hooks")

# Set by ``module.compile()``, which cannot be asked otherwise: a pipeline does not cut through a compiled module.
compiled_call_of = attrgetter("_compiled_call_impl")
