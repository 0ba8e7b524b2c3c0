"""``tensor_parallel``: single layers are split over the mesh axis ``tensor``. Seed: ATorch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final

from pydantic import BeforeValidator
from torch import nn

from meshwright.cost import Block, Parameter, Step, send_boundaries
from meshwright.errors import StrategyError
from meshwright.methods.base import Method, Phase
from meshwright.methods.job import Job
from meshwright.methods.law import Conflict
from meshwright.methods.sample import SampleRun
from meshwright.methods.tensor.engine import split_layers
from meshwright.methods.tensor.exchange import TensorAxis
from meshwright.methods.tensor.plan import PlannedLayer
from meshwright.methods.tensor.split import Split, split_of
from meshwright.methods.tensor.trace import SplitTrace
from meshwright.runtime import check_equal

AXIS: Final = "tensor"

# What ATorch asks to trace and to solve for; the plan says it all.
_REFUSED = ("shard_planner", "tp_ranks", "replacement_map", "leaf_modules", "prop_mode", "use_fake_mode",
            "tracer_backend")  # fmt: skip


def _pairs(value: Any) -> Any:
    return tuple(sorted(value.items())) if isinstance(value, Mapping) else value


class TensorParallel(Method):
    """Splits linear layers in pairs, by columns and by rows, and the vocabulary (Shoeybi et al. 2019, §3).

    A plan says which layers: the model's own (transformers' ``base_model_tp_plan``), or one found in the data flow of
    its blocks and proved on each kind of block. The ranks of a tensor group take the same samples.

    Config: None, or ``{"plan": {name pattern: style}}`` to give a plan, or to override entries of the model's own.
    ``*`` in a pattern stands for one part of a name. Styles: ``colwise``, ``colwise_gather_output``, ``rowwise``,
    ``rowwise_split_input``, ``embedding_rowwise``, ``embedding_colwise``, ``vocabulary_head``,
    ``replicated_with_grad_allreduce``, ``replicate``. ``"sequence": True`` lets each rank keep a part of the tokens
    between the split layers of blocks (Korthikanti et al. 2022).
    """

    method_name: ClassVar[str] = "tensor_parallel"
    phase: ClassVar[Phase] = Phase.TENSOR
    summary: ClassVar[str] = "splits the layers themselves over the tensor axis"
    effect: ClassVar[str] = (
        "memory: split layers / n. Time: products / n. Communication: an all-reduce of activations per pair and pass"
    )
    seed_name: ClassVar[str | None] = "ATorch: tensor_parallel"
    axis: ClassVar[str | None] = AXIS
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            other="pipeline_parallel",
            reason="stages hand all tokens on",
            fix="leave sequence out, or use the axes tensor, data and zero",
            when=lambda own, other: own.sequence,
            own_keys="sequence=True",
        ),
        *(
            Conflict(
                other=name,
                reason="both cut the tokens",
                fix="leave sequence=True out: between the layers a rank has a part of the tokens without it",
                when=lambda own, other: own.sequence,
                own_keys="sequence=True",
            )
            for name in ("sequence_parallel", "context_parallel")
        ),
    )

    sequence: bool = False
    plan: Annotated[tuple[tuple[str, str], ...], BeforeValidator(_pairs)] = ()

    @classmethod
    def normalised(cls, keys: dict[str, Any]) -> dict[str, Any]:
        """Refuses the keys of ATorch's planner."""
        for key in _REFUSED:
            if keys.get(key) is not None:
                raise StrategyError(
                    f"tensor_parallel: {key!r} configures ATorch's tracer, which there is none of here",
                    expected="plan, or nothing",
                    got=f"{key}={keys[key]!r}",
                    fix="leave it out; the number of ranks is the size of the axis 'tensor' in parallel_mode",
                )
            keys.pop(key, None)
        return keys

    def text_arguments(self) -> dict[str, Any]:
        """Prints the plan as a dictionary."""
        plan = {"plan": dict(self.plan)} if self.plan else {}
        return plan | ({"sequence": True} if self.sequence else {})

    def split(self, model: nn.Module, ranks: int, sample: SampleRun | None = None) -> Split:
        """How it divides a model over ``ranks`` ranks; nothing is changed.

        Args:
            model: A plain module.
            ranks: Size of the axis.
            sample: Runs a model that brings no plan, to find one in its data flow.

        Raises:
            ModelError: When the model cannot be split, with the reason.
            StrategyError: When the config's plan names nothing in the model.
        """
        return split_of(model, dict(self.plan), ranks, sample, sequence=self.sequence)

    def layers(self, model: nn.Module, ranks: int, sample: SampleRun | None = None) -> list[PlannedLayer]:
        """The layers of :meth:`split`."""
        return list(self.split(model, ranks, sample).layers)

    def trace(self, model: nn.Module, ranks: int, sample: SampleRun | None = None) -> SplitTrace | None:
        """What predictions need to run the model as one of ``ranks`` ranks; None when nothing is split."""
        return SplitTrace(model, self.split(model, ranks, sample), ranks) if ranks > 1 else None

    def check(self, job: Job) -> None:
        """Refuses models that cannot be split, and plans that the model or the axis cannot follow."""
        if job.size(AXIS) > 1 or self.plan:
            split = self.split(job.model, job.size(AXIS), job.sample)
            # Kept, since a pipeline will leave this rank with a part of the model.
            job.split = split, split.summary(job.model, job.size(AXIS))

    def apply(self, job: Job) -> None:
        """Splits the layers; the rest of the model stays whole on every rank."""
        if job.size(AXIS) == 1:
            return
        assert job.split is not None, "check has found it"
        split, said = job.split
        if job.pipeline is not None:
            split = split.of_part(job.model)
        check_equal("The split of the layers", said, "give every rank the same model and the same kind of samples")
        job.notices.append(said)
        axis = TensorAxis(job.require_mesh()[AXIS])
        split_layers(job.model, split, axis, job.device, sync=job.pipeline is None)
        split.adjust(job.model)
        job.split = None  # it would keep the blocks of other pipeline ranks
        job.is_split = True
        if job.shard_axis is None:
            job.model.to(job.device)

    def cost(self, step: Step) -> Step:
        """A rank's part of the parameters, with all that belongs to them, and the collectives at the boundaries."""
        ranks = step.size(AXIS)
        if ranks == 1:
            return step
        step = step.replace(blocks=tuple(_divided(block, ranks) for block in step.blocks))
        return send_boundaries(step, AXIS)


def _divided(block: Block, ranks: int) -> Block:
    return dataclasses.replace(block, parameters=tuple(_part(parameter, ranks) for parameter in block.parameters))


def _part(parameter: Parameter, ranks: int) -> Parameter:
    dim = parameter.tensor_dim
    shape = tuple(size // ranks if d == dim else size for d, size in enumerate(parameter.shape))
    return dataclasses.replace(parameter, shape=shape)
