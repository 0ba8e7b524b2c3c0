"""What is in a model while it trains: statistics of parameters, gradients and activations over all shards and ranks.

Seed: BMTrain's inspector.
"""

from meshwright.inspect.inspector import Inspector, inspect_tensor
from meshwright.inspect.model import OUTLINE, inspect_model
from meshwright.inspect.recording import Record, captured, hand_over, record_tensor, recording_active
from meshwright.inspect.text import format_summary

__all__ = [
    "OUTLINE",
    "Inspector",
    "Record",
    "captured",
    "format_summary",
    "hand_over",
    "inspect_model",
    "inspect_tensor",
    "record_tensor",
    "recording_active",
]
