"""``expert_parallel``: the experts of every layer are divided over the mesh axis ``expert``; tokens travel to them."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from torch import nn

from meshwright.cost import Block, Parameter, Step, send_boundaries
from meshwright.methods.base import Method, Phase
from meshwright.methods.expert.engine import divide
from meshwright.methods.expert.layers import ExpertLayer, ListedExperts, expert_layers
from meshwright.methods.expert.proof import prove
from meshwright.methods.expert.trace import ExpertTrace
from meshwright.methods.job import Job
from meshwright.methods.law import SHARDING, Conflict
from meshwright.runtime import check_equal

AXIS: Literal["expert"] = "expert"
_WHOLE = "this version sends tokens between ranks that hold all other layers whole"
_OTHER_SAMPLES = "this version sends tokens between ranks that take different samples"


class ExpertParallel(Method):
    """Each rank along the axis ``expert`` holds an equal part of every layer's experts (GShard: Lepikhin et al. 2020).

    The ranks take different samples, as data-parallel ranks do. An all-to-all sends tokens to the ranks of their
    experts, which compute with the layer's own code; another sends the answers back, where they are multiplied by the
    router's weights. No token is dropped.

    Stacked experts (transformers': Mixtral, Qwen-MoE, DeepSeek, …) are found by structure; lists of experts that a
    plain block loops over by "expert" in the list's name, or by ``experts``. A layer is tried out in parts before it is
    divided, where a block takes one tensor.

    Config: None, or ``{"experts": ["blocks.*.moe.units"]}`` to name the modules that hold experts.
    """

    method_name: ClassVar[str] = "expert_parallel"
    phase: ClassVar[Phase] = Phase.TENSOR
    summary: ClassVar[str] = "divides experts over the expert axis; tokens are sent to them and back"
    effect: ClassVar[str] = "memory: experts / n. Communication: two all-to-alls of tokens per layer and pass"
    seed_name: ClassVar[str | None] = "ColossalAI: ep_size"
    axis: ClassVar[str | None] = AXIS
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        *(
            Conflict(
                other=name,
                reason=reason,
                fix="use zero1, zero2 or fsdp, over zero or the expert axis itself, to lower a rank's memory",
            )
            for name, reason in {
                "tensor_parallel": _WHOLE,
                "pipeline_parallel": _WHOLE,
                "sequence_parallel": _OTHER_SAMPLES,
                "context_parallel": _OTHER_SAMPLES,
                "outer": "this version does not synchronise experts between replicas",
            }.items()
        ),
        *(
            Conflict(
                other=name,
                reason="gradients of what they leave out are averaged over all ranks, and those of experts are not",
                fix="leave these keys out",
                when=lambda own, other: bool(other.atorch_ignored_cls) or other.wrap_trainable_outmost,
                other_keys="atorch_ignored_cls or wrap_trainable_outmost",
            )
            for name in SHARDING
        ),
    )

    experts: tuple[str, ...] = ()

    def trace(self, model: nn.Module, ranks: int) -> ExpertTrace:
        """What predictions need to run the model as one of ``ranks`` ranks."""
        return ExpertTrace(model, expert_layers(model, self.experts, ranks), ranks)

    def check(self, job: Job) -> None:
        """Refuses models whose experts cannot be divided."""
        if job.size(AXIS) == 1:
            return
        layers = expert_layers(job.model, self.experts, job.size(AXIS))
        # Kept: trying out takes time.
        job.expert_layers = [(layer, _features(layer, job)) for layer in layers]

    def apply(self, job: Job) -> None:
        """Divides the experts; the rest of the model stays whole on every rank."""
        if job.size(AXIS) == 1:
            return
        said = _summary(job)
        check_equal("The division of the experts", said, "give every rank the same model")
        job.notices.append(said)
        job.experts = divide(job.model, job.expert_layers, job.require_mesh()[AXIS], job.device)
        job.expert_layers = []  # they would keep the experts of other ranks
        job.is_split = True
        if job.shard_axis is None:
            job.model.to(job.device)

    def cost(self, step: Step) -> Step:
        """A rank's part of the experts, and what is exchanged where every expert is sent as many tokens as any other.

        Real bytes are those in the mean over the ranks; a rank whose experts are liked receives more.
        """
        ranks = step.size(AXIS)
        if ranks == 1:
            return step
        step = step.replace(blocks=tuple(_divided(block, step, ranks) for block in step.blocks))
        return send_boundaries(step, AXIS)


def _features(layer: ExpertLayer, job: Job) -> int | None:
    proved = prove(layer, job.size(AXIS))
    if proved is None and isinstance(layer, ListedExperts):
        job.notices.append(f"expert_parallel: {layer.path} was not tried out in parts: it takes more than one tensor")
    return proved[0] if proved is not None else None


def _summary(job: Job) -> str:
    sizes = {name: parameter.numel() for name, parameter in job.model.named_parameters()}
    inside = sum(sizes[name] for layer, _ in job.expert_layers for name, _ in layer.names())
    counts = sorted({layer.num_experts for layer, _ in job.expert_layers})
    return (
        f"expert_parallel divides {100 * inside / sum(sizes.values()):.0f}% of the parameters over {job.size(AXIS)} "
        f"ranks: {' or '.join(map(str, counts))} experts in each of {len(job.expert_layers)} layers"
    )


def _divided(block: Block, step: Step, ranks: int) -> Block:
    parts = (_part(parameter, step, ranks) for parameter in block.parameters)
    return dataclasses.replace(block, parameters=tuple(part for part in parts if part is not None))


def _part(parameter: Parameter, step: Step, ranks: int) -> Parameter | None:
    """What the first rank of the axis holds; None: nothing. Experts of a list are equal, so others hold as much."""
    if parameter.expert is None:
        return parameter
    number, experts = parameter.expert
    if number is not None and number >= experts // ranks:
        return None
    shape = parameter.shape if number is not None else (parameter.shape[0] // ranks, *parameter.shape[1:])
    # Ranks along the axis hold different experts: there is nobody to shard them over, where it is the only one.
    return dataclasses.replace(parameter, shape=shape, sharded=step.shard_axis != AXIS)
