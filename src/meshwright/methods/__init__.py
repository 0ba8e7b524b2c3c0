"""HOW each optimisation is done: one file per method, with config, ``check``, and the twins ``apply`` and ``cost``."""

from meshwright.methods.amp_native import AmpNative
from meshwright.methods.base import Method, Phase
from meshwright.methods.checkpoint import Checkpoint
from meshwright.methods.comm import Comm
from meshwright.methods.composition import Resolved, apply_strategy, cost_of, in_phase_order, resolve
from meshwright.methods.fsdp import Fsdp
from meshwright.methods.half import Half
from meshwright.methods.job import Job
from meshwright.methods.outer import Outer
from meshwright.methods.parallel_mode import ParallelMode
from meshwright.methods.pipeline.cut import Cut
from meshwright.methods.pipeline.engine import PipelineEngine
from meshwright.methods.pipeline_parallel import PipelineParallel
from meshwright.methods.sequence.trace import SequenceTrace
from meshwright.methods.sequence_parallel import SequenceParallel
from meshwright.methods.tensor.calls import SampleRun
from meshwright.methods.tensor_parallel import TensorParallel
from meshwright.methods.zero1 import Zero1
from meshwright.methods.zero2 import Zero2

__all__ = [
    "AmpNative",
    "Checkpoint",
    "Comm",
    "Cut",
    "Fsdp",
    "Half",
    "Job",
    "Method",
    "Outer",
    "ParallelMode",
    "Phase",
    "PipelineEngine",
    "PipelineParallel",
    "Resolved",
    "SampleRun",
    "SequenceParallel",
    "SequenceTrace",
    "TensorParallel",
    "Zero1",
    "Zero2",
    "apply_strategy",
    "cost_of",
    "in_phase_order",
    "resolve",
]
