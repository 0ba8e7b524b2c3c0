"""Optimizer states in 8 bits, equal on any layout."""

from typing import TYPE_CHECKING

from meshwright.on_demand import on_demand

if TYPE_CHECKING:
    from meshwright.optim.eight_bit.base import QUANTISATION, MomentAdamW
    from meshwright.optim.eight_bit.moments import variant_of_moments
    from meshwright.optim.eight_bit.optimizer import AdamW8bit
else:
    on_demand(
        __name__,
        """
        base: QUANTISATION MomentAdamW
        moments: variant_of_moments
        optimizer: AdamW8bit
        """,
    )

__all__ = ["QUANTISATION", "AdamW8bit", "MomentAdamW", "variant_of_moments"]
