"""HOW each optimisation is done: one file per method, with config, ``check``, and the twins ``apply`` and ``cost``."""

from typing import TYPE_CHECKING

from meshwright.runtime.lazy import lazy_exports
from meshwright.strategy import METHOD_CONFIGS

if TYPE_CHECKING:
    from meshwright.methods.base import Conflict as Conflict, Method as Method, Need as Need, Phase as Phase
    from meshwright.methods.checkpoint import Checkpoint as Checkpoint
    from meshwright.methods.comm import Comm as Comm
    from meshwright.methods.compile import Compile as Compile
    from meshwright.methods.composition import (
        Resolved as Resolved,
        Rule as Rule,
        StepCut as StepCut,
        apply_strategy as apply_strategy,
        axes_that_divide as axes_that_divide,
        besides_mesh as besides_mesh,
        check_strategy as check_strategy,
        check_units as check_units,
        cost_of as cost_of,
        cut_step as cut_step,
        find_method as find_method,
        in_phase_order as in_phase_order,
        known_methods as known_methods,
        mesh_method as mesh_method,
        method_of_axes as method_of_axes,
        methods_for as methods_for,
        num_micro_batches as num_micro_batches,
        replacement_of as replacement_of,
        resolve as resolve,
        rules as rules,
        with_micro_batches as with_micro_batches,
    )
    from meshwright.methods.expert.expert_parallel import ExpertParallel as ExpertParallel, ExpertTrace as ExpertTrace
    from meshwright.methods.fp8 import Fp8 as Fp8
    from meshwright.methods.half_precision import (
        AmpNative as AmpNative,
        Half as Half,
        mixed_precision as mixed_precision,
    )
    from meshwright.methods.job import (
        SAMPLED as SAMPLED,
        Job as Job,
        abandon as abandon,
        abandoned_if_it_fails as abandoned_if_it_fails,
    )
    from meshwright.methods.offload import Offload as Offload
    from meshwright.methods.optimizer_step import (
        Ema as Ema,
        GradClip as GradClip,
        GradientAccumulation as GradientAccumulation,
        LossSpike as LossSpike,
        SkipNonfinite as SkipNonfinite,
    )
    from meshwright.methods.outer import Outer as Outer
    from meshwright.methods.parallel_mode import ParallelMode as ParallelMode
    from meshwright.methods.pipeline.chain import StageOutput as StageOutput
    from meshwright.methods.pipeline.execution import PipelineEngine as PipelineEngine
    from meshwright.methods.pipeline.pipeline_parallel import PipelineParallel as PipelineParallel
    from meshwright.methods.pipeline.stage_cut import Cut as Cut
    from meshwright.methods.planner_hooks import Role as Role, SearchScope as SearchScope
    from meshwright.methods.replace.module_replace import ModuleReplace as ModuleReplace
    from meshwright.methods.replace.user_pairs import register_replace_pair as register_replace_pair
    from meshwright.methods.tensor.block_trials import SampleRun as SampleRun
    from meshwright.methods.tensor.tensor_parallel import TensorParallel as TensorParallel
    from meshwright.methods.tokens.context_parallel import (
        ContextParallel as ContextParallel,
        TracedContext as TracedContext,
    )
    from meshwright.methods.tokens.sequence_parallel import (
        SequenceParallel as SequenceParallel,
        TokensTrace as TokensTrace,
        TracedSequence as TracedSequence,
    )
    from meshwright.methods.weight_vote import WeightVote as WeightVote
    from meshwright.methods.zero import Fsdp as Fsdp, Zero1 as Zero1, Zero2 as Zero2
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)

# Where each method lives; the module is imported when the method is first looked up.
_HOMES = {
    "amp_native": "half_precision",
    "checkpoint": "checkpoint",
    "comm": "comm",
    "compile": "compile",
    "context_parallel": "tokens.context_parallel",
    "ema": "optimizer_step",
    "expert_parallel": "expert.expert_parallel",
    "fp8": "fp8",
    "fsdp": "zero",
    "grad_clip": "optimizer_step",
    "gradient_accumulation": "optimizer_step",
    "half": "half_precision",
    "loss_spike": "optimizer_step",
    "mixed_parallel": "mixed_parallel",
    "module_replace": "replace.module_replace",
    "offload": "offload",
    "outer": "outer",
    "parallel_mode": "parallel_mode",
    "pipeline_parallel": "pipeline.pipeline_parallel",
    "sequence_parallel": "tokens.sequence_parallel",
    "skip_nonfinite": "optimizer_step",
    "tensor_parallel": "tensor.tensor_parallel",
    "weight_vote": "weight_vote",
    "zero1": "zero",
    "zero2": "zero",
    "ds_3d_parallel": "mixed_parallel",
    "deepspeed_3d_parallel": "mixed_parallel",
}
for _name, _module in _HOMES.items():
    METHOD_CONFIGS.announce(f"{__name__}.{_module}", _name)
