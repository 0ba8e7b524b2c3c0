"""TorchScript's profiling, and how torch's checkpoint stops a recomputation.

Recomputed code must save the same tensors in every run, but TorchScript profiles the first run of a function, and
optimises later ones; ``torch.jit.optimized_execution(False)`` leaves alone what is optimised already. A public switch
would replace :data:`set_script_profiling`; a checkpoint that stops cleanly inside of scripted functions would replace
the rest.
"""

import torch
from torch.utils.checkpoint import _StopRecomputationError as StopRecomputation

__all__ = ["StopRecomputation", "current_saved_tensors_hooks", "set_script_profiling"]

set_script_profiling = torch._C._jit_set_profiling_mode

# The pack and unpack hooks that saved tensors go through now.
current_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
