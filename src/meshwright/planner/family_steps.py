"""Build the simulated step of a known model family on each pipeline rank: blocks, activations, experts, traffic."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from meshwright.cost import (
    Activations,
    Block,
    Boundary,
    BoundaryAxis,
    Op,
    Parameter,
    SavedTensor,
    Stages,
    Step,
    TracedModule,
    Work,
)
from meshwright.cost.activations import OperatorResult, Running
from meshwright.cost.calibration import host_launches
from meshwright.errors import ModelError
from meshwright.planner.family_ops import (
    ATTENTION,
    FUSED,
    PER_OP,
    PRODUCT,
    FamilyRun,
    block_ops,
    block_saved,
    num_scores,
    outside_ops,
    outside_saved,
    per_op_saved,
    results_bytes,
    rows_bytes,
)
from meshwright.planner.model_shapes import (
    BLOCK,
    Adapters,
    Shape,
    inside_parameters,
    is_stacked,
    outside_parameters,
)

_CLASSES = (BLOCK, PER_OP, ATTENTION)  # every block has one of each


@functools.lru_cache(maxsize=64)
def family_activations(shape: Shape, run: FamilyRun, pipeline: int) -> Activations:
    """Return the activations that one micro-batch saves, in all blocks and in the head.

    Args:
        shape: The model.
        run: Samples, precision and kernels.
        pipeline: Ranks of that axis.
    """
    ops, behind, count = _inside_ops(shape, run), outside_saved(shape, run), shape.layers
    sizes, work = _saved_sizes(shape, run), _work(ops)
    outside = _flops(_behind_ops(shape, run, pipeline))
    head = SavedTensor(behind.saved_bytes, ((),), places=(count,))
    return Activations(
        saved_bytes=count * block_saved(shape, run) + behind.saved_bytes,
        modules=tuple(module for block in range(count) for module in _modules(shape, run, block)),
        blocks=tuple(range(0, len(_CLASSES) * count, len(_CLASSES))),
        stages=((*(tensor for block in range(count) for tensor in _tensors(sizes, run, block)), head),),
        work=tuple(_in_block(each, block) for block in range(count) for each in work),
        loss_bytes=behind.loss_bytes,
        outside_bytes=behind.saved_bytes,
        results_bytes=results_bytes(shape, run),
        working_bytes=_passing_bytes(shape, run),
        passing_bytes=_passing_bytes(shape, run),
        holds_messages=run.impl.divides_blocks_alone,
        # The head and the loss are nearly all of what is outside of blocks.
        flops_at=(*(((block,), _flops(ops)) for block in range(count)), ((count,), outside)),
    )


# Bytes per element of rows that are held for a moment in backward, beside what is saved.
_ROWS_HELD, _EXCHANGED_HELD = 14, 11
_SCORES_HELD = 2  # gradients of scores, where kernels pass them on one by one


def _passing_bytes(shape: Shape, run: FamilyRun) -> int:
    """Return the bytes that a block holds for a moment in backward, beside what is saved.

    They are gradients of experts' rows, of scores, and of the feed-forward layers beside adapters.
    """
    held = rows_bytes(shape, run) * (_EXCHANGED_HELD if run.exchanged else _ROWS_HELD) // 2
    if shape.adapters is not None:  # else gradients of weights follow, which are larger
        held += 3 * run.tokens * shape.ffn_width * run.itemsize // run.tensor
    return held + (_SCORES_HELD * num_scores(shape, run) * run.itemsize if run.impl.score_moves else 0)


def _modules(shape: Shape, run: FamilyRun, block: int) -> tuple[TracedModule, ...]:
    # Backward needs the gradients of the scores and of their softmax beside the saved tensors, and a gathered input.
    # Where kernels pass these gradients on one by one, they are held in any case (``_passing_bytes``).
    is_held = run.impl.fused_attention or run.impl.score_moves
    working = 0 if is_held else 2 * num_scores(shape, run) * run.itemsize
    if run.impl.gathers_again:
        working += run.tokens * shape.hidden * run.itemsize - run.token_bytes(shape.hidden)
    needs = {BLOCK: working, PER_OP: 0, ATTENTION: working}
    paths = (f"blocks.{block}", f"blocks.{block}.ops", f"blocks.{block}.ops.attention")
    return tuple(TracedModule(path, (each,), block, needs[each]) for path, each in zip(paths, _CLASSES, strict=True))


class _Saved(NamedTuple):
    """Bytes that a block saves."""

    entering: int
    plain: int  # what lies between split layers
    attended: int
    selective: int  # by products that ``PER_OP`` keeps
    beside: int
    others: int
    scores: int
    last: int


def _saved_sizes(shape: Shape, run: FamilyRun) -> _Saved:
    h, kv, f = shape.hidden, shape.kv_width, shape.ffn_width * shape.experts_per_token
    plain, saved, selective = run.token_bytes(h), block_saved(shape, run), per_op_saved(shape, run)
    attended = run.tokens * (shape.query_width * run.itemsize + 4 * shape.heads) // run.tensor
    fused_run = dataclasses.replace(run, impl=dataclasses.replace(run.impl, attention="flash2"))
    wide = (2 if run.stacked else 1) * f if shape.gated else 0  # up, where gate is kept; both, of grouped products
    beside = run.tokens * (kv + wide) * run.itemsize // run.tensor  # with the keys
    scores = 0 if run.impl.fused_attention else saved - block_saved(shape, fused_run)
    entering = plain * 4 // run.itemsize if run.impl.autocasts else plain  # residual sums are in fp32 then
    others = saved - selective - beside - scores - (entering - plain)
    # Of experts the last product is among what is saved.
    last = 0 if run.stacked else plain
    return _Saved(entering, plain, attended, selective - 2 * plain - attended, beside, others, scores, last)


def _tensors(sizes: _Saved, run: FamilyRun, block: int) -> tuple[SavedTensor, ...]:
    """Return the saved tensors of one block by the parts whose recomputation frees them.

    These parts are the whole block, what ``PER_OP`` recomputes, and attention's scores. The policy ``selective`` saves
    the outputs of products in place of what follows them: attention's product in place of the residual sum, which is as
    large where tokens are not divided, and the last product, which nothing else saves.
    """
    whole = len(_CLASSES) * block
    (around, inside, attention) = (whole,), (whole, whole + 1), (whole, whole + 1, whole + 2)
    fused = (OperatorResult(FUSED, around, 1),) if run.impl.fused_attention and not run.impl.dropout else ()
    product, last = (OperatorResult(PRODUCT, around, 1),), (OperatorResult(PRODUCT, around, 0),)
    second = (OperatorResult(PRODUCT, around, 1, turns=(1,)),)
    # Our stages keep what they send until its gradient has come.
    entering = (block - 1, block) if block and run.impl.divides_blocks_alone else (block,)
    summed = sizes.plain * run.plain_parts if run.plain_parts > 1 else 0  # of all tokens, before it is divided
    every = (
        SavedTensor(sizes.entering, (around,), inputs_of=(whole,), places=entering),
        SavedTensor(sizes.plain, (around,), results=() if summed else product, places=(block,)),
        SavedTensor(summed, (), results=(product[0]._replace(turns=(1,)),), places=(block,)),
        SavedTensor(sizes.attended, (around,), results=fused, places=(block,)),
        SavedTensor(sizes.selective, (around,), results=product, places=(block,)),
        SavedTensor(sizes.beside, (inside,), results=second, places=(block,)),
        SavedTensor(sizes.others, (inside,), places=(block,)),
        SavedTensor(sizes.scores, (attention,), places=(block,)),
        SavedTensor(sizes.last * run.plain_parts, (), results=last, places=(block,)),
    )
    return tuple(tensor for tensor in every if tensor.num_bytes)


def _work(ops: tuple[Op, ...]) -> tuple[Work, ...]:
    """Return the products and attentions of the first block, with equal operators in equal modules merged."""
    found: dict[tuple[str, Running, int, tuple[int, ...]], int] = {}
    for op in ops:
        if op.flops and op.moment != "backward":
            running = tuple(number for number, each in enumerate(_CLASSES) if each in op.inside)
            turns = (1,) * len(running) if op.operator == PRODUCT and PER_OP in op.inside else ()
            key = op.operator, running, len(running) if op.needed_in else 0, turns
            found[key] = found.get(key, 0) + op.flops
    return tuple(
        Work(operator, running, needed, flops, 0, turns) for (operator, running, needed, turns), flops in found.items()
    )


def _in_block(work: Work, block: int) -> Work:
    running = tuple(len(_CLASSES) * block + number for number in work.running)
    return Work(work.operator, running, work.num_needed, work.flops, block, work.turns)


# --- What frozen weights leave out, and adapters add


def _inside_ops(shape: Shape, run: FamilyRun) -> tuple[Op, ...]:
    """Return the ops of one block.

    Recomputation runs a layer before its adapters, which save something: so the last product runs again where it has
    some.
    """
    ops, adapters = block_ops(shape, run), shape.adapters
    if adapters is not None and adapters.of_product:
        ops = tuple(dataclasses.replace(op, needed_in=op.inside) if op.operator == PRODUCT else op for op in ops)
    if adapters is not None:
        ops = (*(part for op in ops for part in _frozen(op)), *_ops_of_adapters(adapters, run))
    return _as_operators(ops, shape, run) if run.impl.launches_operators else ops


# Operators of a block in forward and in backward, and modules that are called: of GPT's, of Llama's, and more for each
# of the others. Counted in traces.
_Counts = tuple[int, int, int]
_OF_PLAIN, _OF_GATED = (10, 19, 12), (38, 71, 13)
_OF_NORMS = (12, 24, 1)  # for each element of those beside the usual two, over the hidden size
_OF_AUTOCAST, _OF_DIVIDED, _OF_STACKED, _OF_EXCHANGED = (10, 14, 0), (4, 6, 0), (19, 24, -1), (14, 3, 0)
_OF_RING, _OF_RING_STEP, _OF_TOKENS = (-6, 5, 0), (11, 5, 0), (10, 10, 0)
_OF_ADAPTERS = (4, 4, 4)  # for each layer
# The same where a compiler fuses what is between products.
_COMPILED: dict[_Counts, _Counts] = {
    _OF_PLAIN: (9, 17, 0), _OF_GATED: (13, 22, 0), _OF_NORMS: (0, 0, 0), _OF_AUTOCAST: (7, 7, 0),
    _OF_DIVIDED: (0, 0, 0), _OF_STACKED: (10, 6, 0), _OF_ADAPTERS: (2, 3, 0),
}  # fmt: skip


def _num_operators(shape: Shape, run: FamilyRun) -> list[float]:
    """Return the operators of a block in forward and in backward, and the modules that are called."""
    in_ring, exchanged = run.ring > 1, run.sequence > run.ring
    parts: list[tuple[_Counts, float]] = [
        (_OF_GATED if shape.gated else _OF_PLAIN, 1),
        (_OF_NORMS, shape.normed / shape.hidden),
        (_OF_AUTOCAST, run.impl.autocasts),
        (_OF_DIVIDED, run.plain_parts > 1),
        (_OF_STACKED, run.stacked > 0),
        (_OF_EXCHANGED, run.exchanged),
        (_OF_RING, in_ring),
        (_OF_RING_STEP, run.ring if in_ring else 0),
        (_OF_TOKENS, exchanged),
        (_OF_ADAPTERS, shape.adapters.layers if shape.adapters is not None else 0),
    ]
    every = [(_COMPILED.get(each, each) if run.impl.compiled else each, times) for each, times in parts]
    return [sum(each[which] * times for each, times in every) for which in range(3)]


def _as_operators(ops: Sequence[Op], shape: Shape, run: FamilyRun) -> tuple[Op, ...]:
    """Return ops with as many operators, and as many launches, as traces have."""
    forward, backward, modules = _num_operators(shape, run)
    split = (5 if run.stacked else 7 if shape.gated else 4) if run.tensor > 1 else 0
    launched = host_launches(forward, backward, modules, split, compiled=run.impl.compiled)
    ways: tuple[tuple[Literal["forward", "backward"], float, str], ...] = (
        ("forward", forward, "backward"), ("backward", backward, "forward"),
    )  # fmt: skip
    names = (BLOCK, PER_OP)
    more = []
    for (way, wanted, other), launches in zip(ways, launched, strict=True):
        count = max(1, round(wanted - sum(op.count for op in ops if op.launches and op.moment != other)))
        more.append(
            Op("move", count=count, inside=names, needed_in=names, traced=True, launches=launches / count, moment=way)
        )
    return (*(dataclasses.replace(op, launches=0.0) for op in ops), *more)


def _behind_ops(shape: Shape, run: FamilyRun, pipeline: int) -> tuple[Op, ...]:
    """Return the ops outside of the blocks."""
    ops = outside_ops(shape, run, pipeline)
    return ops if shape.adapters is None else tuple(part for op in ops for part in _frozen(op))


def _flops(ops: Sequence[Op]) -> int:
    """Return the operations of forward and backward; of what backward follows by rule, twice those of forward."""
    return sum(op.flops * (3 if op.moment == "both" else 1) for op in ops)


def _frozen(op: Op) -> tuple[Op, ...]:
    """Return an op whose weights are frozen: of a product, backward has the gradient of its input alone."""
    if op.of_weights:
        return (dataclasses.replace(op, backward_bytes=0),)
    if op.operator != PRODUCT:
        return (op,)
    forward = dataclasses.replace(op, moment="forward")
    return forward, dataclasses.replace(op, n=op.k, k=op.n, moment="backward")


_FUSED = 4  # kernels of adapters into one, where they are compiled


def _ops_of_adapters(adapters: Adapters, run: FamilyRun) -> tuple[Op, ...]:
    """Return the ops of a block's adapters: two products of each, which are scaled and added to what a layer returns.

    Backward scales a gradient, and adds those of the layer's input. Under autocast that is in fp32, and cast.
    """
    tokens, inputs, outputs = run.tokens, adapters.inputs, adapters.outputs // run.tensor
    forward, backward = 5 * outputs, 2 * outputs + 3 * inputs
    if run.impl.autocasts:
        forward, backward = forward + 3 * inputs, backward + 6 * inputs
    kernels = 2 * adapters.layers
    of_kernel = tokens * run.itemsize / kernels / (_FUSED if run.impl.compiled else 1)
    down = Op("matmul", tokens, adapters.rank, inputs, dtype=run.wide, inside=(BLOCK,), needed_in=(BLOCK,))
    up = dataclasses.replace(down, n=outputs, k=adapters.rank)
    move = Op(
        "move", num_bytes=round(forward * of_kernel), backward_bytes=round(backward * of_kernel), count=kernels,
        inside=(BLOCK,), needed_in=(BLOCK,), launches=1 / _FUSED if run.impl.compiled else 1.0,
    )  # fmt: skip
    return down, up, move


# --- Experts over an expert axis


def with_experts(step: Step, shape: Shape, run: FamilyRun) -> Step:
    """Return the step with experts that ``expert_parallel`` can divide, and their all-to-alls.

    One all-to-all sends each token to its experts, and another returns the results (Lepikhin et al. 2020, GShard);
    backward sends the gradients of both. Every expert is assumed to get the same number of tokens. The ranks of a
    tensor axis each send a part of the tokens, and gather what other layers of a block sum; where they have different
    tokens between its layers, they exchange nothing more.
    """
    tensor, tokens = step.size("tensor"), run.tokens // (step.size("sequence") * step.size("context"))
    layers = step.blocks[0].on_ranks[step.stages.here] if step.stages is not None else shape.layers
    sent = tokens * shape.experts_per_token * shape.hidden * run.itemsize * layers // tensor
    weights = tokens * shape.experts_per_token * run.itemsize * layers

    def beside(boundary: Boundary) -> Boundary:
        if boundary.kind != "all_reduce" or boundary.needed_in:
            return boundary
        backward = weights if boundary.moment == "backward" else 0
        return dataclasses.replace(boundary, kind="all_gather", num_bytes=boundary.num_bytes + backward)

    exchanged = tuple(
        Boundary("all_to_all", moment, 2 * sent, (BLOCK,), (BLOCK,), axis="expert", count=2 * layers)
        for moment in ("forward", "backward")  # type: ignore[arg-type]
    )
    inside = dataclasses.replace(step.blocks[0], parameters=_with_experts_inside(shape))
    blocks = (inside, *step.blocks[1:])
    others = _of_attention(step.boundaries) if run.impl.split_tokens else map(beside, step.boundaries)
    return step.replace(blocks=blocks, boundaries=(*others, *exchanged))


def _of_attention(boundaries: Sequence[Boundary]) -> list[Boundary]:
    """Leave out one of each two equal collectives of a tensor axis, and those that end a block: the MLP's."""
    kept: dict[Any, Boundary] = {}
    for number, each in enumerate(boundaries):
        ends = each.kind == "reduce_scatter" and not each.needed_in
        if each.axis != "tensor":
            kept[number] = each
        elif not ends:
            kept.setdefault(each, each)
    return list(kept.values())


