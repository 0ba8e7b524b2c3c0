"""Outer steps: replicas that train on their own and synchronise every H steps (BMUF, local SGD, SlowMo, DiLoCo)."""

from typing import TYPE_CHECKING

from meshwright.runtime.lazy import lazy_exports

if TYPE_CHECKING:
    from meshwright.optim.outer.outer_optimizer import OuterOptimizer as OuterOptimizer
    from meshwright.optim.outer.presets import (
        BlockMomentum as BlockMomentum,
        DiLoCo as DiLoCo,
        LocalSGD as LocalSGD,
        PostLocalSGD as PostLocalSGD,
        SlowMo as SlowMo,
        StreamingDiLoCo as StreamingDiLoCo,
    )
    from meshwright.optim.outer.sync_policy import OuterPolicy as OuterPolicy
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
