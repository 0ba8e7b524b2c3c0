"""What is in a model while it trains: statistics of parameters, gradients and activations over all shards and ranks.

Seed: BMTrain's inspector.
"""

from typing import TYPE_CHECKING

from meshwright.on_demand import on_demand

if TYPE_CHECKING:
    from meshwright.inspect.inspector import Inspector, inspect_tensor
    from meshwright.inspect.model import OUTLINE, inspect_model, keep_name_order
    from meshwright.inspect.passes import Watched, hand_over_micro_batches
    from meshwright.inspect.recording import (
        Record,
        captured,
        hand_over,
        hand_over_stages,
        record_tensor,
        recording_active,
    )
    from meshwright.inspect.text import format_summary
else:
    on_demand(
        __name__,
        """
        inspector: Inspector inspect_tensor
        model: OUTLINE inspect_model keep_name_order
        passes: Watched hand_over_micro_batches
        recording: Record captured hand_over hand_over_stages record_tensor recording_active
        text: format_summary
        """,
    )

__all__ = [
    "OUTLINE",
    "Inspector",
    "Record",
    "Watched",
    "captured",
    "format_summary",
    "hand_over",
    "hand_over_micro_batches",
    "hand_over_stages",
    "inspect_model",
    "inspect_tensor",
    "keep_name_order",
    "record_tensor",
    "recording_active",
]
