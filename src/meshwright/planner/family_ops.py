"""What a block of a decoder computes and keeps for backward, op by op, on one rank of the tensor and sequence axes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from meshwright.cost import FP8, HALF, Op, ProductDtype, Scaling
from meshwright.planner.model_shapes import BLOCK, Shape

ATTENTION = "CoreAttention"  # scores, softmax and their product with the values: what ``selective`` recomputes
PRODUCT, FUSED = "aten.mm", "aten._scaled_dot_product_flash_attention"  # as operators that recomputation may keep
PER_OP = "EverySecondMatmul"  # TorchTitan's selective policy: keeps attention's output and every other product

# Elements in half that are moved for one, kernel by kernel: a norm casts to fp32 (2 + 4 bytes), squares (4 + 4), takes
# means (4), multiplies (4 + 4), casts back (4 + 2) and multiplies by the weight (2 + 2); rotary positions cast,
# multiply complex numbers and cast back.
_PLAIN_NORM, _PLAIN_ROTARY = 18, 10
_NARROW = (FP8, "fp4")


@dataclass(frozen=True)
class FamilyRun:
    """How a family is run.

    Args:
        micro_batch: Samples of a micro-batch on one rank.
        num_micro_batches: Of a step.
        dtype: Of matrix products.
        tensor: Ranks of the tensor axis.
        sequence: Ranks that divide the tokens of a sample.
        split_tokens: Whether what lies between split layers is divided over the tensor axis too (sequence parallelism
            of Korthikanti et al. 2022).
        fused_attention: Whether scores stay in the multiprocessor (Dao 2022).
        compiled: Whether chains of elementwise kernels are one.
        fused_loss: Whether the loss reads the logits as they are, and writes their gradient in their place.
        dropout: Whether its masks are kept.
        seq: Tokens of a sample.
        flash1: Whether fused attention is of the first generation (Dao et al. 2022; Triton's).
        scaling: How tensors are scaled for products in 8 or 4 bits (a key of ``cost.casts.CASTS``).
        saves_fp8: Whether products in 8 bits (or fewer) keep their inputs so, as Transformer Engine does.
        casts_weights: Whether every micro-batch casts weights; False: once a step, or they were gathered so.
        vendor_attention: Whether fused attention is written for this generation of devices (cuDNN's).
        keeps_gathered: Whether the gathered input of a split layer is kept, instead of gathered again in backward.
        copies_heads: Whether queries, keys and values are copied before attention, and the copies kept.
        scatters_boundary: Whether each rank of a tensor axis hands on its part of what all of them have.
        balances_head: Whether a pipeline's last stage has fewer blocks, for the head: stages end with the block that
            comes nearest to their share, or that goes beyond it.
        logit_bytes: Per logit: what is kept, and what is needed beside it while the loss runs backward; None: what
            torch's cross-entropy in fp32 does.
        logit_moves: Bytes that the loss moves per logit in forward and in backward; None: as torch's does.
        early: Whether products are those of a library that did not know this generation of devices well yet.
        plain_norms: Whether norms and rotary positions are chains of kernels in fp32 where nothing fuses them.
    """

    micro_batch: int
    num_micro_batches: int = 1
    dtype: ProductDtype = HALF
    tensor: int = 1
    sequence: int = 1
    split_tokens: bool = True
    fused_attention: bool = True
    compiled: bool = False
    fused_loss: bool = False
    dropout: bool = False
    seq: int = 0
    flash1: bool = False
    vendor_attention: bool = False
    scaling: Scaling = "delayed"
    saves_fp8: bool = False
    casts_weights: bool = True
    keeps_gathered: bool = False
    copies_heads: bool = False
    scatters_boundary: bool = False
    balances_head: Literal["", "nearest", "beyond"] = ""
    logit_bytes: tuple[int, int] | None = None
    logit_moves: tuple[int, int] | None = None
    plain_norms: bool = False
    early: bool = False

    @property
    def itemsize(self) -> int:
        """Return the bytes of an activation's element."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def tokens(self) -> int:
        """Of a micro-batch, on one rank of the sequence axis; set by the shape's length of a sample."""
        return self.micro_batch * self.seq // self.sequence

    @property
    def plain_parts(self) -> int:
        """Into how many parts what lies between split layers is divided."""
        return self.tensor if self.split_tokens else 1

    def token_bytes(self, width: int) -> int:
        """Return the bytes of one activation of a width, between split layers."""
        return self.tokens * width * self.itemsize // self.plain_parts


@dataclass(frozen=True)
class OutsideSaved:
    """What the head and the loss keep, and what they need beside it while the loss runs backward."""

    saved_bytes: int
    loss_bytes: int


def block_ops(shape: Shape, run: FamilyRun) -> tuple[Op, ...]:
    """Forward of one block. Nothing saved needs the last product: recomputation may stop before it."""
    h, kv, f, t = shape.hidden, shape.kv_width, shape.ffn_width, run.tensor
    tokens, routed = run.tokens, run.tokens * shape.experts_per_token
    second = (_matmul(run, routed, f // t, h, PER_OP),) if shape.gated else ()
    return (
        _moves(shape, run),
        _matmul(run, tokens, (h + 2 * kv) // t, h),
        *_attention_ops(shape, run, (ATTENTION, BLOCK)),
        _matmul(run, tokens, h, h // t, PER_OP),
        _matmul(run, routed, f // t, h),
        *second,
        dataclasses.replace(_matmul(run, routed, h, f // t), needed_in=()),
    )


def _moves(shape: Shape, run: FamilyRun) -> Op:
    """All kernels of a block that are bound by memory, as equal ones."""
    kernels, names = 6 if run.compiled else 12, (BLOCK, PER_OP)
    each = _moved_per_block(shape, run) // kernels
    return Op("move", num_bytes=each, count=kernels, inside=names, needed_in=names)


def _matmul(run: FamilyRun, m: int, n: int, k: int, beside: str = "") -> Op:
    names = (BLOCK, beside) if beside else (BLOCK,)
    product = Op(
        "matmul", m, n, k, dtype=run.dtype, inside=names, needed_in=names, variant="early" if run.early else "",
        operator=PRODUCT,
    )  # fmt: skip
    if run.dtype not in _NARROW:
        return product
    return dataclasses.replace(product, scaling=run.scaling, casts_weight=run.casts_weights)


def _attention_ops(shape: Shape, run: FamilyRun, names: tuple[str, ...]) -> tuple[Op, ...]:
    heads, width = shape.heads // run.tensor, shape.hidden // shape.heads
    queries, keys, batch = shape.seq // run.sequence, shape.seq, run.micro_batch * heads
    dtype = HALF if run.dtype in _NARROW else run.dtype
    if run.fused_attention:
        variant: Literal["", "flash1", "vendor"] = "flash1" if run.flash1 else "vendor" if run.vendor_attention else ""
        fused = _matmul(run, queries, keys, width)
        return (
            dataclasses.replace(
                fused, kind="attention", batch=batch, dtype=dtype, causal=True, variant=variant,
                inside=names, needed_in=names, operator="" if run.dropout else FUSED,
            ),
        )  # fmt: skip
    products = tuple(
        Op("matmul", *dims, batch=batch, dtype=dtype, inside=names, needed_in=names)  # type: ignore[arg-type]
        for dims in ((queries, keys, width), (queries, width, keys))
    )
    # The causally masked softmax reads one half and writes all, dropout reads and writes all and its mask; in backward
    # softmax reads one half of two tensors and writes one.
    scores, size = batch * queries * keys, run.itemsize
    softmax = (3 * size // 2, 2 * size)
    forward, backward = (each + (2 * size + 1 if run.dropout else 0) for each in softmax)
    moved = Op("move", num_bytes=scores * forward, backward_bytes=scores * backward, inside=names, needed_in=names)
    return (*products, moved)


def _moved_per_block(shape: Shape, run: FamilyRun) -> int:
    """Return the bytes that norms, residuals, activations and copies read and write in forward."""
    h, f, size = shape.hidden, shape.ffn_width * shape.experts_per_token, run.itemsize
    plain = (2 * 2 + 2 * 3) * h  # two norms (read, write), two residual sums (read two, write)
    activation = (3 if run.compiled else 5) * f if shape.gated else 2 * f
    if run.compiled:
        plain = (2 * 2 + 2) * h
    elif run.plain_norms:
        plain += 2 * (_PLAIN_NORM - 2) * h
    if run.dropout:
        plain += h  # masks of one byte, written by the kernel that adds the residual
    return size * run.tokens * (plain // run.plain_parts + (_moved_by_heads(shape, run) + activation) // run.tensor)


def _moved_by_heads(shape: Shape, run: FamilyRun) -> int:
    """Return the elements of rotary positions and of copies between the products and attention."""
    h, kv = shape.hidden, shape.kv_width
    if run.copies_heads:  # all turned, keys and values joined and turned again, rotated, attention's output turned
        return 2 * (h + 2 * kv) + 8 * kv + 2 * (h + kv) + 2 * h
    if not shape.gated:
        return 2 * h
    if run.plain_norms and not run.compiled:
        return _PLAIN_ROTARY * (h + kv) + (2 * (h + kv) if kv < h else 0)  # heads of keys and values repeated
    return 2 * (h + kv)


def block_saved(shape: Shape, run: FamilyRun) -> int:
    """Return the bytes that one block keeps for backward, its input included (34 s b h of Korthikanti et al.

    2022, for GPT).
    """
    h, kv, f, size = shape.hidden, shape.kv_width, shape.ffn_width * shape.experts_per_token, run.itemsize
    plain = 2 * h * size  # the input, and the sum in the middle
    narrow = run.saves_fp8 and run.dtype in _NARROW
    entering = 2 * h * (1 if narrow else size)  # both norms' outputs, which split layers take
    split = (h + 2 * kv) * size * (2 if run.copies_heads else 1) + h * size  # queries, keys, values; attention's output
    if shape.gated:
        split += (3 if run.compiled else 4) * f * size - (f if narrow else 0)  # gate, up, its activation, the product
    else:
        split += 2 * f * size
    if run.dropout:
        plain += 2 * h
    scores = 0
    if not run.fused_attention:
        each = 2 * size + 1 if run.dropout else size
        scores = each * num_scores(shape, run)
    else:
        split += 4 * shape.heads  # the logarithm of each row's sum
    entering_parts = 1 if run.keeps_gathered else run.plain_parts
    kept = run.tokens * plain // run.plain_parts + run.tokens * entering // entering_parts
    return kept + run.tokens * split // run.tensor + scores


def num_scores(shape: Shape, run: FamilyRun) -> int:
    """Scores of one block's attention."""
    return run.micro_batch * shape.heads // run.tensor * shape.seq * (shape.seq // run.sequence)


def per_op_kept(shape: Shape, run: FamilyRun) -> int:
    """Return the block's input, attention's output and rows' sums, and the products of odd number.

    Q, v, gate or up, down.
    """
    h, kv, f = shape.hidden, shape.kv_width, shape.ffn_width * shape.experts_per_token
    size, t = run.itemsize, run.tensor
    plain = (2 * h) * size * run.tokens // run.plain_parts
    return plain + run.tokens * (size * (2 * h + kv + f) + 4 * shape.heads) // t


def outside_ops(shape: Shape, run: FamilyRun, pipeline: int = 1) -> tuple[Op, ...]:
    """Embedding, last norm, head and loss."""
    h, tokens, size, v = shape.hidden, run.tokens, run.itemsize, shape.vocab // run.tensor
    first = 0 if pipeline > 1 else None
    last = pipeline - 1 if pipeline > 1 else None
    dtype = HALF if run.dtype in _NARROW else run.dtype
    # torch's cross-entropy: casts to fp32 (4), log-softmax reads and writes (8); backward writes zeros with ones at the
    # labels (4), log-softmax reads two and writes (12), and casts (4). Fused: reads once; writes in place.
    usual = (size, 2 * size) if run.fused_loss else (size + 12, size + 20)
    forward, backward = run.logit_moves or usual
    return (
        Op("move", num_bytes=4 * tokens * h * size // run.plain_parts, count=1, on_rank=first),
        Op("move", num_bytes=2 * tokens * h * size // run.plain_parts, on_rank=last),
        Op("matmul", tokens, v, h, dtype=dtype, on_rank=last, variant="early" if run.early else ""),  # type: ignore[arg-type]
        Op("move", num_bytes=tokens * v * forward, backward_bytes=tokens * v * backward, on_rank=last),
    )


def outside_saved(shape: Shape, run: FamilyRun) -> OutsideSaved:
    """Return the last norm's input and output; logits, their fp32 copy and its log-softmax.

    The gradient of one of them.
    """
    logits = run.tokens * (shape.vocab // run.tensor)
    hidden = 2 * run.token_bytes(shape.hidden)
    usual = (run.itemsize, run.itemsize) if run.fused_loss else (run.itemsize + 8, 4)
    kept, beside = run.logit_bytes or usual
    return OutsideSaved(hidden + logits * kept, logits * beside)
