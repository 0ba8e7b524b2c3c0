"""Documented names and modules that live elsewhere in the package.

See [Note: documented names that moved] in :mod:`meshwright.runtime.lazy`.
"""

from __future__ import annotations

from meshwright.runtime.lazy import alias_modules, alias_name

_BMTRAIN = "meshwright.compat.bmtrain"
_COLOSSALAI = "meshwright.compat.colossalai"

# Documented module -> where it lives; modules below it go along; after a colon, the only names that a module shows.
MODULES = {
    "meshwright.accelerated": "meshwright.training.accelerated",
    "meshwright.atorch": "meshwright.compat.atorch",
    "meshwright.atorch.auto": "meshwright.compat.atorch",
    "meshwright.atorch.auto.accelerate": "meshwright.compat.atorch",
    "meshwright.atorch.auto.strategy": "meshwright.compat.atorch",
    "meshwright.atorch.common": "meshwright.compat.atorch",
    "meshwright.atorch.common.util_func": "meshwright.compat.atorch",
    "meshwright.atorch.distributed": "meshwright.compat.atorch",
    "meshwright.atorch.distributed.distributed": "meshwright.compat.atorch",
    "meshwright.auto": "meshwright.training.accelerate",
    "meshwright.benchmark": f"{_BMTRAIN}.benchmark",
    "meshwright.booster": _COLOSSALAI,
    "meshwright.booster.launch": f"{_COLOSSALAI}.booster",
    "meshwright.booster.lora": f"{_COLOSSALAI}.checkpoint_io",
    "meshwright.booster.plugin": _COLOSSALAI,
    "meshwright.distributed": "meshwright.comm",
    "meshwright.fairseq": "meshwright.compat.fairseq",
    "meshwright.fairseq.optim": "meshwright.compat.fairseq",
    "meshwright.fairseq.optim.bmuf": "meshwright.compat.fairseq",
    "meshwright.nn.optimizer": f"{_COLOSSALAI}.optimizers",
    "meshwright.nn.optimizer.adafactor": f"{_COLOSSALAI}.optimizers: Adafactor",
    "meshwright.nn.optimizer.came": f"{_COLOSSALAI}.optimizers: CAME",
    "meshwright.nn.optimizer.distributed_adafactor": f"{_COLOSSALAI}.optimizers: DistributedAdaFactor",
    "meshwright.nn.optimizer.distributed_came": f"{_COLOSSALAI}.optimizers: DistributedCAME",
    "meshwright.nn.optimizer.distributed_galore": f"{_COLOSSALAI}.optimizers: DistGaloreAwamW",
    "meshwright.nn.optimizer.distributed_lamb": f"{_COLOSSALAI}.optimizers: DistributedLamb",
    "meshwright.nn.optimizer.galore": (
        f"{_COLOSSALAI}.optimizers: GaLoreAdafactor GaLoreAdamW GaLoreAdamW8bit get_galore_param_groups"
    ),
    "meshwright.nn.optimizer.lamb": f"{_COLOSSALAI}.optimizers: Lamb",
    "meshwright.optim.eight_bit": "meshwright.optim.eight_bit_adamw",
    "meshwright.optim.manager": f"{_BMTRAIN}.optim_manager",
    "meshwright.optim.offload": "meshwright.optim.offloaded_optimizer",
    "meshwright.planning": "meshwright.planner",
    "meshwright.utils": f"{_BMTRAIN}.utils",
}

# Documented package -> where names live -> names; ``old=new`` if a name has changed, too.
NAMES = {
    "meshwright.comm": {
        f"{_BMTRAIN}.utils": "gather_result",
    },
    "meshwright.cost": {
        "meshwright.cost.rank_memory": "Home=OffloadPlacement homes_of=offload_placements",
        "meshwright.cost.step": "Hosted=Offloaded Wire=Compression",
    },
    "meshwright.lr_scheduler": {
        f"{_BMTRAIN}.lr_schedules": "Cosine Exponential Linear NoDecay Noam WSD WarmupLRScheduler",
    },
    "meshwright.nn": {
        "meshwright.nn.fsdp_units": "Exchanges=CollectiveLog",
        "meshwright.nn.swapped_parameters": "KeptAttributes=SavedAttributes",
        f"{_BMTRAIN}.block": "Block CheckpointBlock no_sync",
        f"{_BMTRAIN}.block_list": "TransformerBlockList",
        f"{_BMTRAIN}.distributed_module": "DistributedModule",
        f"{_BMTRAIN}.layers": "ColumnParallelLinear Linear RowParallelLinear VPEmbedding",
        f"{_BMTRAIN}.model_setup": "BMTrainModelWrapper grouped_parameters init_parameters",
        f"{_BMTRAIN}.parallel_linear": "OpParallelLinear ReduceType",
        f"{_BMTRAIN}.parameter": "DistributedParameter ParameterInitializer",
        f"{_BMTRAIN}.pipeline_block_list": "PipelineTransformerBlockList",
    },
    "meshwright.optim": {
        "meshwright.optim.dtensors": "Held=ParameterPlacement tell_held=set_placement",
        f"{_BMTRAIN}.optim_manager": "OptimManager",
        f"{_COLOSSALAI}.optimizers": (
            "DistGaloreAdamW DistGaloreAwamW DistributedAdaFactor DistributedCAME DistributedLamb cast_to_distributed"
        ),
        "meshwright.compat.fairseq": "BMUF",
    },
    "meshwright.optim.outer": {
        "meshwright.compat.fairseq": "BMUF",
    },
    "meshwright.optim.sharded": {
        "meshwright.optim.factored": "Blocks stack",
    },
    "meshwright.planner": {
        "meshwright.errors": "readable_bytes",
    },
    "meshwright.planner.search": {
        "meshwright.planner.search.constraints": "read_wishes=read_constraints",
    },
    "meshwright.runtime": {
        f"{_BMTRAIN}.block": "note_gathered=note_gather take_order=take_gather_order",
        f"{_BMTRAIN}.config": "config",
        "meshwright.runtime.agreement": "come_together=wait_for_all_ranks told_by_all=gather_over_store",
    },
}


def install() -> None:
    """Register all aliases; a module is imported only when one of its names is used."""
    alias_modules(MODULES)
    for package, homes in NAMES.items():
        for module, names in homes.items():
            for old, _, new in (name.partition("=") for name in names.split()):
                alias_name(package, old, module, new or old)