@functools.lru_cache(maxsize=16)
def _with_experts_inside(shape: Shape) -> tuple[Parameter, ...]:
    return tuple(_of_expert(parameter, shape) for parameter in inside_parameters(shape))


def _of_expert(parameter: Parameter, shape: Shape) -> Parameter:
    if not is_stacked(parameter):
        return parameter
    return dataclasses.replace(parameter, expert=(None, shape.experts), tensor_dim=None)


# --- The step of a family


def family_step(
    shape: Shape,
    run: FamilyRun,
    axes: Sequence[tuple[str, int]] = (),
    *,
    shard_axis: str | None = None,
    stage_ranks: tuple[int, ...] | None = None,
) -> list[Step]:
    """Return the simulated step of a family before any method: one, or one for each rank of a pipeline axis.

    Args:
        shape: The model.
        run: Samples, precision and kernels.
        axes: The mesh, innermost axis first.
        shard_axis: The axis that a ZeRO method will shard over.
        stage_ranks: The pipeline rank of every stage; None: one stage per rank.

    Raises:
        ModelError: When an axis divides what cannot be divided.
    """
    sizes = dict(axes)
    tensor, pipeline = sizes.get("tensor", 1), sizes.get("pipeline", 1)
    ranks = stage_ranks or tuple(range(pipeline))
    _check(shape, tensor, len(ranks), run)
    run = _over(sizes, shape, run)
    inside_ops, behind_ops = _inside_ops(shape, run), _behind_ops(shape, run, pipeline)
    counts = _stage_counts(shape, run, ranks, inside_ops, behind_ops)
    on_ranks = tuple(sum(c for c, r in zip(counts, ranks, strict=True) if r == rank) for rank in range(pipeline))
    on_ranks = on_ranks if pipeline > 1 else ()
    inside = Block(BLOCK, shape.layers, inside_parameters(shape), on_ranks, inside_ops)
    outside = Block("outside", 1, outside_parameters(shape, pipeline, divided=not run.whole_vocabulary), (), behind_ops)
    outside = _ending_on(ranks[-1], pipeline - 1, outside)
    step = Step(
        blocks=(inside, outside),
        axes=tuple(axes),
        shard_axis=shard_axis,
        num_micro_batches=run.num_micro_batches,
        activations=family_activations(shape, run, pipeline),
        flops=shape.layers * _flops(inside.ops) + _flops(outside.ops),
        boundaries=(
            *_boundaries(shape, run, sizes, shape.layers),
            *_outside_boundaries(shape, run, sizes, first=True, last=True),
        ),
    )
    if pipeline == 1:
        return [step]
    bounds = (0, *itertools.accumulate(counts))
    ranges, hidden = tuple(itertools.pairwise(bounds)), run.token_bytes(shape.hidden)
    if run.impl.scatters_boundary and not run.impl.split_tokens:
        hidden //= tensor
    return [
        step.replace(
            stages=Stages(ranks, ranges, shape.layers, rank, hidden),
            boundaries=(
                *_boundaries(shape, run, sizes, on_ranks[rank]),
                *_outside_boundaries(shape, run, sizes, first=rank == ranks[0], last=rank == ranks[-1]),
            ),
        )
        for rank in range(pipeline)
    ]


