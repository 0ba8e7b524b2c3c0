"""ColossalAI's surface: ``Booster``, its plugins and its optimizer names."""

from typing import TYPE_CHECKING

from meshwright.runtime.lazy import lazy_exports

if TYPE_CHECKING:
    from meshwright.compat.colossalai.boosted_optimizer import BoostedOptimizer as BoostedOptimizer
    from meshwright.compat.colossalai.booster import Accelerator as Accelerator, Booster as Booster
    from meshwright.compat.colossalai.data_parallel_plugins import (
        DPPluginBase as DPPluginBase,
        GeminiPlugin as GeminiPlugin,
        LowLevelZeroPlugin as LowLevelZeroPlugin,
        TorchDDPPlugin as TorchDDPPlugin,
        TorchFSDPPlugin as TorchFSDPPlugin,
    )
    from meshwright.compat.colossalai.environment import (
        DistCoordinator as DistCoordinator,
        LazyInitContext as LazyInitContext,
        get_accelerator as get_accelerator,
        get_dist_logger as get_dist_logger,
        launch as launch,
        launch_from_openmpi as launch_from_openmpi,
        launch_from_slurm as launch_from_slurm,
        launch_from_torch as launch_from_torch,
    )
    from meshwright.compat.colossalai.hybrid_parallel_plugin import (
        HybridParallelPlugin as HybridParallelPlugin,
        MoeHybridParallelPlugin as MoeHybridParallelPlugin,
    )
    from meshwright.compat.colossalai.optimizers import (
        CAME as CAME,
        Adafactor as Adafactor,
        CPUAdam as CPUAdam,
        DistGaloreAdamW as DistGaloreAdamW,
        DistGaloreAwamW as DistGaloreAwamW,
        DistributedAdaFactor as DistributedAdaFactor,
        DistributedCAME as DistributedCAME,
        DistributedGalore as DistributedGalore,
        DistributedLamb as DistributedLamb,
        FusedAdam as FusedAdam,
        FusedLAMB as FusedLAMB,
        FusedSGD as FusedSGD,
        GaLoreAdafactor as GaLoreAdafactor,
        GaLoreAdamW as GaLoreAdamW,
        GaLoreAdamW8bit as GaLoreAdamW8bit,
        GaLoreProjector as GaLoreProjector,
        HybridAdam as HybridAdam,
        Lamb as Lamb,
        Lars as Lars,
        cast_to_distributed as cast_to_distributed,
        get_galore_param_groups as get_galore_param_groups,
    )
    from meshwright.compat.colossalai.plugin import Plugin as Plugin
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
