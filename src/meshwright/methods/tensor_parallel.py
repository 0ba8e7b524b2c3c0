"""``tensor_parallel``: single layers are split over the mesh axis ``tensor``. Seed: ATorch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator
from torch import nn

from meshwright.cost import Block, Parameter, Step, Traffic
from meshwright.errors import StrategyError
from meshwright.methods.base import Method, Phase
from meshwright.methods.job import Job
from meshwright.methods.tensor_checks import check_layers
from meshwright.methods.tensor_engine import split_layers
from meshwright.methods.tensor_plan import PlannedLayer, planned_layers
from meshwright.methods.tensor_trace import SplitTrace

AXIS = "tensor"

# What ATorch asks to trace and to solve for; the plan says it all.
_REFUSED = ("shard_planner", "tp_ranks", "replacement_map", "leaf_modules", "prop_mode", "use_fake_mode",
            "tracer_backend")  # fmt: skip


def _pairs(value: Any) -> Any:
    return tuple(sorted(value.items())) if isinstance(value, Mapping) else value


class TensorParallel(Method):
    """Splits linear layers in pairs, by columns and by rows, and the vocabulary (Shoeybi et al. 2019, §3).

    A transformers model brings its own plan. The ranks of a tensor group take the same samples.

    Config: None, or ``{"plan": {name pattern: style}}`` for a model without a plan, or to override entries of its own.
    ``*`` in a pattern stands for one part of a name. Styles: ``colwise``, ``colwise_gather_output``, ``rowwise``,
    ``rowwise_split_input``, ``embedding_rowwise``, ``replicated_with_grad_allreduce``, ``replicate``.
    """

    method_name: ClassVar[str] = "tensor_parallel"
    phase: ClassVar[Phase] = Phase.TENSOR
    summary: ClassVar[str] = "splits the layers themselves over the tensor axis, by the model's own plan"

    plan: Annotated[tuple[tuple[str, str], ...], BeforeValidator(_pairs)] = ()

    @classmethod
    def normalised(cls, keys: dict[str, Any]) -> dict[str, Any]:
        """Refuses the keys of ATorch's planner."""
        for key in _REFUSED:
            if key in keys:
                raise StrategyError(
                    f"tensor_parallel: {key!r} configures ATorch's tracer, which there is none of here",
                    expected="plan, or nothing",
                    got=f"{key}={keys[key]!r}",
                    fix="leave it out; the number of ranks is the size of the axis 'tensor' in parallel_mode",
                )
        return keys

    def text_arguments(self) -> dict[str, Any]:
        """Prints the plan as a dictionary."""
        return {"plan": dict(self.plan)} if self.plan else {}

    def layers(self, model: nn.Module, ranks: int) -> list[PlannedLayer]:
        """The layers that it splits over ``ranks`` ranks.

        Raises:
            ModelError: When there is no plan, or the model cannot be split by it.
            StrategyError: When the config's plan names nothing in the model.
        """
        found = planned_layers(model, dict(self.plan))
        check_layers(model, found, ranks)
        return found

    def trace(self, model: nn.Module, ranks: int) -> SplitTrace | None:
        """What predictions need to run the model as one of ``ranks`` ranks; None when nothing is split."""
        return SplitTrace(self.layers(model, ranks), ranks) if ranks > 1 else None

    def check(self, job: Job) -> None:
        """Refuses models without a plan, and plans that the model or the axis cannot follow."""
        self.layers(job.model, job.size(AXIS))

    def apply(self, job: Job) -> None:
        """Splits the layers; the rest of the model stays whole on every rank."""
        if job.size(AXIS) == 1:
            return
        # One pipeline rank's part may lack what the plan names: check has seen the whole model.
        layers = planned_layers(job.model, dict(self.plan), is_part=job.pipeline is not None)
        split_layers(job.model, layers, job.require_mesh()[AXIS], job.device, sync=job.pipeline is None)
        job.is_split = True
        if job.shard_axis is None:
            job.model.to(job.device)

    def cost(self, step: Step) -> Step:
        """A rank's part of the parameters, with all that belongs to them, and the collectives at the boundaries."""
        ranks = step.size(AXIS)
        if ranks == 1:
            return step
        step = step.replace(blocks=tuple(_divided(block, ranks) for block in step.blocks))
        sent: dict[Any, int] = {}
        for boundary in step.boundaries:
            key = boundary.kind, boundary.moment
            sent[key] = sent.get(key, 0) + boundary.num_bytes * step.num_micro_batches
        return step.send(*(Traffic(kind, AXIS, size, moment) for (kind, moment), size in sent.items()))


def _divided(block: Block, ranks: int) -> Block:
    return dataclasses.replace(block, parameters=tuple(_part(parameter, ranks) for parameter in block.parameters))


def _part(parameter: Parameter, ranks: int) -> Parameter:
    dim = parameter.tensor_dim
    shape = tuple(size // ranks if d == dim else size for d, size in enumerate(parameter.shape))
    return dataclasses.replace(parameter, shape=shape)
