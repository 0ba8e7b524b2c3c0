"""Outer steps: replicas that train on their own and synchronise every H steps. Seed: fairseq's BMUF."""

from typing import TYPE_CHECKING

from meshwright.on_demand import on_demand

if TYPE_CHECKING:
    from meshwright.optim.outer.bmuf import BMUF
    from meshwright.optim.outer.optimizer import OuterOptimizer
    from meshwright.optim.outer.policy import OuterPolicy
    from meshwright.optim.outer.presets import DiLoCo, LocalSGD, PostLocalSGD, SlowMo, StreamingDiLoCo
else:
    on_demand(
        __name__,
        """
        bmuf: BMUF
        optimizer: OuterOptimizer
        policy: OuterPolicy
        presets: DiLoCo LocalSGD PostLocalSGD SlowMo StreamingDiLoCo
        """,
    )

__all__ = ["BMUF", "DiLoCo", "LocalSGD", "OuterOptimizer", "OuterPolicy", "PostLocalSGD", "SlowMo", "StreamingDiLoCo"]
