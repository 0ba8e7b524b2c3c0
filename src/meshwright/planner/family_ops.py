"""Describe the ops and saved bytes of a known family's blocks, on one rank of the tensor and sequence axes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from meshwright.cost import FP8, HALF, Op, ProductDtype, Scaling
from meshwright.loss.linear_head import default_chunk_size
from meshwright.planner.model_shapes import BLOCK, Shape, inside_parameters

# Scores, softmax and their product with the values: the part that Megatron-LM's ``selective`` recomputes.
ATTENTION = "CoreAttention"
PRODUCT, FUSED = "aten.mm", "aten._scaled_dot_product_flash_attention"  # as operators that recomputation may keep
PER_OP = "EverySecondMatmul"  # TorchTitan's selective policy saves attention's output and every other product

# Half-precision elements moved per element by eager kernels. A norm casts to fp32 (2 + 4 bytes), squares (4 + 4), takes
# means (4), multiplies (4 + 4), casts back (4 + 2) and multiplies by the weight (2 + 2); rotary positions cast,
# multiply complex numbers and cast back.
_PLAIN_NORM, _PLAIN_ROTARY = 18, 10
_COPIES = 4 * 2  # two gathers and two sums of a block, each read and written
_PerElement = tuple[tuple[float, float], tuple[float, float]]
# Half-precision elements moved where tokens are divided, per element of queries and of keys, in forward and in
# backward: by a ring, whose part results and gradients are merged in fp32, and by each of its steps; and by an exchange
# of tokens for heads, which orders both. Counted in traces of Llama and GPT under 2 and 4 ranks.
_RING: _PerElement = ((1.4, 4.0), (3.5, 6.0))
_RING_STEP: _PerElement = ((4.7, 0.0), (2.5, 10.0))
_EXCHANGE: _PerElement = ((12.0, 12.0), (10.0, 14.0))
# Bytes per element that an eager norm saves: its input in fp32, and in half precision what the weight multiplies.
_PLAIN_NORM_SAVED = 6
# The same with what backward of such a norm holds for a moment: gradients of its products, in fp32.
_NORM_HELD = 25
# What a norm saves in fp32, under autocast. A product's input is cast from it (3): for queries, keys and values each by
# itself, and for gate and up; and rotary positions, which stay in fp32, promote queries and keys.
_WIDE_NORM, _WIDE_NORM_SAVED, _WIDE_ROTARY = 14, 8, 18
_WIDE = 2  # a sum of residuals, or a norm of one kernel, moves so many bytes more for each byte of half precision
_CAST, _CASTS, _OF_ATTENTION = 3, 5, 3
# Bytes that stacked experts move in forward and in backward: per element of the rows that tokens are copied to, one for
# each expert that a token asks; of the tokens; and of gated layers, over those of forward. Rows are sorted by expert,
# weighed in fp32, sorted back and summed; rows of other ranks are packed, arrive, and are sent back, too.
# Counted in traces of Mixtral 8x7B and of 128 narrow experts.
_ROWS, _EXCHANGED_ROWS, _OF_TOKENS, _GATED_AGAIN = (22, 56), (50, 60), (10, 16), (0, 4)
# More where autocast casts the rows of each product, either way: per element of rows, of those that are exchanged, and
# between the products; less, in forward, per element of the tokens, whose sums are in fp32 already.
_CAST_ROWS, _CAST_EXCHANGED, _CAST_BETWEEN, _OF_SUMMED = 10, 12, 12, 8
_EXPERT_KERNELS = 20
_NARROW = (FP8, "fp4")


@dataclass(frozen=True)
class Implementation:
    """The implementation of a family's blocks, loss and products that is simulated.

    The default is PyTorch with its own choice of fused attention and eager kernels. A strategy decides some of it,
    whatever is set here: ``split_tokens``, ``keeps_gathered``, ``scaling`` and ``casts_weights`` follow
    ``tensor_parallel`` and ``fp8``, and ``compile`` fuses.

    Args:
        attention: ``torch`` is the fused attention that torch 2.11 takes by itself: cuDNN's on Hopper and Blackwell,
            else FlashAttention-2. ``flash1`` and ``flash2`` are the generations of FlashAttention on any device (Dao et
            al. 2022, in Triton; Dao 2023), ``scores`` materializes them. ``masked`` is what ours is with sinks.
        score_moves: Bytes that kernels move for each materialized score beside the products, in forward and in
            backward; None: those of one kernel that masks, and takes the softmax.
        dropout: Whether dropout's masks are saved.
        compiled: Whether chains of elementwise kernels are one.
        plain_norms: Whether norms and rotary positions are chains of kernels in fp32 where nothing fuses them.
        repeats_heads: Whether such chains repeat heads of keys and values for those of queries, too.
        backward_moves: Bytes that backward of such chains moves, over those of forward.
        copies_heads: Whether queries, keys and values are copied before attention, and the copies saved.
        split_tokens: Whether activations between split layers are divided over the tensor axis, too (sequence
            parallelism of Korthikanti et al. 2022).
        keeps_gathered: Whether the gathered input of a split layer is saved, instead of gathered again in backward.
        sums_apart: Whether gradients of a block's norms are summed over the tensor axis one by one.
        copies_divided: Whether tokens gathered over the tensor axis, or summed and divided, are copied once more:
            collectives hand on parts rank by rank, and the tokens of several samples do not lie so.
        scaling: How tensors are scaled for products in 8 or 4 bits (a key of ``cost.device_time.CASTS``).
        casts_weights: Whether every micro-batch casts weights; False: once a step, or they were gathered so.
        autocasts: Whether each product casts its fp32 weight and input for itself, as autocast lets it where weights
            are not gathered: residual sums and norms are in fp32 then.
        saves_narrow: Whether products in 8 bits or fewer save their inputs so, as Transformer Engine does.
        fused_loss: Whether the loss reads the logits as they are, and writes their gradient in their place.
        omits_logits: Whether the loss is computed some rows at a time, without all logits, and with its gradients; each
            of the ranks that divide tokens has it of a share of the rows then.
        logit_bytes: Bytes per logit: saved for backward, and needed beside them at the start of backward; None: those
            of ``fused_loss``, or of torch's cross-entropy in fp32.
        logit_moves: Bytes that the loss moves per logit in forward and in backward; None: those of
            ``fused_loss``, or of torch's cross-entropy.
        wide_logits: Whether the loss takes an fp32 copy in place of the logits.
        one_pass_loss: Whether kernels of the loss read logits of divided classes as they are, as those of our own do.
        scatters_boundary: Whether pipeline stages hand on one part per tensor rank of what all of these have
            (Narayanan et al. 2021, §4.1).
        balances_head: Whether a pipeline's last stage has fewer blocks, for the head: stages end with the block that
            reaches their share, or that goes beyond it; or so that the slowest has least ``work``, as ours.
        divides_blocks_alone: Whether tokens are divided between the first block and the last norm alone, as our methods
            do, so that every rank embeds all tokens and has the loss of all; and whether exchanges of tokens are ours.
        launches_operators: Whether the host launches as many operators as traces of our engine have, and not a module
            for each kernel that is listed.
    """

    attention: Literal["torch", "scores", "flash1", "flash2", "masked"] = "torch"
    score_moves: tuple[int, int] | None = None
    dropout: bool = False
    compiled: bool = False
    plain_norms: bool = False
    repeats_heads: bool = True
    backward_moves: float = 2.0
    copies_heads: bool = False
    split_tokens: bool = True
    keeps_gathered: bool = False
    sums_apart: bool = False
    copies_divided: bool = False
    scaling: Scaling = "tensorwise"
    casts_weights: bool = True
    autocasts: bool = False
    saves_narrow: bool = False
    fused_loss: bool = False
    omits_logits: bool = False
    logit_bytes: tuple[int, int] | None = None
    logit_moves: tuple[int, int] | None = None
    wide_logits: bool = False
    one_pass_loss: bool = False
    scatters_boundary: bool = False
    balances_head: Literal["", "reaching", "beyond", "work"] = ""
    divides_blocks_alone: bool = False
    launches_operators: bool = False

    @property
    def fused_attention(self) -> bool:
        """Return whether attention saves no scores."""
        return self.attention != "scores"

    @property
    def gathers_again(self) -> bool:
        """Return whether our own tensor parallelism gathers inputs of layers split by columns again in backward."""
        return self.split_tokens and self.divides_blocks_alone and not self.keeps_gathered


PYTORCH = Implementation()
# Our own loss writes an fp32 copy of a few rows, takes their maximum, shifts, exponentiates and sums them; backward
# does so again and writes the gradient (``loss/fused.py``).
OWN = Implementation(
    plain_norms=True,
    repeats_heads=False,
    backward_moves=2.2,
    copies_divided=True,
    fused_loss=True,
    logit_moves=(20, 28),
    one_pass_loss=True,
    balances_head="work",
    launches_operators=True,
)
"""What our engine runs by itself for a known family: eager norms and rotary positions in fp32, and its own loss."""
OWN_EAGER = dataclasses.replace(OWN, attention="scores", score_moves=(22, 32))
"""The same where a model's own code materializes scores, kernel by kernel; bytes are counted in a trace of GPT-OSS."""


