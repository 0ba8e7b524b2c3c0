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
    "meshwright.accelerator": f"{_COLOSSALAI}.environment",
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
    "meshwright.block_layer": "meshwright: Block CheckpointBlock TransformerBlockList",
    "meshwright.booster": _COLOSSALAI,
    "meshwright.booster.accelerator": f"{_COLOSSALAI}.booster: Accelerator",
    "meshwright.booster.launch": f"{_COLOSSALAI}.environment",
    "meshwright.booster.lora": f"{_COLOSSALAI}.checkpoint_io",
    "meshwright.booster.mixed_precision": f"{_COLOSSALAI}.booster",
    "meshwright.booster.plugin": _COLOSSALAI,
    "meshwright.booster.plugin.dp_plugin_base": f"{_COLOSSALAI}.data_parallel_plugins",
    "meshwright.booster.plugin.gemini_plugin": f"{_COLOSSALAI}.data_parallel_plugins",
    "meshwright.booster.plugin.low_level_zero_plugin": f"{_COLOSSALAI}.data_parallel_plugins",
    "meshwright.booster.plugin.moe_hybrid_parallel_plugin": f"{_COLOSSALAI}.hybrid_parallel_plugin",
    "meshwright.booster.plugin.plugin_base": f"{_COLOSSALAI}.plugin",
    "meshwright.booster.plugin.torch_ddp_plugin": f"{_COLOSSALAI}.data_parallel_plugins",
    "meshwright.booster.plugin.torch_fsdp_plugin": f"{_COLOSSALAI}.data_parallel_plugins",
    "meshwright.cluster": f"{_COLOSSALAI}.environment",
    "meshwright.cluster.dist_coordinator": f"{_COLOSSALAI}.environment",
    "meshwright.debug": f"{_BMTRAIN}.debug",
    "meshwright.distributed": "meshwright.comm",
    "meshwright.fairseq": "meshwright.compat.fairseq",
    "meshwright.fairseq.optim": "meshwright.compat.fairseq",
    "meshwright.fairseq.optim.bmuf": "meshwright.compat.fairseq",
    "meshwright.global_var": "meshwright: config rank world_size",
    "meshwright.initialize": f"{_COLOSSALAI}.environment",
    "meshwright.interface": f"{_COLOSSALAI}.boosted_optimizer",
    "meshwright.layer": "meshwright: DistributedModule",
    "meshwright.lazy": f"{_COLOSSALAI}.environment",
    "meshwright.lazy.lazy_init": f"{_COLOSSALAI}.environment",
    "meshwright.logging": f"{_COLOSSALAI}.environment",
    "meshwright.nn.lr_scheduler": f"{_COLOSSALAI}.lr_schedules",
    "meshwright.nn.optimizer": f"{_COLOSSALAI}.optimizers",
    "meshwright.nn.optimizer.adafactor": f"{_COLOSSALAI}.optimizers: Adafactor",
    "meshwright.nn.optimizer.came": f"{_COLOSSALAI}.optimizers: CAME",
    "meshwright.nn.optimizer.cpu_adam": f"{_COLOSSALAI}.optimizers: CPUAdam",
    "meshwright.nn.optimizer.distributed_adafactor": f"{_COLOSSALAI}.optimizers: DistributedAdaFactor",
    "meshwright.nn.optimizer.distributed_came": f"{_COLOSSALAI}.optimizers: DistributedCAME",
    "meshwright.nn.optimizer.distributed_galore": f"{_COLOSSALAI}.optimizers: DistGaloreAwamW DistributedGalore",
    "meshwright.nn.optimizer.distributed_lamb": f"{_COLOSSALAI}.optimizers: DistributedLamb",
    "meshwright.nn.optimizer.fused_adam": f"{_COLOSSALAI}.optimizers: FusedAdam",
    "meshwright.nn.optimizer.fused_lamb": f"{_COLOSSALAI}.optimizers: FusedLAMB",
    "meshwright.nn.optimizer.fused_sgd": f"{_COLOSSALAI}.optimizers: FusedSGD",
    "meshwright.nn.optimizer.galore": (
        f"{_COLOSSALAI}.optimizers: GaLoreAdafactor GaLoreAdamW GaLoreAdamW8bit GaLoreProjector get_galore_param_groups"
    ),
    "meshwright.nn.optimizer.hybrid_adam": f"{_COLOSSALAI}.optimizers: HybridAdam",
    "meshwright.nn.optimizer.lamb": f"{_COLOSSALAI}.optimizers: Lamb",
    "meshwright.nn.optimizer.lars": f"{_COLOSSALAI}.optimizers: Lars",
    "meshwright.optim.eight_bit": "meshwright.optim.eight_bit_adamw",
    "meshwright.optim.manager": f"{_BMTRAIN}.optim_manager",
    "meshwright.optim.offload": "meshwright.optim.offloaded_optimizer",
    "meshwright.optim.optim_manager": f"{_BMTRAIN}.optim_manager",
    "meshwright.param_init": "meshwright: grouped_parameters init_parameters",
    "meshwright.parameter": "meshwright: DistributedParameter ParameterInitializer",
    "meshwright.pipe_layer": "meshwright: PipelineTransformerBlockList",
    "meshwright.planning": "meshwright.planner",
    "meshwright.utils": f"{_BMTRAIN}.utils",
    "meshwright.wrapper": "meshwright: BMTrainModelWrapper",
}

# Documented package -> where names live -> names; ``old=new`` if a name has changed, too.
NAMES = {
    "meshwright": {
        f"{_COLOSSALAI}.environment": "launch_from_openmpi launch_from_slurm",
    },
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
        f"{_BMTRAIN}.parallel_linear": "OpLinear OpParallelLinear ReduceType",
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
    "meshwright.store": {
        f"{_BMTRAIN}.store": "_save_to_rank0 allgather_objects async_save_to_file broadcast_object",
    },
    "meshwright.runtime": {
        f"{_BMTRAIN}.block": "note_gathered=note_gather take_order=take_gather_order",
        f"{_BMTRAIN}.config": "config",
        "meshwright.runtime.agreement": "come_together=wait_for_all_ranks",
    },
}


def install() -> None:
    """Register all aliases; a module is imported only when one of its names is used."""
    alias_modules(MODULES)
    for package, homes in NAMES.items():
        for module, names in homes.items():
            for old, _, new in (name.partition("=") for name in names.split()):
                alias_name(package, old, module, new or old)
