"""Optimizer parts: Adam over shards, one loss scale for many optimizers, exact gradient norms, guards of a step."""

from meshwright.optim.adam import AdamOffloadOptimizer, AdamOptimizer
from meshwright.optim.clip import clip_grad_norm_, local_tensor, total_norm
from meshwright.optim.guarded import GuardedOptimizer
from meshwright.optim.lamb import DistributedLamb, Lamb
from meshwright.optim.layouts import separate_layouts
from meshwright.optim.loss_scaler import LossScaler
from meshwright.optim.manager import OptimManager
from meshwright.optim.master import MasterWeights
from meshwright.optim.sharded import ShardedOptimizer

__all__ = [
    "AdamOffloadOptimizer",
    "AdamOptimizer",
    "DistributedLamb",
    "GuardedOptimizer",
    "Lamb",
    "LossScaler",
    "MasterWeights",
    "OptimManager",
    "ShardedOptimizer",
    "clip_grad_norm_",
    "local_tensor",
    "separate_layouts",
    "total_norm",
]
