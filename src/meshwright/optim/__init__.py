"""Optimizers and their parts: right on any layout; one loss scale for many; exact gradient norms; guards of a step."""

from typing import TYPE_CHECKING

from meshwright.runtime.lazy import lazy_exports

if TYPE_CHECKING:
    from meshwright.optim.adafactor import Adafactor as Adafactor
    from meshwright.optim.adam.adam_optimizer import (
        AdamOffloadOptimizer as AdamOffloadOptimizer,
        AdamOptimizer as AdamOptimizer,
    )
    from meshwright.optim.came import CAME as CAME
    from meshwright.optim.dtensors import (
        CUTTABLE as CUTTABLE,
        ParameterPlacement as ParameterPlacement,
        Stages as Stages,
        check_steps_alone as check_steps_alone,
        clip_grad_norm_ as clip_grad_norm_,
        clip_grad_value_ as clip_grad_value_,
        fused_where_possible as fused_where_possible,
        local_tensor as local_tensor,
        set_placement as set_placement,
        step_by_layouts as step_by_layouts,
        step_on_local_tensors as step_on_local_tensors,
        total_norm as total_norm,
    )
    from meshwright.optim.eight_bit_adamw import (
        QUANTISATION as QUANTISATION,
        AdamW8bit as AdamW8bit,
        MomentAdamW as MomentAdamW,
    )
    from meshwright.optim.eight_bit_moments import variant_of_moments as variant_of_moments
    from meshwright.optim.galore import (
        GaLoreAdafactor as GaLoreAdafactor,
        GaLoreAdamW as GaLoreAdamW,
        GaLoreAdamW8bit as GaLoreAdamW8bit,
        get_galore_param_groups as get_galore_param_groups,
    )
    from meshwright.optim.guarded_step import (
        GuardedOptimizer as GuardedOptimizer,
        average_of as average_of,
        clip_gradient_values as clip_gradient_values,
        clip_gradients as clip_gradients,
        clipped_step as clipped_step,
        guard_of as guard_of,
        inner_optimizer as inner_optimizer,
        spike_watch_of as spike_watch_of,
    )
    from meshwright.optim.lamb import Lamb as Lamb
    from meshwright.optim.loss_spikes import (
        SpikeAction as SpikeAction,
        SpikePolicy as SpikePolicy,
        SpikeWatch as SpikeWatch,
        judge_loss as judge_loss,
        watch_spikes as watch_spikes,
    )
    from meshwright.optim.mixed_precision import LossScaler as LossScaler, MasterWeights as MasterWeights
    from meshwright.optim.muon import Muon as Muon, muon_param_groups as muon_param_groups
    from meshwright.optim.offload_storage import Copies as Copies, Disk as Disk, copies_for as copies_for
    from meshwright.optim.offloaded_optimizer import (
        HostWeights as HostWeights,
        OffloadedOptimizer as OffloadedOptimizer,
    )
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
    from meshwright.optim.sharded.sharded_optimizer import ShardedOptimizer as ShardedOptimizer
    from meshwright.optim.visiting_states import (
        BUCKETS_UNDER_WAY as BUCKETS_UNDER_WAY,
        VISITING_BUCKET_BYTES as VISITING_BUCKET_BYTES,
    )
    from meshwright.optim.weight_average import EmaPolicy as EmaPolicy, WeightAverage as WeightAverage
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
