"""Well-known families by shape: GPT, Llama and Mixtral as a simulated step, without a model."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from meshwright.cost import Block, Boundary, Stages, Step
from meshwright.errors import ModelError
from meshwright.planner.family_ops import PER_OP, FamilyRun, block_ops, outside_ops
from meshwright.planner.family_saved import family_activations
from meshwright.planner.family_shape import BLOCK, Shape, inside_parameters, outside_parameters


def family_step(
    shape: Shape,
    run: FamilyRun,
    axes: Sequence[tuple[str, int]] = (),
    *,
    shard_axis: str | None = None,
    stages_per_rank: int = 1,
    stage_ranks: tuple[int, ...] | None = None,
    exchanges_heads: bool = False,
) -> list[Step]:
    """The simulated step of a family before any method: one, or one for each rank of a pipeline axis.

    Args:
        shape: The model.
        run: Samples, precision and kernels.
        axes: The mesh, innermost first.
        shard_axis: What a ZeRO method will shard over.
        stages_per_rank: Of a pipeline.
        stage_ranks: The pipeline rank of every stage; None: they go around.
        exchanges_heads: Whether ranks of a sequence axis exchange tokens for heads in attention (Jacobs et al. 2023),
            instead of passing on keys and values, as those of a context axis do.

    Raises:
        ModelError: When an axis divides what cannot be divided.
    """
    sizes = dict(axes)
    tensor, pipeline = sizes.get("tensor", 1), sizes.get("pipeline", 1)
    ranks = stage_ranks or tuple(range(pipeline)) * stages_per_rank
    _check(shape, tensor, len(ranks), run)
    divided = sizes.get("sequence", run.sequence) * sizes.get("context", 1)
    run = dataclasses.replace(run, tensor=tensor, sequence=divided)
    counts = _stage_sizes(shape, len(ranks), run.balances_head)
    on_ranks = tuple(sum(c for c, r in zip(counts, ranks, strict=True) if r == rank) for rank in range(pipeline))
    on_ranks = on_ranks if pipeline > 1 else ()
    inside = Block(BLOCK, shape.layers, inside_parameters(shape), on_ranks, block_ops(shape, run))
    outside = Block("outside", 1, outside_parameters(shape, pipeline), (), outside_ops(shape, run, pipeline))
    outside = _ending_on(ranks[-1], pipeline - 1, outside)
    step = Step(
        blocks=(inside, outside),
        axes=tuple(axes),
        shard_axis=shard_axis,
        num_micro_batches=run.num_micro_batches,
        activations=family_activations(shape, run, pipeline),
        flops=3 * (shape.layers * sum(op.flops for op in inside.ops) + sum(op.flops for op in outside.ops)),
        boundaries=_boundaries(shape, run, sizes, shape.layers, exchanges_heads=exchanges_heads),
    )
    if pipeline == 1:
        return [step]
    bounds = (0, *itertools.accumulate(counts))
    ranges, hidden = tuple(itertools.pairwise(bounds)), run.token_bytes(shape.hidden)
    if run.scatters_boundary and not run.split_tokens:
        hidden //= tensor
    return [
        step.replace(
            stages=Stages(ranks, ranges, shape.layers, rank, hidden),
            boundaries=_boundaries(shape, run, sizes, on_ranks[rank], exchanges_heads=exchanges_heads),
        )
        for rank in range(pipeline)
    ]


def _stage_sizes(shape: Shape, stages: int, ending: Literal["", "nearest", "beyond"]) -> tuple[int, ...]:
    """Blocks of every stage, as equal as can be; the middle ones take what is left over.

    ``ending`` counts the head as the blocks that it costs as much as, and gives every stage an equal share, which ends
    with the block that comes nearest to it, or that goes beyond it.
    """
    if ending and stages > 1:
        head = shape.vocab * shape.hidden / sum(p.numel for p in inside_parameters(shape) if len(p.shape) == 2)
        share = (shape.layers + head) / stages
        wanted = (share * stage for stage in range(1, stages))
        ends = [round(end) if ending == "nearest" else math.floor(end) + 1 for end in wanted]
        ends = [min(end, shape.layers - stages + stage) for stage, end in enumerate(ends, start=1)]
        return tuple(end - begin for begin, end in itertools.pairwise((0, *ends, shape.layers)))
    return _equal(shape.layers, stages)


def _equal(layers: int, stages: int) -> tuple[int, ...]:
    base, rest = divmod(layers, stages)
    first = (stages - rest) // 2
    return tuple(base + (first <= stage < first + rest) for stage in range(stages))


def _ending_on(rank: int, last: int, outside: Block) -> Block:
    """What is outside of the blocks, with the head on a rank that may not be the last."""
    if rank == last:
        return outside
    ops = [dataclasses.replace(op, on_rank=rank if op.on_rank == last else op.on_rank) for op in outside.ops]
    parameters = [
        dataclasses.replace(p, trained_on=tuple(sorted({rank if each == last else each for each in p.trained_on})))
        if p.trained_on is not None
        else p
        for p in outside.parameters
    ]
    return dataclasses.replace(outside, ops=tuple(ops), parameters=tuple(parameters))


def _boundaries(
    shape: Shape, run: FamilyRun, sizes: Mapping[str, int], calls: int, *, exchanges_heads: bool
) -> tuple[Boundary, ...]:
    """Two pairs of collectives a block over the tensor axis (Korthikanti et al. 2022); exchanges for long sequences.

    ``calls``: blocks of the rank.
    """
    sequence, context = (sizes.get(axis, 1) for axis in ("sequence", "context"))
    whole = run.tokens * shape.hidden * run.itemsize
    found: list[Boundary] = []

    def add(kind: str, moment: str, size: int, axis: str, number: int, beside: str = "", *, ends: bool = False) -> None:
        inside = (BLOCK, beside) if beside else (BLOCK,)
        needed = () if ends else inside
        found.append(Boundary(kind, moment, size, inside, needed, axis=axis, count=number))  # type: ignore[arg-type]

    if run.tensor > 1:
        # Nothing in a block needs what its last collective leaves. ``PER_OP`` keeps what reductions leave, and gathers
        # again.
        kinds = ("all_gather", "reduce_scatter") if run.split_tokens else ("all_reduce",)
        for moment, kind, ends in itertools.product(("forward", "backward"), kinds, (False, True)):
            beside, last = (PER_OP, False) if kind == "all_gather" else ("", ends)
            add(kind, moment, whole * calls, "tensor", calls, beside, ends=last)
    if exchanges_heads and sequence > 1:
        # Queries, keys and values go out, attention's output comes back; their gradients do in backward.
        sent = run.tokens * 2 * (shape.hidden + shape.kv_width) // run.tensor * run.itemsize
        for moment in ("forward", "backward"):
            add("all_to_all", moment, sent * calls, "sequence", 4 * calls)
    rings = {"context": context, "sequence": 1 if exchanges_heads else run.sequence // context}
    for axis, ranks in rings.items():
        if ranks > 1:
            # Keys and values of every other rank pass by (Liu et al. 2023); their gradients do in backward.
            passed = 2 * run.tokens * ranks * shape.kv_width // run.tensor * run.itemsize
            for moment, times in (("forward", 1), ("backward", 2)):
                add("all_gather", moment, times * passed * calls, axis, calls)
    return tuple(found)


def _check(shape: Shape, tensor: int, stages: int, run: FamilyRun) -> None:
    if shape.heads % tensor or shape.layers < stages:
        raise ModelError(
            "The mesh cannot divide the model",
            expected="a tensor axis that divides the heads, and no more stages than layers",
            got=f"{shape.heads} heads over {tensor}, {shape.layers} layers in {stages} stages",
            fix="choose smaller axes",
        )
