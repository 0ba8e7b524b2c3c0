"""Optimizers: arithmetic on lists of tensors, fused kernels, hooks, and what a GradScaler knows.

The functions on lists (``torch._foreach_*``) and the fused kernels are what torch's own optimizers are made of. They
are documented (``torch._foreach_add_`` and the others), but have no names without an underscore.
"""

from operator import attrgetter

import torch
from torch.optim.optimizer import (
    _global_optimizer_post_hooks as global_step_post_hooks,
    _global_optimizer_pre_hooks as global_step_pre_hooks,
)

__all__ = [
    "FOREACH_DEVICES",
    "INIT_GROUP",
    "STEP_POST_HOOKS",
    "STEP_PRE_HOOKS",
    "foreach_add_",
    "foreach_addcmul_",
    "foreach_clamp_max_",
    "foreach_clamp_min_",
    "foreach_copy_",
    "foreach_div_",
    "foreach_lerp_",
    "foreach_mul",
    "foreach_mul_",
    "foreach_norm",
    "foreach_rsqrt",
    "foreach_sqrt",
    "foreach_sqrt_",
    "foreach_sub_",
    "foreach_zero_",
    "found_inf_of",
    "fused_adam_",
    "fused_adamw_",
    "global_step_post_hooks",
    "global_step_pre_hooks",
    "growth_tracker_of",
    "init_group_of",
    "non_finite_check_and_unscale_",
    "scaler_states_of",
    "step_post_hooks_of",
    "step_pre_hooks_of",
]

ATTRIBUTES_OF = ("torch.optim.optimizer", "torch.optim.adam", "torch.amp.grad_scaler")

foreach_add_ = torch._foreach_add_
foreach_addcmul_ = torch._foreach_addcmul_
foreach_clamp_max_ = torch._foreach_clamp_max_
foreach_clamp_min_ = torch._foreach_clamp_min_
foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_
foreach_lerp_ = torch._foreach_lerp_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_rsqrt = torch._foreach_rsqrt
foreach_sqrt = torch._foreach_sqrt
foreach_sqrt_ = torch._foreach_sqrt_
foreach_sub_ = torch._foreach_sub_
foreach_zero_ = torch._foreach_zero_
fused_adam_ = torch._fused_adam_
fused_adamw_ = torch._fused_adamw_

# What ``GradScaler.unscale_`` runs: divides gradients and notes infinities without the host reading them.
non_finite_check_and_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_

# Hooks that users have registered on one optimizer, and on all (``global_step_pre_hooks``,
# ``global_step_post_hooks``): torch can only register
# them. A wrapper calls them itself, or does not fuse what they want to see.
STEP_PRE_HOOKS, STEP_POST_HOOKS = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
step_pre_hooks_of = attrgetter(STEP_PRE_HOOKS)
step_post_hooks_of = attrgetter(STEP_POST_HOOKS)

# The method with which torch's optimizers collect parameters, gradients and states for their kernels: DTensors are
# unwrapped there. Replaced by foreach kernels for DTensors without dispatch of every operator.
INIT_GROUP = "_init_group"
init_group_of = attrgetter(INIT_GROUP)

# The function of ``torch.optim.optimizer`` that says on which devices optimizers work on lists: a trace on the CPU
# answers for the device that it predicts.
FOREACH_DEVICES = "_get_foreach_kernels_supported_devices"

# What a GradScaler has found: ``torch.amp`` shows the scale, but not whether a step overflowed.
found_inf_of = attrgetter("_found_inf_per_device")
growth_tracker_of = attrgetter("_growth_tracker")
scaler_states_of = attrgetter("_per_optimizer_states")
