"""What a family keeps for backward, tensor by tensor, and which of it recomputation frees."""

from __future__ import annotations

import dataclasses
import functools

from meshwright.cost import Activations, Op, Placed, SavedTensor, TracedModule, Work
from meshwright.cost.activations import Running
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
    per_op_kept,
)
from meshwright.planner.family_shape import BLOCK, Shape

_CLASSES = (BLOCK, PER_OP, ATTENTION)  # every block has one of each


@functools.lru_cache(maxsize=64)
def family_activations(shape: Shape, run: FamilyRun, pipeline: int) -> Activations:
    """What one micro-batch keeps over all blocks and behind them.

    Args:
        shape: The model.
        run: Samples, precision and kernels.
        pipeline: Ranks of that axis.
    """
    ops, behind, count = block_ops(shape, run), outside_saved(shape, run), shape.layers
    outside = 3 * sum(op.flops for op in outside_ops(shape, run, pipeline))
    head = SavedTensor(behind.saved_bytes, ((),), places=(count,))
    return Activations(
        saved_bytes=count * block_saved(shape, run) + behind.saved_bytes,
        modules=tuple(module for block in range(count) for module in _modules(shape, run, block)),
        blocks=tuple(range(0, len(_CLASSES) * count, len(_CLASSES))),
        stages=((*(tensor for block in range(count) for tensor in _tensors(shape, run, block)), head),),
        work=tuple(work for block in range(count) for work in _work(ops, block)),
        loss_bytes=behind.loss_bytes,
        outside_bytes=behind.saved_bytes,
        flops_at=_flops_at(count, 3 * sum(op.flops for op in ops), outside),
    )


def _flops_at(count: int, in_block: int, behind: int) -> Placed:
    """Of every block, and of what is behind them: the head and the loss are nearly all of the rest."""
    return (*(((block,), in_block) for block in range(count)), ((count,), behind))


def _modules(shape: Shape, run: FamilyRun, block: int) -> tuple[TracedModule, ...]:
    # Backward holds the gradients of the scores and of their softmax beside what was saved.
    working = 0 if run.fused_attention else 2 * num_scores(shape, run) * run.itemsize
    needs = {BLOCK: working, PER_OP: 0, ATTENTION: working}
    paths = (f"blocks.{block}", f"blocks.{block}.ops", f"blocks.{block}.ops.attention")
    return tuple(TracedModule(path, (each,), block, needs[each]) for path, each in zip(paths, _CLASSES, strict=True))


def _tensors(shape: Shape, run: FamilyRun, block: int) -> tuple[SavedTensor, ...]:
    """Those of one block, by what keeps them: the block alone, what ``PER_OP`` recomputes, or attention's scores.

    ``selective`` keeps the outputs of products in place of what follows them: that of attention's in place of the sum,
    which is as large, and that of the last one, which nothing saves.
    """
    h, kv, f = shape.hidden, shape.kv_width, shape.ffn_width * shape.experts_per_token
    plain, saved, kept = run.token_bytes(h), block_saved(shape, run), per_op_kept(shape, run)
    attended = run.tokens * (h * run.itemsize + 4 * shape.heads) // run.tensor
    beside = run.tokens * (kv + (f if shape.gated else 0)) * run.itemsize // run.tensor  # keys; up, where gate is kept
    scores = 0 if run.fused_attention else saved - block_saved(shape, dataclasses.replace(run, fused_attention=True))
    whole = len(_CLASSES) * block
    (around, inside, attention) = (whole,), (whole, whole + 1), (whole, whole + 1, whole + 2)
    fused = ((FUSED, around),) if run.fused_attention and not run.dropout else ()
    product = ((PRODUCT, around),)
    every = (
        SavedTensor(plain, (around,), inputs_of=(whole,), places=(block,)),
        SavedTensor(plain, (around,), results=product, places=(block,)),
        SavedTensor(attended, (around,), results=fused, places=(block,)),
        SavedTensor(kept - 2 * plain - attended, (around,), results=product, places=(block,)),
        SavedTensor(beside, (inside,), results=product, places=(block,)),
        SavedTensor(saved - kept - beside - scores, (inside,), places=(block,)),
        SavedTensor(scores, (attention,), places=(block,)),
        SavedTensor(plain, (), results=product, places=(block,)),
    )
    return tuple(tensor for tensor in every if tensor.num_bytes)


def _work(ops: tuple[Op, ...], block: int) -> tuple[Work, ...]:
    """The block's products and attentions; those of equal operators in equal modules are one."""
    found: dict[tuple[str, Running, int], int] = {}
    for op in ops:
        if op.flops:
            running = _running(op.inside, block)
            key = op.operator, running, len(running) if op.needed_in else 0
            found[key] = found.get(key, 0) + op.flops
    return tuple(Work(operator, running, needed, flops, block) for (operator, running, needed), flops in found.items())


def _running(names: tuple[str, ...], block: int) -> Running:
    return tuple(len(_CLASSES) * block + number for number, each in enumerate(_CLASSES) if each in names)