def _over(sizes: Mapping[str, int], shape: Shape, run: FamilyRun) -> FamilyRun:
    """Return the run of one rank of the axes that divide layers and tokens."""
    tensor, ring = sizes.get("tensor", 1), sizes.get("context", 1)
    is_whole = run.impl.divides_blocks_alone and shape.vocab % tensor > 0
    return dataclasses.replace(
        run, tensor=tensor, sequence=sizes.get("sequence", 1) * ring, ring=ring, whole_vocabulary=is_whole
    )


def _stage_counts(
    shape: Shape, run: FamilyRun, ranks: tuple[int, ...], inside_ops: Sequence[Op], behind_ops: Sequence[Op]
) -> tuple[int, ...]:
    """Return the number of blocks of every stage, as the implementation cuts a pipeline."""
    ending = run.impl.balances_head
    if ending != "work":
        return tuple(_stage_sizes(shape, len(ranks), ending))
    head = _flops(behind_ops)
    of_block = _flops(inside_ops) + round(run.again * sum(op.flops for op in inside_ops if op.moment != "backward"))
    unit = math.gcd(of_block, head)  # micro-batches of all sizes are cut alike
    return _by_work(shape.layers, ranks, of_block // unit, head // unit)


@functools.lru_cache(maxsize=1024)
def _by_work(layers: int, ranks: tuple[int, ...], of_block: int, head: int) -> tuple[int, ...]:
    """Return the number of blocks of every stage, as our pipelines are cut."""
    # What cuts real models takes long to import.
    from meshwright.methods.pipeline.stage_cut import balanced_bounds, block_counts

    costs = [of_block] * (layers - 1) + [of_block + head]
    return block_counts(balanced_bounds(costs, ranks))


def _stage_sizes(shape: Shape, stages: int, ending: Literal["", "reaching", "beyond"]) -> tuple[int, ...]:
    """Return the number of blocks of every stage, as equal as possible; middle stages take the remainder.

    ``ending`` counts the head as the number of blocks that cost as much, and gives every stage an equal share, which
    ends with the first block that reaches it, or with the first beyond it.
    """
    if ending and stages > 1:
        head = shape.vocab * shape.hidden / sum(p.numel for p in inside_parameters(shape) if len(p.shape) > 1)
        share = (shape.layers + head) / stages
        wanted = (share * stage for stage in range(1, stages))
        ends = [math.ceil(end) if ending == "reaching" else math.floor(end) + 1 for end in wanted]
        # The head is a part of its own: the last stage may have nothing else.
        ends = [min(end, shape.layers - stages + stage + 1) for stage, end in enumerate(ends, start=1)]
        return tuple(end - begin for begin, end in itertools.pairwise((0, *ends, shape.layers)))
    return _equal(shape.layers, stages)


def _equal(layers: int, stages: int) -> tuple[int, ...]:
    base, rest = divmod(layers, stages)
    first = (stages - rest) // 2
    return tuple(base + (first <= stage < first + rest) for stage in range(stages))


def _ending_on(rank: int, last: int, outside: Block) -> Block:
    """Return the parameters and ops outside of blocks, with the head on a rank that need not be the last."""
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


def _boundaries(shape: Shape, run: FamilyRun, sizes: Mapping[str, int], calls: int) -> tuple[Boundary, ...]:
    """Return the collectives of the tensor, sequence and context axes for a rank with ``calls`` blocks.

    The tensor axis has two pairs of collectives per block (Korthikanti et al. 2022).
    """
    sequence, context = (sizes.get(axis, 1) for axis in ("sequence", "context"))
    whole = run.tokens * shape.hidden * run.itemsize
    found: list[Boundary] = []

    def add(kind: str, moment: str, size: int, axis: str, number: int, beside: str = "", *, ends: bool = False) -> None:
        inside = (BLOCK, beside) if beside else (BLOCK,)
        needed = () if ends else inside
        found.append(Boundary(kind, moment, size, inside, needed, axis=axis, count=number))  # type: ignore[arg-type]

    if run.tensor > 1:
        # No op of a block needs the result of its last collective. ``PER_OP`` saves the results of reductions, and
        # repeats gathers.
        kinds = ("all_gather", "reduce_scatter") if run.impl.split_tokens else ("all_reduce",)
        for moment, kind, ends in itertools.product(("forward", "backward"), kinds, (False, True)):
            beside, last = (PER_OP, False) if kind == "all_gather" else ("", ends)
            add(kind, moment, whole * calls, "tensor", calls, beside, ends=last)
        if run.impl.gathers_again:
            # Inputs of layers split by columns, again; and beside the products of those split by rows.
            again = Boundary("all_gather", "backward", whole * calls, (BLOCK,), axis="tensor", count=calls, beside=True)
            found += [again] * 2
        if run.impl.split_tokens and run.impl.divides_blocks_alone:
            # Gradients of norms, and of the biases behind sums, are of a rank's tokens: they are summed, together.
            vectors = 2 if shape.gated else 6
            number = vectors * calls if run.impl.sums_apart else calls
            add("all_reduce", "backward", vectors * shape.hidden * run.itemsize * calls, "tensor", number)
    if sequence > 1:
        # Ranks exchange tokens for heads (Jacobs et al. 2023): queries, keys and values go out, and attention's output
        # comes back; their gradients do in backward.
        sent = run.tokens * 2 * (shape.query_width + shape.kv_width) // run.tensor * run.itemsize
        times = 2 if run.impl.divides_blocks_alone else 4  # queries, keys and values at once, or each by itself
        for moment in ("forward", "backward"):
            add("all_to_all", moment, sent * calls, "sequence", times * calls)
    if context > 1 and run.impl.divides_blocks_alone:
        # They are sent from rank to rank, while attention runs: gradients in fp32, and once more to where they belong.
        part = 2 * run.tokens * shape.kv_width // run.tensor
        add("send", "forward", (context - 1) * part * run.itemsize * calls, "context", (context - 1) * calls)
        add("send", "backward", part * ((context - 1) * run.itemsize + context * 4) * calls, "context", calls)
    elif context > 1:
        # Keys and values of every other rank pass by (Liu et al. 2023); their gradients do in backward.
        passed = 2 * run.tokens * context * shape.kv_width // run.tensor * run.itemsize
        for moment, times in (("forward", 1), ("backward", 2)):
            add("all_gather", moment, times * passed * calls, "context", calls)
    return tuple(found)


def _outside_boundaries(
    shape: Shape, run: FamilyRun, sizes: Mapping[str, int], *, first: bool, last: bool
) -> Iterator[Boundary]:
    """Yield what our own methods send before the first block and behind the last one of the model.

    Args:
        shape: The model.
        run: Samples, precision and kernels.
        sizes: Sizes of the mesh axes.
        first: Whether the rank has the embedding.
        last: Whether the rank has the head.
    """
    if not run.impl.divides_blocks_alone:
        return
    whole, part = (each.tokens * shape.hidden * each.itemsize for each in (run.outside, run))
    # The words that are looked up are summed, and so are gradients of the head's input. Tokens are cut before the
    # blocks, and gathered behind them.
    if run.vocabulary_parts > 1 and first:
        yield Boundary("all_reduce", "forward", whole)
    if run.vocabulary_parts > 1 and last:
        yield Boundary("all_reduce", "backward", whole)
    if run.tensor > 1 and run.impl.split_tokens and first:
        yield Boundary("all_gather", "backward", part)
    if run.tensor > 1 and run.impl.split_tokens and last:
        yield Boundary("all_gather", "forward", part)
    axes: tuple[BoundaryAxis, ...] = ("sequence", "context")
    for axis in axes:
        if last and sizes.get(axis, 1) > 1:
            yield Boundary("all_gather", "forward", whole, axis=axis)
            yield Boundary("reduce_scatter", "backward", whole, axis=axis)


def _check(shape: Shape, tensor: int, stages: int, run: FamilyRun) -> None:
    if shape.heads % tensor or shape.layers < stages:
        raise ModelError(
            "The mesh cannot divide the model",
            expected="a tensor axis that divides the heads, and no more stages than layers",
            got=f"{shape.heads} heads over {tensor}, {shape.layers} layers in {stages} stages",
            fix="choose smaller axes",
        )
