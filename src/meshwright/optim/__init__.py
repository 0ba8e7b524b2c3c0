"""Optimizer parts: exact gradient norms over shards, master weights, and the guards around a step."""

from meshwright.optim.clip import clip_grad_norm_, local_tensor, total_norm
from meshwright.optim.guarded import GuardedOptimizer
from meshwright.optim.master import MasterWeights

__all__ = ["GuardedOptimizer", "MasterWeights", "clip_grad_norm_", "local_tensor", "total_norm"]
