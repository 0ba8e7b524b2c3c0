"""Optimizer states in 8 bits, equal on any layout."""

from meshwright.optim.eight_bit.base import QUANTISATION, MomentAdamW
from meshwright.optim.eight_bit.moments import variant_of_moments
from meshwright.optim.eight_bit.optimizer import AdamW8bit

__all__ = ["QUANTISATION", "AdamW8bit", "MomentAdamW", "variant_of_moments"]
