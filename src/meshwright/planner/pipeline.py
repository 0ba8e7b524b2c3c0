"""Deciding where a pipeline axis cuts a model, and the simulated step of each of its ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import nn

from meshwright.cost import Stages, Step
from meshwright.errors import MeshwrightError
from meshwright.methods import Cut, PipelineParallel
from meshwright.methods.pipeline.trace import Dataflow, trace_blocks
from meshwright.strategy import Strategy

_SAMPLES = 2  # that a model is traced with: one alone is no batch for a BatchNorm


def decide_cut(
    method: PipelineParallel,
    ranks: int,
    model: nn.Module,
    inputs_of: Callable[[int], Any],
    forward: Callable[[nn.Module, Any], Any],
    micro_batches: int,
) -> tuple[Cut, tuple[str, ...]]:
    """Decides the cut, after a pass without data that tells which stage needs what outside the blocks.

    Returns:
        The cut, and what could not be found out.

    Raises:
        ModelError, StrategyError: When the model cannot be cut so.
    """
    blocks = method.blocks_of(model)
    method.check_numbers(len(blocks), ranks, micro_batches)
    flow: Dataflow | None = None
    gap: tuple[str, ...] = ()
    try:
        inputs = inputs_of(_SAMPLES)
        flow = trace_blocks(model, blocks, inputs, forward) if inputs is not None else None
        reason = "there is no sample to trace the model with; pass sample_batch"
    except MeshwrightError:
        raise
    except Exception as error:  # a user's model may do anything; it trains without this too
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if flow is None:
        gap = (f"every pipeline rank keeps all parameters outside the blocks: {reason}",)
    else:
        flow.boundary_bytes //= _SAMPLES
    return method.cut(model, ranks, flow), gap


def by_pipeline_rank(step: Step, cut: Cut | None, samples: int, *, in_half: bool) -> list[Step]:
    """The step of every rank of the pipeline axis, before any method; the step itself where there is none.

    Args:
        step: Of the whole model.
        cut: Where it is cut.
        samples: In a micro-batch.
        in_half: Whether the model computes with parameters in half precision: its hidden states follow.
    """
    if cut is None:
        return [step]
    placed = [dataclasses.replace(each, on_ranks=cut.ranks_running(each.path)) for each in step.boundaries]
    step = step.replace(boundaries=tuple(placed))
    hidden = None
    if cut.boundary_bytes is not None:
        parts = step.size("sequence") * step.size("context")  # of the tokens, of which a rank's blocks hand on one
        hidden = cut.boundary_bytes * samples // ((2 if in_half else 1) * parts)
    return [step.replace(stages=Stages(cut.ranks, cut.sizes, rank, hidden)) for rank in range(cut.num_ranks)]


def num_micro_batches(strategy: Strategy, given: int) -> int:
    """The method's own number, or what ``accelerate`` was given."""
    method = strategy.get("pipeline_parallel")
    own = method.num_micro_batches if isinstance(method, PipelineParallel) else None
    return own or given