@dataclass(frozen=True)
class FamilyRun:
    """A family's batch, precision and division on one rank.

    Args:
        micro_batch: Samples per micro-batch on one rank.
        num_micro_batches: Micro-batches per step.
        dtype: Precision of matrix products.
        tensor: Size of the tensor axis.
        sequence: Number of ranks that divide the tokens of a sample.
        ring: How many of them pass keys and values around; 1: none.
        seq: Tokens per sample.
        stacked: How many experts a rank multiplies with in one grouped product; 0: each token's experts are counted as
            plain layers.
        exchanged: Whether ranks send each other what their experts are asked.
        again: Share of the blocks' forward that recomputation runs again, by which pipelines are cut.
        whole_vocabulary: Whether the tensor axis leaves the embedding and the head whole, as ours one that does not
            divide the classes.
        impl: Which kernels run, and what they save.
    """

    micro_batch: int
    num_micro_batches: int = 1
    dtype: ProductDtype = HALF
    tensor: int = 1
    sequence: int = 1
    ring: int = 1
    seq: int = 0
    stacked: int = 0
    exchanged: bool = False
    again: float = 0.0
    whole_vocabulary: bool = False
    impl: Implementation = PYTORCH

    @property
    def itemsize(self) -> int:
        """Return the bytes per element of an activation."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def wide(self) -> ProductDtype:
        """Return the precision of products that never run in 8 bits or fewer."""
        return HALF if self.dtype in _NARROW else self.dtype

    @property
    def tokens(self) -> int:
        """Return the tokens per micro-batch on one sequence-parallel rank."""
        return self.micro_batch * self.seq // self.sequence

    @property
    def outside(self) -> FamilyRun:
        """Return the run of what lies outside of the blocks."""
        if not self.impl.divides_blocks_alone:
            return self
        impl = dataclasses.replace(self.impl, split_tokens=False)
        return dataclasses.replace(self, sequence=1, tensor=self.vocabulary_parts, impl=impl)

    @property
    def vocabulary_parts(self) -> int:
        """Return over how many ranks the classes are divided."""
        return 1 if self.whole_vocabulary else self.tensor

    @property
    def plain_parts(self) -> int:
        """Return over how many ranks activations between split layers are divided."""
        return self.tensor if self.impl.split_tokens else 1

    def num_rows(self, shape: Shape) -> int:
        """Return the rows that stacked experts get on one rank; the ranks of a tensor axis each take a part of them."""
        return self.tokens * shape.experts_per_token // (self.tensor if self.exchanged else 1)

    def token_bytes(self, width: int) -> int:
        """Return the bytes of one activation of this width between split layers."""
        return self.tokens * width * self.itemsize // self.plain_parts


@dataclass(frozen=True)
class OutsideSaved:
    """Bytes of the head and the loss: saved for backward, and needed beside them at the start of backward."""

    saved_bytes: int
    loss_bytes: int


def block_ops(shape: Shape, run: FamilyRun) -> tuple[Op, ...]:
    """Return the ops of one block's forward.

    No saved tensor needs the last product: recomputation may stop before it.
    """
    h, q, kv, f, t = shape.hidden, shape.query_width, shape.kv_width, shape.ffn_width, run.tensor
    tokens, routed = run.tokens, run.tokens * shape.experts_per_token
    second = (_matmul(run, routed, f // t, h, PER_OP),) if shape.gated else ()
    plain = (
        _matmul(run, routed, f // t, h),
        *second,
        dataclasses.replace(_matmul(run, routed, h, f // t), needed_in=()),
    )
    return (
        _moves(shape, run),
        *_moves_of_tokens(shape, run),
        *_weight_casts(_matrices(shape, run), run, (BLOCK, PER_OP)),
        _matmul(run, tokens, (q + 2 * kv) // t, h),
        *_attention_ops(shape, run, (ATTENTION, BLOCK)),
        _matmul(run, tokens, h, q // t, PER_OP),
        *(_expert_ops(shape, run) if run.stacked else plain),
    )


def _expert_ops(shape: Shape, run: FamilyRun) -> tuple[Op, ...]:
    """Return the ops of stacked experts: two grouped products, and what sorts, weighs and sums their rows.

    The weights of the answers need the second product, which recomputation runs again.
    """
    h, rows, names = shape.hidden, run.num_rows(shape), (BLOCK, PER_OP)
    f = shape.ffn_width // (1 if run.exchanged else run.tensor)
    asked = -(-rows // run.stacked)
    first = _matmul(run, asked, f * (2 if shape.gated else 1), h, PER_OP)
    products = (dataclasses.replace(each, batch=run.stacked) for each in (first, _matmul(run, asked, h, f)))
    tokens = run.tokens // run.plain_parts
    of_rows = _EXCHANGED_ROWS if run.exchanged else _ROWS
    moved = [h * (rows * of_rows[way] + tokens * _OF_TOKENS[way]) + rows * f * _GATED_AGAIN[way] for way in (0, 1)]
    if run.impl.autocasts:
        of_row = _CAST_ROWS + (_CAST_EXCHANGED if run.exchanged else 0)
        moved = [each + rows * (h * of_row + f * _CAST_BETWEEN) for each in moved]
        moved[0] -= tokens * h * _OF_SUMMED
    forward, backward = (each * run.itemsize // (2 * _EXPERT_KERNELS) for each in moved)
    move = Op(
        "move", num_bytes=forward, backward_bytes=backward, count=_EXPERT_KERNELS, inside=names, needed_in=names
    )  # fmt: skip
    return *products, move


def rows_bytes(shape: Shape, run: FamilyRun) -> int:
    """Return the bytes of what one grouped product of stacked experts takes or gives."""
    return run.num_rows(shape) * shape.hidden * run.itemsize if run.stacked else 0


def _moves(shape: Shape, run: FamilyRun) -> Op:
    """Return all memory-bound kernels of a block, as equal ones."""
    kernels, names = 6 if run.impl.compiled else 12, (BLOCK, PER_OP)
    each = _moved_per_block(shape, run) // kernels
    behind = round(each * run.impl.backward_moves) if _is_chain(shape, run) else None
    return Op("move", num_bytes=each, backward_bytes=behind, count=kernels, inside=names, needed_in=names)


def _moves_of_tokens(shape: Shape, run: FamilyRun) -> tuple[Op, ...]:
    """Return the kernels around attention of a block whose tokens our own methods divide, as equal ones."""
    if run.sequence == 1 or not run.impl.divides_blocks_alone:
        return ()
    kinds = [(_RING, 1), (_RING_STEP, run.ring)] if run.ring > 1 else []
    kinds += [(_EXCHANGE, 1)] if run.sequence > run.ring else []
    widths, kernels = (shape.query_width, shape.kv_width), 6 * run.ring
    forward, backward = (
        sum(times * per * width for kind, times in kinds for per, width in zip(kind[way], widths, strict=True))
        for way in (0, 1)
    )
    each = run.tokens * run.itemsize / run.tensor / kernels
    names = (BLOCK, PER_OP)
    return (
        Op(
            "move", num_bytes=round(each * forward), backward_bytes=round(each * backward), count=kernels,
            inside=names, needed_in=names,
        ),
    )  # fmt: skip


def _matrices(shape: Shape, run: FamilyRun) -> int:
    """Return the number of elements of a block's matrices on one rank."""
    every = sum(each.numel for each in inside_parameters(shape) if len(each.shape) > 1)
    if not run.exchanged:
        return every // run.tensor
    of_experts = shape.hidden * shape.ffn_width * (3 if shape.gated else 2)
    return (every - shape.experts * of_experts) // run.tensor + run.stacked * of_experts


