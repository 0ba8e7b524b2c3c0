"""Statistics of parameters, gradients and activations over all shards and ranks. Seed: BMTrain's inspector."""

from typing import TYPE_CHECKING

from meshwright.runtime.lazy import lazy_exports

if TYPE_CHECKING:
    from meshwright.inspect.recording import (
        Record as Record,
        Watched as Watched,
        captured as captured,
        hand_over as hand_over,
        hand_over_micro_batches as hand_over_micro_batches,
        hand_over_stages as hand_over_stages,
        record_tensor as record_tensor,
        recording_active as recording_active,
    )
    from meshwright.inspect.summaries import (
        OUTLINE as OUTLINE,
        Inspector as Inspector,
        format_summary as format_summary,
        inspect_model as inspect_model,
        inspect_tensor as inspect_tensor,
        keep_name_order as keep_name_order,
        layer_norms as layer_norms,
    )
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
