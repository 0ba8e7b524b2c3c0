"""Well-known families by shape: GPT, Llama and Mixtral as a simulated step, without a model."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from meshwright.cost import Activations, Block, Boundary, Placed, RecomputePart, Stages, Step
from meshwright.errors import ModelError
from meshwright.planner.family_ops import FamilyRun, block_ops, block_saved, outside_ops, outside_saved, parts
from meshwright.planner.family_shape import BLOCK, Shape, inside_parameters, outside_parameters


def family_step(
    shape: Shape,
    run: FamilyRun,
    axes: Sequence[tuple[str, int]] = (),
    *,
    shard_axis: str | None = None,
    stages_per_rank: int = 1,
) -> list[Step]:
    """The simulated step of a family before any method: one, or one for each rank of a pipeline axis.

    Args:
        shape: The model.
        run: Samples, precision and kernels.
        axes: The mesh, innermost first.
        shard_axis: What a ZeRO method will shard over.
        stages_per_rank: Of a pipeline.

    Raises:
        ModelError: When an axis divides what cannot be divided.
    """
    sizes = dict(axes)
    tensor, pipeline, stages = sizes.get("tensor", 1), sizes.get("pipeline", 1), stages_per_rank
    _check(shape, tensor, pipeline * stages, run)
    run = dataclasses.replace(run, tensor=tensor, sequence=sizes.get("sequence", run.sequence))
    counts = _stage_sizes(shape, pipeline * stages, balanced=run.balances_head)
    on_ranks = tuple(sum(counts[rank::pipeline]) for rank in range(pipeline)) if pipeline > 1 else ()
    inside = Block(BLOCK, shape.layers, inside_parameters(shape), on_ranks, block_ops(shape, run))
    outside = Block("outside", 1, outside_parameters(shape, pipeline), (), outside_ops(shape, run, pipeline))
    saved, behind = block_saved(shape, run), outside_saved(shape, run)
    step = Step(
        blocks=(inside, outside),
        axes=tuple(axes),
        shard_axis=shard_axis,
        num_micro_batches=run.num_micro_batches,
        activations=Activations(
            saved_bytes=shape.layers * saved + behind.saved_bytes,
            parts=tuple(_in_blocks(part, shape) for part in parts(shape, run)),
            block_classes=(BLOCK,),
            loss_bytes=behind.loss_bytes,
            outside_bytes=behind.saved_bytes,
            saved_at=_placed(shape, saved, behind.saved_bytes),
            flops_at=_placed(shape, 3 * sum(op.flops for op in inside.ops), 3 * sum(op.flops for op in outside.ops)),
        ),
        flops=3 * (shape.layers * sum(op.flops for op in inside.ops) + sum(op.flops for op in outside.ops)),
        boundaries=_boundaries(shape, run, pipeline),
    )
    if pipeline == 1:
        return [step]
    ranks, bounds = tuple(range(pipeline)) * stages, (0, *itertools.accumulate(counts))
    ranges, hidden = tuple(itertools.pairwise(bounds)), run.token_bytes(shape.hidden)
    if run.scatters_boundary and not run.split_tokens:
        hidden //= tensor
    return [step.replace(stages=Stages(ranks, ranges, shape.layers, rank, hidden)) for rank in range(pipeline)]


def _placed(shape: Shape, in_block: int, behind: int) -> Placed:
    """An amount of every block, and one of what is behind them: the head and the loss are nearly all of it."""
    return (*(((index,), in_block) for index in range(shape.layers)), ((shape.layers,), behind))


def _in_blocks(part: RecomputePart, shape: Shape) -> RecomputePart:
    """The same with what each block has of it."""
    return dataclasses.replace(part, freed_at=_placed(shape, part.freed_bytes // shape.layers, 0))


def _stage_sizes(shape: Shape, stages: int, *, balanced: bool) -> tuple[int, ...]:
    """Blocks of every stage, as equal as can be; the middle ones take what is left over.

    ``balanced`` counts the head as the blocks that it costs as much as, and spares the last stage as many.
    """
    if balanced and stages > 1:
        head = shape.vocab * shape.hidden / sum(p.numel for p in inside_parameters(shape) if len(p.shape) == 2)
        spared = min(round(head * (stages - 1) / stages), shape.layers // stages - 1)
        if spared > 0:
            fewer = shape.layers // stages - spared
            return (*_equal(shape.layers - fewer, stages - 1), fewer)
    return _equal(shape.layers, stages)


def _equal(layers: int, stages: int) -> tuple[int, ...]:
    base, rest = divmod(layers, stages)
    first = (stages - rest) // 2
    return tuple(base + (first <= stage < first + rest) for stage in range(stages))


def _boundaries(shape: Shape, run: FamilyRun, pipeline: int) -> tuple[Boundary, ...]:
    """Two pairs of collectives a block over the tensor axis (Korthikanti et al. 2022); exchanges for long sequences."""
    whole = run.tokens * shape.hidden * run.itemsize
    found: list[Boundary] = []
    if run.tensor > 1:
        kinds = ("all_gather", "reduce_scatter") if run.split_tokens else ("all_reduce",)
        for moment in ("forward", "backward"):
            for kind in kinds:
                calls = 2 * shape.layers // pipeline
                found.append(Boundary(kind, moment, whole * calls, (BLOCK,), (BLOCK,), count=calls))  # type: ignore[arg-type]
    if run.sequence > 1:
        # Keys and values of every other rank pass by (Liu et al. 2023); their gradients do in backward.
        passed = 2 * run.tokens * run.sequence * shape.kv_width // run.tensor * run.itemsize
        for moment, times in (("forward", 1), ("backward", 2)):
            calls = shape.layers // pipeline
            size = times * passed * calls
            found.append(Boundary("all_gather", moment, size, (BLOCK,), (BLOCK,), axis="sequence", count=calls))  # type: ignore[arg-type]
    return tuple(found)


def _check(shape: Shape, tensor: int, stages: int, run: FamilyRun) -> None:
    if shape.heads % tensor or shape.layers < stages:
        raise ModelError(
            "The mesh cannot divide the model",
            expected="a tensor axis that divides the heads, and no more stages than layers",
            got=f"{shape.heads} heads over {tensor}, {shape.layers} layers in {stages} stages",
            fix="choose smaller axes",
        )