def _weight_casts(numel: int, run: FamilyRun, names: tuple[str, ...] = (), rank: int | None = None) -> tuple[Op, ...]:
    """Return what autocast reads and writes of fp32 weights, and of their gradients."""
    if not run.impl.autocasts:
        return ()
    each = numel * (4 + 2)
    # Their launches are among those that the other kernels of a family stand for.
    cast = Op("move", num_bytes=each, backward_bytes=each, of_weights=True, launches=0.0, on_rank=rank)
    return (dataclasses.replace(cast, inside=names, needed_in=names),)


def _is_chain(shape: Shape, run: FamilyRun) -> bool:
    """Return whether norms and rotary positions are chains of kernels; torch has one kernel for the norms of GPT."""
    return run.impl.plain_norms and shape.gated and not run.impl.compiled


def _matmul(run: FamilyRun, m: int, n: int, k: int, beside: str = "") -> Op:
    names = (BLOCK, beside) if beside else (BLOCK,)
    product = Op("matmul", m, n, k, dtype=run.dtype, inside=names, needed_in=names, operator=PRODUCT)
    if run.dtype not in _NARROW:
        return product
    return dataclasses.replace(product, scaling=run.impl.scaling, casts_weight=run.impl.casts_weights)


def _attention_ops(shape: Shape, run: FamilyRun, names: tuple[str, ...]) -> tuple[Op, ...]:
    heads, width = shape.heads // run.tensor, shape.head_width
    queries, keys, batch = shape.seq // run.sequence, shape.seq, run.micro_batch * heads
    if run.impl.attention != "scores":
        variant: Literal["", "flash1", "flash2", "masked"] = "" if run.impl.attention == "torch" else run.impl.attention
        fused = _matmul(run, queries, keys, width)
        return (
            dataclasses.replace(
                fused, kind="attention", batch=batch, dtype=run.wide, causal=True, variant=variant,
                inside=names, needed_in=names, operator="" if run.impl.dropout else FUSED,
            ),
        )  # fmt: skip
    products = tuple(
        Op("matmul", queries, n, k, batch=batch, dtype=run.wide, inside=names, needed_in=names)
        for n, k in ((keys, width), (width, keys))
    )
    # The causally masked softmax reads one half and writes all; dropout reads and writes all, and writes its mask. In
    # backward softmax reads one half of two tensors and writes one.
    scores, size = batch * queries * keys, run.itemsize
    softmax = run.impl.score_moves or (3 * size // 2, 2 * size)
    forward, backward = (each + (2 * size + 1 if run.impl.dropout else 0) for each in softmax)
    moved = Op("move", num_bytes=scores * forward, backward_bytes=scores * backward, inside=names, needed_in=names)
    return (*products, moved)


def _moved_per_block(shape: Shape, run: FamilyRun) -> int:
    """Return the bytes that norms, residuals, activations and copies read and write in forward."""
    h, f, size = shape.hidden, shape.ffn_width * shape.experts_per_token, run.itemsize
    normed = 2 * h + shape.normed
    plain = 2 * normed + 2 * 3 * h  # norms (read, write), two residual sums (read two, write)
    activation = (3 if run.impl.compiled else 5) * f if shape.gated else 2 * f
    if run.impl.compiled:
        plain = 2 * normed + (5 if run.impl.launches_operators else 2) * h
    elif _is_chain(shape, run):
        plain += ((_WIDE_NORM if run.impl.autocasts else _PLAIN_NORM) - 2) * normed
    if run.impl.autocasts and not run.impl.compiled:
        plain += (2 * _WIDE + _CASTS * _CAST if _is_chain(shape, run) else 2 * (2 * _WIDE + _CAST)) * h
    if run.impl.dropout:
        plain += h  # masks of one byte, written by the kernel that adds the residual
    if run.impl.copies_divided and run.plain_parts > 1 and run.micro_batch > 1:
        plain += _COPIES * h * run.plain_parts  # of all tokens, on every rank
    return size * run.tokens * (plain // run.plain_parts + (_moved_by_heads(shape, run) + activation) // run.tensor)


def _moved_by_heads(shape: Shape, run: FamilyRun) -> int:
    """Return the elements of rotary positions and of copies between the products and attention."""
    q, kv = shape.query_width, shape.kv_width
    if run.impl.copies_heads:  # all turned, keys and values joined and turned again, rotated, attention's output turned
        return 2 * (q + 2 * kv) + 8 * kv + 2 * (q + kv) + 2 * q
    if not shape.gated:
        return 2 * q
    if run.impl.plain_norms and not run.impl.compiled:
        return (_WIDE_ROTARY if run.impl.autocasts else _PLAIN_ROTARY) * (q + kv) + (
            2 * (q + kv) if kv < q and run.impl.repeats_heads else 0
        )
    return 2 * (q + kv)


def block_saved(shape: Shape, run: FamilyRun) -> int:
    """Return the bytes that one block saves for backward, its input included.

    These are the 34 s b h of Korthikanti et al. 2022 for GPT.
    """
    h, q, kv, size = shape.hidden, shape.query_width, shape.kv_width, run.itemsize
    f = shape.ffn_width * shape.experts_per_token
    plain, entering = _saved_by_norms(shape, run)
    narrow = run.impl.saves_narrow and run.dtype in _NARROW
    split = (q + 2 * kv) * size * (
        2 if run.impl.copies_heads else 1
    ) + q * size  # queries, keys, values; attention's output
    if shape.gated:
        of_mlp = 4 - run.impl.compiled - (not shape.saves_product)  # gate, up, its activation, the product
        split += of_mlp * f * size - (f if narrow else 0)
    else:
        split += 2 * f * size
    if run.impl.dropout:
        plain += 2 * h
    scores = 0
    if not run.impl.fused_attention:
        each = 2 * size + 1 if run.impl.dropout else size
        scores = each * num_scores(shape, run)
    else:
        split += 4 * shape.heads  # the logarithm of each row's sum
    entering_parts = 1 if run.impl.keeps_gathered else run.plain_parts
    if run.impl.compiled and run.impl.divides_blocks_alone and run.plain_parts > 1:
        entering = 0  # compiled code computes again what it gathers again
    whole = run.tokens * plain // run.plain_parts + run.tokens * entering // entering_parts
    whole += _matrices(shape, run) * run.itemsize if run.impl.autocasts else 0
    if run.stacked:  # what experts are asked and answer, and what was sent; the router's softmax
        whole += (3 if run.exchanged else 2) * rows_bytes(
            shape, run
        ) + run.tokens // run.plain_parts * shape.experts * 4
    return whole + run.tokens * split // run.tensor + scores


def _saved_by_norms(shape: Shape, run: FamilyRun) -> tuple[int, int]:
    """Return the bytes per token of the input, the sum in the middle and what norms make of both; and of their outputs.

    Split layers take these outputs.
    """
    h, size, wide = shape.hidden, run.itemsize, run.impl.autocasts
    narrow = run.impl.saves_narrow and run.dtype in _NARROW
    layers = shape.layers_behind_norms
    entering = (2 if layers > _OF_ATTENTION else 1) * h * (1 if narrow else size)
    if _is_chain(shape, run) and size < 4:  # what they save stands for the input and the sum
        casts = layers * h * size if wide and run.tensor == 1 else entering  # once for all that a tensor axis divides
        saved = (_WIDE_NORM_SAVED if wide else _PLAIN_NORM_SAVED) - (size if shape.adapters is not None else 0)
        return (2 * h + shape.normed) * saved, casts
    if wide:
        return h * (size + 4 if run.impl.compiled else 2 * 4) + shape.normed * 4, entering
    return (2 * h + shape.normed) * size, entering


def results_bytes(shape: Shape, run: FamilyRun) -> int:
    """Return the bytes of the gradients of all results of a block's products."""
    routed = shape.experts_per_token * (shape.ffn_width * (2 if shape.gated else 1))
    divided = shape.query_width + 2 * shape.kv_width + routed
    # Where tokens are divided, gradients of what is summed over the axis are gathered before the products.
    summed = shape.hidden * (1 if run.stacked else 1 + shape.experts_per_token)
    return run.tokens * run.itemsize * (divided // run.tensor + summed) + rows_bytes(shape, run)


def num_scores(shape: Shape, run: FamilyRun) -> int:
    """Return the number of scores of one block's attention."""
    return run.micro_batch * shape.heads // run.tensor * shape.seq * (shape.seq // run.sequence)


def per_op_saved(shape: Shape, run: FamilyRun) -> int:
    """Return the bytes that selective recomputation (``PER_OP``) keeps of one block.

    These are the block's input, attention's output with its rows' sums, and every other product: query, value, gate or
    up, and down.
    """
    q, kv, f = shape.query_width, shape.kv_width, shape.ffn_width * shape.experts_per_token
    size, t = run.itemsize, run.tensor
    plain = (2 * shape.hidden) * size * run.tokens // run.plain_parts
    if run.stacked:
        f = 0  # of two grouped products, the second
    return plain + run.tokens * (size * (2 * q + kv + f) + 4 * shape.heads) // t + rows_bytes(shape, run)


def outside_ops(shape: Shape, run: FamilyRun, pipeline: int = 1) -> tuple[Op, ...]:
    """Return the ops of the embedding, the last norm, the head and the loss."""
    own, run = run, run.outside
    h, tokens, size, v = shape.hidden, run.tokens, run.itemsize, _classes(shape, run)
    first = 0 if pipeline > 1 else None
    last = pipeline - 1 if pipeline > 1 else None
    # torch's cross-entropy casts to fp32 (4), log-softmax reads and writes (8); backward writes zeros with ones at the
    # labels (4), log-softmax reads two and writes (12), and casts (4). A fused loss reads once, and writes in place.
    norm = _PLAIN_NORM if _is_chain(shape, run) else 2
    usual = (size, 2 * size) if run.impl.fused_loss else (size + 12, size + 20)
    forward, backward = run.impl.logit_moves or usual
    if run.tensor > 1 and run.impl.one_pass_loss:
        # Three kernels for divided classes: two read the logits, and one reads them and writes their gradient.
        forward = backward = 2 * 4 + (size + 4) if run.impl.wide_logits else 2 * size
    around = (
        Op("move", num_bytes=4 * tokens * h * size // run.plain_parts, count=1, on_rank=first),
        Op("move", num_bytes=norm * own.tokens * h * size // own.plain_parts, on_rank=last),
        *_weight_casts(v * h, run, rank=last),
    )
    if run.impl.omits_logits:
        return (*around, *(dataclasses.replace(op, on_rank=last) for op in _ops_without_logits(shape, own)))
    return (
        *around,
        Op("matmul", tokens, v, h, dtype=run.wide, operator=PRODUCT, on_rank=last),
        Op("move", num_bytes=tokens * v * forward, backward_bytes=tokens * v * backward, on_rank=last),
    )


def outside_saved(shape: Shape, run: FamilyRun) -> OutsideSaved:
    """Return the bytes of what the last norm saves, its output, the logits, their fp32 copy and its log-softmax."""
    if run.impl.omits_logits:
        return _saved_without_logits(shape, run)
    hidden = _last_norm_saved(shape, run) + run.outside.token_bytes(shape.hidden)
    run = run.outside
    logits = run.tokens * (shape.vocab // run.tensor)
    if run.impl.autocasts:
        hidden += shape.vocab // run.tensor * shape.hidden * run.itemsize
    usual = (run.itemsize, run.itemsize) if run.impl.fused_loss else (run.itemsize + 8, 4)
    saved, beside = run.impl.logit_bytes or usual
    return OutsideSaved(hidden + logits * saved, logits * beside)


def _last_norm_saved(shape: Shape, run: FamilyRun) -> int:
    """Return the bytes of what the last norm saves, of a rank's part of the tokens."""
    if not _is_chain(shape, run) or run.itemsize == 4:
        return run.token_bytes(shape.hidden)
    each = _WIDE_NORM_SAVED if run.impl.autocasts else _PLAIN_NORM_SAVED
    return run.tokens * shape.hidden * each // run.plain_parts


# --- The loss without logits (``loss/linear_head.py``): forward makes the logits of some rows, their loss and gradient,
# and the gradients of hidden states and weight, which it saves; backward scales them.

_SUM = 4  # bytes: gradients of the weight are summed in fp32


def _chunks(shape: Shape, run: FamilyRun) -> tuple[int, int]:
    """Return the number of chunks of a rank's rows, and the rows of one."""
    most = default_chunk_size(run.tokens, shape.hidden, _classes(shape, run), on_gpu=True)
    chunks = max(1, -(-run.tokens // most))
    return chunks, -(-run.tokens // chunks)


def _classes(shape: Shape, run: FamilyRun) -> int:
    """Return the most classes that a rank of the tensor axis has: it need not divide them evenly."""
    return -(-shape.vocab // run.vocabulary_parts)


def _ops_without_logits(shape: Shape, run: FamilyRun) -> tuple[Op, ...]:
    h, v, size = shape.hidden, _classes(shape, run), run.itemsize
    chunks, rows = _chunks(shape, run)
    # One kernel reads the logits twice and writes their gradient; of divided classes three do, between which numbers of
    # rows are reduced. The gradient of hidden states is copied to its place, and scaled.
    of_logit = 3 if run.vocabulary_parts == 1 else 4
    forward, backward = rows * chunks * (of_logit * v + 2 * h) * size, rows * chunks * 3 * h * size
    if run.sequence > 1 and run.impl.divides_blocks_alone:
        backward += (run.outside.tokens + run.tokens) * h * size  # a share's gradient, among zeros
    weights = Op("move", num_bytes=_SUM * v * h, backward_bytes=(_SUM + 2 * size) * v * h, of_weights=True)
    return (
        *([weights] if shape.adapters is None else []),
        Op("matmul", rows, v, h, dtype=run.wide, operator=PRODUCT, count=chunks),
        Op("move", num_bytes=forward // chunks, backward_bytes=backward // chunks, count=chunks),
    )


def _saved_without_logits(shape: Shape, run: FamilyRun) -> OutsideSaved:
    """Return the bytes of what the last norm saves, and of the gradients that wait to be scaled.

    Most is held beside them as a chunk has its logits and their gradient, or as backward scales.
    """
    h, v, size = shape.hidden, _classes(shape, run), run.itemsize
    _, rows = _chunks(shape, run)
    own = run.tokens * h * size
    of_weight = v * h if shape.adapters is None else 0
    scaled, of_chunk = own + size * of_weight, own + rows * (2 * v + h) * size
    of_chunk += size * v * h if run.impl.autocasts else 0  # the weight as it is cast, until forward is over
    saved = _last_norm_saved(shape, run) + own + _SUM * of_weight
    # Behind the loss, backward of the norm may hold more.
    is_chain = _is_chain(shape, run) and not run.impl.autocasts
    of_norm = _NORM_HELD * run.tokens * h // run.plain_parts if is_chain else 0
    return OutsideSaved(saved, max(scaled, of_chunk, of_norm - saved))
