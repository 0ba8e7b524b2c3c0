"""Every layer that a GPT-2 needs, made of DistributedModules and DistributedParameters."""

from layers.attention import Attention, causal_padding_mask
from layers.embedding import Embedding
from layers.feedforward import FeedForward
from layers.layernorm import LayerNorm
from layers.linear import Linear

__all__ = ["Attention", "Embedding", "FeedForward", "LayerNorm", "Linear", "causal_padding_mask"]
