"""The dynamic loss scale over parameters of several meshes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from meshwright.optim.clip import local_tensor
from meshwright.optim.layouts import by_kind
from meshwright.runtime import world_size


class MixedMeshScaler(torch.amp.GradScaler):
    """torch's loss scale where plain tensors and DTensors of several meshes are updated together.

    torch checks all gradients in one operation, which refuses mixtures. This one checks local shards, and what one rank
    finds holds for all: one all-reduce of one number per step, over the world. (torch's ShardedGradScaler overrides the
    same method, for one process group.)
    """

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not allow_fp16 and any(gradient.dtype == torch.float16 for gradient in gradients):
            raise ValueError("Attempting to unscale FP16 gradients.")
        for kind in by_kind(map(local_tensor, gradients)):
            torch._amp_foreach_non_finite_check_and_unscale_(kind, found_inf, inv_scale)
        if world_size() > 1:
            dist.all_reduce(found_inf, dist.ReduceOp.MAX)
        return {found_inf.device: found_inf}
