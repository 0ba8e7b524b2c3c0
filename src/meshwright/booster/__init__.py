"""The door for users of ColossalAI: ``Booster``, plugins that are named strategies, and ``launch``."""

from meshwright.booster.booster import Booster
from meshwright.booster.launch import launch, launch_from_torch
from meshwright.booster.optimizer import BoostedOptimizer
from meshwright.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    MoeHybridParallelPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)

__all__ = [
    "BoostedOptimizer",
    "Booster",
    "GeminiPlugin",
    "HybridParallelPlugin",
    "LowLevelZeroPlugin",
    "MoeHybridParallelPlugin",
    "Plugin",
    "TorchDDPPlugin",
    "TorchFSDPPlugin",
    "launch",
    "launch_from_torch",
]
