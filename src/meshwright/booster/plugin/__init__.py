"""Named strategies with ColossalAI's names and arguments."""

from meshwright.booster.plugin.base import Plugin
from meshwright.booster.plugin.gemini import GeminiPlugin
from meshwright.booster.plugin.hybrid_parallel import HybridParallelPlugin, MoeHybridParallelPlugin
from meshwright.booster.plugin.low_level_zero import LowLevelZeroPlugin
from meshwright.booster.plugin.torch_ddp import TorchDDPPlugin
from meshwright.booster.plugin.torch_fsdp import TorchFSDPPlugin

__all__ = [
    "GeminiPlugin",
    "HybridParallelPlugin",
    "LowLevelZeroPlugin",
    "MoeHybridParallelPlugin",
    "Plugin",
    "TorchDDPPlugin",
    "TorchFSDPPlugin",
]
