"""Names and modules that users know from other places of the package than where they live.

See [Note: documented names that moved] in :mod:`meshwright.runtime.lazy`.
"""

from __future__ import annotations

from meshwright.runtime.lazy import alias_modules, alias_name

_BMTRAIN = "meshwright.compat.bmtrain"
_COLOSSALAI = "meshwright.compat.colossalai"

# Modules and all that lies below them.
MODULES = {
    "meshwright.accelerated": "meshwright.training.accelerated",
    "meshwright.atorch": "meshwright.compat.atorch",
    "meshwright.auto": "meshwright.training.accelerate",
    "meshwright.benchmark": f"{_BMTRAIN}.benchmark",
    "meshwright.booster": _COLOSSALAI,
    "meshwright.booster.launch": f"{_COLOSSALAI}.booster",
    "meshwright.booster.lora": f"{_COLOSSALAI}.checkpoint_io",
    "meshwright.booster.plugin": _COLOSSALAI,
    "meshwright.distributed": "meshwright.comm",
    "meshwright.nn.optimizer": f"{_COLOSSALAI}.optimizers",
    "meshwright.optim.manager": f"{_BMTRAIN}.optim_manager",
    "meshwright.planning": "meshwright.planner",
    "meshwright.utils": f"{_BMTRAIN}.utils",
}

# Package -> module -> names; ``old=new`` where the name has changed, too.
NAMES = {
    "meshwright.cost": {
        "meshwright.cost.step": "Wire=Compression",
    },
    "meshwright.lr_scheduler": {
        f"{_BMTRAIN}.lr_schedules": "Cosine Exponential Linear NoDecay Noam WSD WarmupLRScheduler",
    },
    "meshwright.nn": {
        f"{_BMTRAIN}.block": "Block CheckpointBlock no_sync",
        f"{_BMTRAIN}.block_list": "TransformerBlockList",
        f"{_BMTRAIN}.distributed_module": "DistributedModule",
        f"{_BMTRAIN}.layers": "ColumnParallelLinear Linear RowParallelLinear VPEmbedding",
        f"{_BMTRAIN}.model_setup": "BMTrainModelWrapper grouped_parameters init_parameters",
        f"{_BMTRAIN}.parameter": "DistributedParameter ParameterInitializer",
        f"{_BMTRAIN}.pipeline_block_list": "PipelineTransformerBlockList",
    },
    "meshwright.optim": {
        f"{_BMTRAIN}.optim_manager": "OptimManager",
        f"{_COLOSSALAI}.optimizers": (
            "DistGaloreAdamW DistGaloreAwamW DistributedAdaFactor DistributedCAME DistributedLamb cast_to_distributed"
        ),
        "meshwright.compat.fairseq": "BMUF",
    },
    "meshwright.optim.outer": {
        "meshwright.compat.fairseq": "BMUF",
    },
}


def install() -> None:
    """Make every documented name importable; nothing is imported before somebody asks for it."""
    alias_modules(MODULES)
    for package, homes in NAMES.items():
        for module, names in homes.items():
            for old, _, new in (name.partition("=") for name in names.split()):
                alias_name(package, old, module, new or old)
