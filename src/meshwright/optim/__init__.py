"""Optimizer parts: Adam over shards, one loss scale for many optimizers, exact gradient norms, guards of a step."""

from meshwright.optim.adam import AdamOffloadOptimizer, AdamOptimizer
from meshwright.optim.clip import clip_grad_norm_, local_tensor, total_norm
from meshwright.optim.guarded import GuardedOptimizer
from meshwright.optim.loss_scaler import LossScaler
from meshwright.optim.manager import OptimManager
from meshwright.optim.master import MasterWeights

__all__ = [
    "AdamOffloadOptimizer",
    "AdamOptimizer",
    "GuardedOptimizer",
    "LossScaler",
    "MasterWeights",
    "OptimManager",
    "clip_grad_norm_",
    "local_tensor",
    "total_norm",
]
