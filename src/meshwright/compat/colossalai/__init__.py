"""ColossalAI's surface: ``Booster``, its plugins and its optimizer names."""

from typing import TYPE_CHECKING

from meshwright.runtime.lazy import lazy_exports

if TYPE_CHECKING:
    from meshwright.compat.colossalai.boosted_optimizer import BoostedOptimizer as BoostedOptimizer
    from meshwright.compat.colossalai.booster import (
        Booster as Booster,
        launch as launch,
        launch_from_torch as launch_from_torch,
    )
    from meshwright.compat.colossalai.data_parallel_plugins import (
        GeminiPlugin as GeminiPlugin,
        LowLevelZeroPlugin as LowLevelZeroPlugin,
        TorchDDPPlugin as TorchDDPPlugin,
        TorchFSDPPlugin as TorchFSDPPlugin,
    )
    from meshwright.compat.colossalai.hybrid_parallel_plugin import (
        HybridParallelPlugin as HybridParallelPlugin,
        MoeHybridParallelPlugin as MoeHybridParallelPlugin,
    )
    from meshwright.compat.colossalai.optimizers import (
        CAME as CAME,
        Adafactor as Adafactor,
        DistGaloreAdamW as DistGaloreAdamW,
        DistGaloreAwamW as DistGaloreAwamW,
        DistributedAdaFactor as DistributedAdaFactor,
        DistributedCAME as DistributedCAME,
        DistributedLamb as DistributedLamb,
        GaLoreAdafactor as GaLoreAdafactor,
        GaLoreAdamW as GaLoreAdamW,
        GaLoreAdamW8bit as GaLoreAdamW8bit,
        Lamb as Lamb,
        cast_to_distributed as cast_to_distributed,
        get_galore_param_groups as get_galore_param_groups,
    )
    from meshwright.compat.colossalai.plugin import Plugin as Plugin
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
