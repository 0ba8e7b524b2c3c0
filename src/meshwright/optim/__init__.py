"""Optimizers and their parts: right on any layout; one loss scale for many; exact gradient norms; guards of a step."""

from typing import TYPE_CHECKING

from meshwright.on_demand import on_demand

if TYPE_CHECKING:
    from meshwright.optim.adafactor import Adafactor, DistributedAdaFactor
    from meshwright.optim.adam import AdamOffloadOptimizer, AdamOptimizer
    from meshwright.optim.came import CAME, DistributedCAME
    from meshwright.optim.clip import Stages, clip_grad_norm_, clip_grad_value_, local_tensor, total_norm
    from meshwright.optim.clipped_step import clipped_step
    from meshwright.optim.closures import check_steps_alone
    from meshwright.optim.distributed_names import cast_to_distributed
    from meshwright.optim.eight_bit import AdamW8bit
    from meshwright.optim.ema import EmaPolicy, WeightAverage
    from meshwright.optim.galore import (
        DistGaloreAdamW,
        DistGaloreAwamW,
        GaLoreAdafactor,
        GaLoreAdamW,
        GaLoreAdamW8bit,
        get_galore_param_groups,
    )
    from meshwright.optim.guarded import GuardedOptimizer
    from meshwright.optim.held import Held, tell_held
    from meshwright.optim.lamb import DistributedLamb, Lamb
    from meshwright.optim.layouts import step_by_layouts
    from meshwright.optim.local_step import step_on_local_tensors
    from meshwright.optim.loss_scaler import LossScaler
    from meshwright.optim.manager import OptimManager
    from meshwright.optim.master import MasterWeights
    from meshwright.optim.muon import Muon, muon_param_groups
    from meshwright.optim.offload import Disk, HostWeights, OffloadedOptimizer, copies_for
    from meshwright.optim.outer import (
        BMUF,
        DiLoCo,
        LocalSGD,
        OuterOptimizer,
        OuterPolicy,
        PostLocalSGD,
        SlowMo,
        StreamingDiLoCo,
    )
    from meshwright.optim.sharded import ShardedOptimizer
    from meshwright.optim.spikes import SpikeAction, SpikePolicy, SpikeWatch, spike_watch_of, watch_spikes
    from meshwright.optim.wrapped import average_of, inner_optimizer
    from meshwright.optim.wrappers import clip_gradient_values, clip_gradients, guard_of
else:
    on_demand(
        __name__,
        """
        adafactor: Adafactor DistributedAdaFactor
        adam: AdamOffloadOptimizer AdamOptimizer
        came: CAME DistributedCAME
        clip: Stages clip_grad_norm_ clip_grad_value_ local_tensor total_norm
        clipped_step: clipped_step
        closures: check_steps_alone
        distributed_names: cast_to_distributed
        eight_bit: AdamW8bit
        ema: EmaPolicy WeightAverage
        galore: DistGaloreAdamW DistGaloreAwamW GaLoreAdafactor GaLoreAdamW GaLoreAdamW8bit
        galore: get_galore_param_groups
        guarded: GuardedOptimizer
        held: Held tell_held
        lamb: DistributedLamb Lamb
        layouts: step_by_layouts
        local_step: step_on_local_tensors
        loss_scaler: LossScaler
        manager: OptimManager
        master: MasterWeights
        muon: Muon muon_param_groups
        offload: Disk HostWeights OffloadedOptimizer copies_for
        outer: BMUF DiLoCo LocalSGD OuterOptimizer OuterPolicy PostLocalSGD SlowMo StreamingDiLoCo
        sharded: ShardedOptimizer
        spikes: SpikeAction SpikePolicy SpikeWatch spike_watch_of watch_spikes
        wrapped: average_of inner_optimizer
        wrappers: clip_gradient_values clip_gradients guard_of
        """,
    )

__all__ = [
    "BMUF",
    "CAME",
    "Adafactor",
    "AdamOffloadOptimizer",
    "AdamOptimizer",
    "AdamW8bit",
    "DiLoCo",
    "Disk",
    "DistGaloreAdamW",
    "DistGaloreAwamW",
    "DistributedAdaFactor",
    "DistributedCAME",
    "DistributedLamb",
    "EmaPolicy",
    "GaLoreAdafactor",
    "GaLoreAdamW",
    "GaLoreAdamW8bit",
    "GuardedOptimizer",
    "Held",
    "HostWeights",
    "Lamb",
    "LocalSGD",
    "LossScaler",
    "MasterWeights",
    "Muon",
    "OffloadedOptimizer",
    "OptimManager",
    "OuterOptimizer",
    "OuterPolicy",
    "PostLocalSGD",
    "ShardedOptimizer",
    "SlowMo",
    "SpikeAction",
    "SpikePolicy",
    "SpikeWatch",
    "Stages",
    "StreamingDiLoCo",
    "WeightAverage",
    "average_of",
    "cast_to_distributed",
    "check_steps_alone",
    "clip_grad_norm_",
    "clip_grad_value_",
    "clip_gradient_values",
    "clip_gradients",
    "clipped_step",
    "copies_for",
    "get_galore_param_groups",
    "guard_of",
    "inner_optimizer",
    "local_tensor",
    "muon_param_groups",
    "spike_watch_of",
    "step_by_layouts",
    "step_on_local_tensors",
    "tell_held",
    "total_norm",
    "watch_spikes",
]
