"""HOW each optimisation is done: one file per method, with config, ``check``, and the twins ``apply`` and ``cost``."""

from typing import TYPE_CHECKING

from meshwright.on_demand import on_demand
from meshwright.strategy import METHOD_CONFIGS

if TYPE_CHECKING:
    from meshwright.methods.abandon import abandon, abandoned_if_it_fails
    from meshwright.methods.amp_native import AmpNative
    from meshwright.methods.base import Method, Phase
    from meshwright.methods.checkpoint import Checkpoint
    from meshwright.methods.comm import Comm
    from meshwright.methods.compatibility import Rule, known_methods, rules
    from meshwright.methods.compile import Compile
    from meshwright.methods.composition import (
        Resolved,
        apply_strategy,
        check_strategy,
        check_units,
        cost_of,
        in_phase_order,
        resolve,
    )
    from meshwright.methods.context.trace import TracedContext
    from meshwright.methods.context_parallel import ContextParallel
    from meshwright.methods.ema import Ema
    from meshwright.methods.expert.trace import ExpertTrace
    from meshwright.methods.expert_parallel import ExpertParallel
    from meshwright.methods.fp8 import Fp8
    from meshwright.methods.fsdp import Fsdp
    from meshwright.methods.grad_clip import GradClip
    from meshwright.methods.gradient_accumulation import GradientAccumulation
    from meshwright.methods.half import Half
    from meshwright.methods.job import SAMPLED, Job
    from meshwright.methods.law import Conflict, Need
    from meshwright.methods.loss_spike import LossSpike
    from meshwright.methods.module_replace import ModuleReplace
    from meshwright.methods.offload import Offload
    from meshwright.methods.outer import Outer
    from meshwright.methods.parallel_mode import ParallelMode
    from meshwright.methods.pipeline.chain import StageOutput
    from meshwright.methods.pipeline.cut import Cut
    from meshwright.methods.pipeline.engine import PipelineEngine
    from meshwright.methods.pipeline_parallel import PipelineParallel
    from meshwright.methods.replace.changes import replacement_of
    from meshwright.methods.replace.pairs import register_replace_pair
    from meshwright.methods.sample import SampleRun
    from meshwright.methods.sequence.trace import TokensTrace, TracedSequence
    from meshwright.methods.sequence_parallel import SequenceParallel
    from meshwright.methods.skip_nonfinite import SkipNonfinite
    from meshwright.methods.tensor_parallel import TensorParallel
    from meshwright.methods.weight_vote import WeightVote
    from meshwright.methods.zero1 import Zero1
    from meshwright.methods.zero2 import Zero2
else:
    on_demand(
        __name__,
        """
        abandon: abandon abandoned_if_it_fails
        amp_native: AmpNative
        base: Method Phase
        checkpoint: Checkpoint
        comm: Comm
        compatibility: Rule known_methods rules
        compile: Compile
        composition: Resolved apply_strategy check_strategy check_units cost_of in_phase_order resolve
        context.trace: TracedContext
        context_parallel: ContextParallel
        ema: Ema
        expert.trace: ExpertTrace
        expert_parallel: ExpertParallel
        fp8: Fp8
        fsdp: Fsdp
        grad_clip: GradClip
        gradient_accumulation: GradientAccumulation
        half: Half
        job: SAMPLED Job
        law: Conflict Need
        loss_spike: LossSpike
        module_replace: ModuleReplace
        offload: Offload
        outer: Outer
        parallel_mode: ParallelMode
        pipeline.chain: StageOutput
        pipeline.cut: Cut
        pipeline.engine: PipelineEngine
        pipeline_parallel: PipelineParallel
        replace.changes: replacement_of
        replace.pairs: register_replace_pair
        sample: SampleRun
        sequence.trace: TokensTrace TracedSequence
        sequence_parallel: SequenceParallel
        skip_nonfinite: SkipNonfinite
        tensor_parallel: TensorParallel
        weight_vote: WeightVote
        zero1: Zero1
        zero2: Zero2
        """,
    )

# One file each, which is imported when its method is first looked up.
for _name in (
    "amp_native",
    "checkpoint",
    "comm",
    "compile",
    "context_parallel",
    "ema",
    "expert_parallel",
    "fp8",
    "fsdp",
    "grad_clip",
    "gradient_accumulation",
    "half",
    "loss_spike",
    "mixed_parallel",
    "module_replace",
    "offload",
    "outer",
    "parallel_mode",
    "pipeline_parallel",
    "sequence_parallel",
    "skip_nonfinite",
    "tensor_parallel",
    "weight_vote",
    "zero1",
    "zero2",
):
    METHOD_CONFIGS.announce(f"{__name__}.{_name}", _name)
METHOD_CONFIGS.announce(f"{__name__}.mixed_parallel", "ds_3d_parallel", "deepspeed_3d_parallel")

__all__ = [
    "SAMPLED",
    "AmpNative",
    "Checkpoint",
    "Comm",
    "Compile",
    "Conflict",
    "ContextParallel",
    "Cut",
    "Ema",
    "ExpertParallel",
    "ExpertTrace",
    "Fp8",
    "Fsdp",
    "GradClip",
    "GradientAccumulation",
    "Half",
    "Job",
    "LossSpike",
    "Method",
    "ModuleReplace",
    "Need",
    "Offload",
    "Outer",
    "ParallelMode",
    "Phase",
    "PipelineEngine",
    "PipelineParallel",
    "Resolved",
    "Rule",
    "SampleRun",
    "SequenceParallel",
    "SkipNonfinite",
    "StageOutput",
    "TensorParallel",
    "TokensTrace",
    "TracedContext",
    "TracedSequence",
    "WeightVote",
    "Zero1",
    "Zero2",
    "abandon",
    "abandoned_if_it_fails",
    "apply_strategy",
    "check_strategy",
    "check_units",
    "cost_of",
    "in_phase_order",
    "known_methods",
    "register_replace_pair",
    "replacement_of",
    "resolve",
    "rules",
]
