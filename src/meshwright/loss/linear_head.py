"""Cross entropy of a linear head, computed a chunk of tokens at a time, so that all logits never exist at once.

Shapes: N tokens, n of them in a chunk, D width, C classes; of a vocabulary divided over ranks, those of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.errors import ConfigError, ModelError
from meshwright.loss.cross_entropy_rows import (
    Rows,
    check_class_weight,
    check_floating,
    check_options,
    check_plain,
    check_target,
    losses_and_gradients_,
    make_rows,
    mean,
    once,
    row_losses,
    slices,
    wide,
    without_autocast,
)
from meshwright.loss.vocabulary_parallel import Vocabulary, check_classes, gradients_of_parts, losses_of_parts
from meshwright.runtime import computes_on_gpu
from meshwright.runtime.torch_internals.autograd import Function, num_dispatch_modes
from meshwright.runtime.torch_internals.fake_tensors import FakeTensor

# With fewer tokens, reading and writing the weight's gradient takes longer than the products. On an H200 it takes 230/n
# of their time in a chunk of n tokens.
_SMALLEST_CHUNK, _SMALLEST_CHUNK_ON_GPU = 256, 2048


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    chunk_size: int | None = None,
    vocabulary: Vocabulary | None = None,
) -> Tensor:
    """Compute ``F.cross_entropy(F.linear(hidden, weight, bias).float(), target, …)`` without holding the logits.

    With ``"mean"`` and ``"sum"`` forward also computes the gradients and saves them for backward: three products, as
    many as the plain computation. Without gradients it computes the loss alone. With ``"none"`` backward computes the
    logits again, a fourth product. The gradient of the weight is summed over the chunks in fp32.

    Under autocast hidden, weight and bias are cast as for ``F.linear``. Under ``torch.compile`` it runs uncompiled,
    between two graphs.

    Args:
        hidden: Input of the head (…, D), such as (B, S, D); fp16, bf16, fp32 or fp64.
        weight: Weight of the head (C, D), such as the embedding's; its own type may differ only under autocast.
        target: Class indices (…).
        bias: Bias of the head (C,).
        class_weight: Weights of the classes (C,), constants.
        ignore_index: Tokens with this target are ignored.
        reduction: ``"mean"`` (over the weights of the targets that count), ``"sum"`` or ``"none"``.
        label_smoothing: Part of the target spread over all classes (Szegedy et al. 2016), 0 to 1.
        chunk_size: Tokens at a time. None takes as many as make the logits about as large as ``hidden``, at least 256,
            on a GPU 2048.
        vocabulary: Division of the classes over ranks, whose parts of the head ``weight`` and ``bias`` are then; all
            other arguments and the loss are equal on these ranks, and the gradient of ``hidden`` is this rank's part of
            a sum. Collective, in backward too for ``"none"``.

    Returns:
        fp32 (fp64 for fp64): 0-dim, or of ``target``'s shape for ``"none"``. A mean over no tokens is nan with a
        gradient of 0, as in torch.

    Raises:
        ModelError: When shapes or types do not fit, for DTensors, and for the second derivative.
        DataError: When ``target`` is not one class index per token.
        ConfigError: For an option that does not exist or is out of range.
    """
    check_options(reduction, label_smoothing)
    _check_chunk_size(chunk_size)
    options = (class_weight, ignore_index, reduction, label_smoothing, chunk_size, vocabulary)
    if torch.compiler.is_compiling():
        # Traced, all chunks would become one graph, whose partitioner saves their logits for backward.
        return torch.compiler.disable(_linear_cross_entropy)(hidden, weight, target, bias, *options)
    return _linear_cross_entropy(hidden, weight, target, bias, *options)


def _linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    chunk_size: int | None,
    vocabulary: Vocabulary | None,
) -> Tensor:
    hidden, weight, bias = in_autocast_type(hidden, weight, bias)
    _check_head(hidden, weight, bias)
    check_plain("target", target)
    check_target(target, tuple(hidden.shape[:-1]))
    check_class_weight(class_weight, weight.shape[0] if vocabulary is None else vocabulary.size, "class_weight")
    num_tokens, num_classes, width = target.numel(), *weight.shape
    hidden_ND = hidden.reshape(num_tokens, width)
    rows = make_rows(target.reshape(-1), hidden.dtype, class_weight, ignore_index, label_smoothing)
    if vocabulary is not None:
        check_classes(rows, vocabulary)
    chunk = chunk_size or default_chunk_size(num_tokens, width, num_classes, on_gpu=computes_on_gpu(hidden))
    if reduction == "none":
        return _EachLoss.apply(hidden_ND, weight, bias, chunk, vocabulary, *rows).view(target.shape)
    total = _SumOfLosses.apply(hidden_ND, weight, bias, chunk, vocabulary, torch.is_grad_enabled(), *rows)
    return total if reduction == "sum" else mean(total, rows)


def default_chunk_size(num_tokens: int, width: int, num_classes: int, *, on_gpu: bool) -> int:
    """Return the smallest power of two of tokens whose logits are at least as large as ``hidden``; not too few."""
    even = num_tokens * width / max(num_classes, 1)
    return max(_SMALLEST_CHUNK_ON_GPU if on_gpu else _SMALLEST_CHUNK, 1 << max(0, int(even) - 1).bit_length())


def in_autocast_type(*tensors: Tensor | None) -> list[Any]:
    """Cast tensors as autocast would for ``F.linear``; the casts are part of the graph."""
    kind = next(each.device.type for each in tensors if each is not None)
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    takes = [each is not None and each.is_floating_point() and each.dtype != torch.float64 for each in tensors]
    return [each.to(dtype) if take and each is not None else each for take, each in zip(takes, tensors, strict=True)]


def _check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    given = {"hidden": hidden, "weight": weight} | ({} if bias is None else {"bias": bias})
    for name, tensor in given.items():
        check_plain(name, tensor)
        check_floating(name, tensor)
    fits = hidden.dim() >= 1 and weight.dim() == 2 and hidden.shape[-1] == weight.shape[1]
    fits = fits and (bias is None or tuple(bias.shape) == (weight.shape[0],))
    if not fits or len({tensor.dtype for tensor in given.values()}) > 1:
        raise ModelError(
            "Head and hidden states do not fit together",
            expected="hidden (…, D), weight (C, D) and bias (C,) of one type",
            got=", ".join(f"{name} {tuple(tensor.shape)} of {tensor.dtype}" for name, tensor in given.items()),
            fix="pass the input and the weight of the head's nn.Linear; for mixed types use autocast",
        )


def _check_chunk_size(chunk_size: int | None) -> None:
    if chunk_size is not None and (not isinstance(chunk_size, int) or chunk_size < 1):
        raise ConfigError(
            "chunk_size is not a number of tokens", expected="1 or more", got=repr(chunk_size), fix="leave it out"
        )


class _SumOfLosses(Function):
    """The sum of all losses; its gradients are computed in forward, and scaled in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_CD: Tensor,
        bias_C: Tensor | None,
        chunk: int,
        vocabulary: Vocabulary | None,
        train: bool,
        *rows: Any,
    ) -> Tensor:
        head = _Head(weight_CD, bias_C, Rows(*rows), chunk, vocabulary)
        ctx.dtype = hidden_ND.dtype
        if not (train and any(ctx.needs_input_grad)):
            return head_losses(hidden_ND, head).sum()
        loss_N, gradients = head_gradients(hidden_ND, head, None, ctx.needs_input_grad[:3])
        ctx.save_for_backward(*gradients)
        return loss_N.sum()

    @staticmethod
    @once("LinearCrossEntropy")
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (scaled(gradient, upstream, ctx.dtype) for gradient in ctx.saved_tensors)
        return (*gradients, *[None] * 8)


class _EachLoss(Function):
    """Losses (N,); backward, where each one's gradient is known, computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_CD: Tensor,
        bias_C: Tensor | None,
        chunk: int,
        vocabulary: Vocabulary | None,
        *rows: Any,
    ) -> Tensor:
        every = Rows(*rows)
        ctx.chunk, ctx.vocabulary, ctx.label_smoothing = chunk, vocabulary, every.label_smoothing
        ctx.save_for_backward(
            hidden_ND, weight_CD, bias_C, every.target_n1, every.valid_n, every.weight_n, every.class_weight_C
        )
        return head_losses(hidden_ND, _Head(weight_CD, bias_C, every, chunk, vocabulary))

    @staticmethod
    @once("LinearCrossEntropy")
    def backward(ctx: Any, upstream_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_CD, bias_C, *row_tensors = ctx.saved_tensors
        head = _Head(weight_CD, bias_C, Rows._make([*row_tensors, ctx.label_smoothing]), ctx.chunk, ctx.vocabulary)
        _, gradients = head_gradients(hidden_ND, head, upstream_N, ctx.needs_input_grad[:3])
        return (*(None if each is None else each.to(hidden_ND.dtype) for each in gradients), *[None] * 7)


class LinearCrossEntropy(nn.Module):
    """Module of :func:`linear_cross_entropy`: ``loss_func(hidden, head.weight, target)``.

    It has no weight of its own, for the head's may be tied to an embedding, or sharded. Call it in the forward of the
    module that holds the weight, where FSDP has gathered it.

    Args:
        ignore_index: Target of tokens to ignore.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        label_smoothing: 0 to 1.
        class_weight: Weights of the classes (C,), constants.
        chunk_size: Tokens at a time.
    """

    class_weight: Tensor | None

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        class_weight: Tensor | None = None,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__()
        check_options(reduction, label_smoothing)
        _check_chunk_size(chunk_size)
        self.register_buffer("class_weight", class_weight)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.chunk_size = chunk_size

    def forward(self, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the loss in fp32: hidden (…, D), weight (C, D), target (…), bias (C,)."""
        return linear_cross_entropy(
            hidden,
            weight,
            target,
            bias,
            class_weight=self.class_weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            chunk_size=self.chunk_size,
        )

    def extra_repr(self) -> str:
        """Return the options."""
        return (
            f"ignore_index={self.ignore_index}, reduction={self.reduction!r}, "
            f"label_smoothing={self.label_smoothing}, chunk_size={self.chunk_size}"
        )


# --- Losses and gradients of the head.

# Largest part of a product before it is added, or of a gradient that is converted (64 MiB in fp32).
_BLOCK_ELEMENTS = 2**24

# fp16 rounds probabilities below 6e-8 to zero, and with 100,000 classes many are hardly above. So the logits' gradient
# is multiplied by this.
_FP16_LIFT = 256.0


class HeadGradients(NamedTuple):
    """Gradients of a head and its input; None for those that are not needed."""

    hidden_ND: Tensor | None  # in the type of hidden
    weight_CD: Tensor | None  # in at least fp32, as the bias
    bias_C: Tensor | None


class _Head(NamedTuple):
    """A head, its targets, and how many tokens it takes at a time."""

    weight_CD: Tensor
    bias_C: Tensor | None
    rows: Rows
    chunk: int
    vocabulary: Vocabulary | None  # None: this rank has all classes

    def logits(self, hidden_nD: Tensor) -> Tensor:
        """Return the logits (n, C)."""
        return F.linear(hidden_nD, self.weight_CD, self.bias_C)

    def losses_(self, logits_nC: Tensor, some: slice) -> Tensor:
        """Return the losses (n,) of some rows; their logits are overwritten."""
        if self.vocabulary is None:
            return row_losses(logits_nC, self.rows.part(some), overwrite=True)[0]
        return losses_of_parts(logits_nC, self.rows.part(some), self.vocabulary)[0]

    def losses_and_gradients_(self, logits_nC: Tensor, some: slice, upstream_n: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses (n,) of some rows, and the gradient of their logits, which are overwritten."""
        rows, vocabulary = self.rows.part(some), self.vocabulary
        if vocabulary is None:
            return losses_and_gradients_(logits_nC, rows, upstream_n)
        loss_n, max_n1, sum_n1 = losses_of_parts(logits_nC, rows, vocabulary)
        return loss_n, gradients_of_parts(logits_nC, max_n1, sum_n1, rows, upstream_n, vocabulary, overwrite=True)


def head_losses(hidden_ND: Tensor, head: _Head) -> Tensor:
    """Return the loss of every token (N,)."""
    loss_N = torch.empty_like(head.rows.weight_n)
    with without_autocast(hidden_ND.device):
        for some in slices(hidden_ND.shape[0], head.chunk):
            logits_nC = head.logits(hidden_ND[some])
            loss_N[some] = head.losses_(logits_nC, some)
            del logits_nC  # free it before the next ones are made
    return loss_N


def head_gradients(
    hidden_ND: Tensor, head: _Head, upstream_N: Tensor | None, wanted: Sequence[bool]
) -> tuple[Tensor, HeadGradients]:
    """Return the losses, and the gradients of their sum weighted by ``upstream_N``.

    Args:
        hidden_ND: Input of the head.
        head: The head, and its targets.
        upstream_N: Gradient of each loss; None for ones.
        wanted: Which of the gradients of hidden, weight and bias to compute.
    """
    loss_N = torch.empty_like(head.rows.weight_n)
    gradients = _zeros(hidden_ND, head.weight_CD, wanted)
    lift = _FP16_LIFT if upstream_N is None and hidden_ND.dtype == torch.float16 else 1.0
    upstream_N = torch.full_like(loss_N, lift) if upstream_N is None else upstream_N
    with without_autocast(hidden_ND.device):
        for some in slices(hidden_ND.shape[0], head.chunk):
            logits_nC = head.logits(hidden_ND[some])
            loss_N[some], slope_nC = head.losses_and_gradients_(logits_nC, some, upstream_N[some])
            _add(gradients, some, slope_nC, hidden_ND[some], head.weight_CD, 1.0 / lift)
            del logits_nC, slope_nC
    return loss_N, gradients


def _zeros(hidden_ND: Tensor, weight_CD: Tensor, wanted: Sequence[bool]) -> HeadGradients:
    type_of_sums = wide(weight_CD.dtype)
    return HeadGradients(
        torch.empty_like(hidden_ND, memory_format=torch.contiguous_format) if wanted[0] else None,
        torch.zeros(weight_CD.shape, dtype=type_of_sums, device=weight_CD.device) if wanted[1] else None,
        weight_CD.new_zeros(weight_CD.shape[0], dtype=type_of_sums) if wanted[2] else None,
    )


def _add(
    gradients: HeadGradients, some: slice, slope_nC: Tensor, hidden_nD: Tensor, weight_CD: Tensor, factor: float
) -> None:
    """Add the gradients of one chunk; ``slope_nC`` is the gradient of its logits, divided by ``factor``."""
    if gradients.hidden_ND is not None:
        product_nD = _product(slope_nC, weight_CD)
        gradients.hidden_ND[some] = product_nD if factor == 1.0 else product_nD.mul_(factor)
    if gradients.weight_CD is not None and slope_nC.dtype == gradients.weight_CD.dtype:
        # In place; addmm_ is not counted by FlopCounterMode.
        torch.addmm(gradients.weight_CD, slope_nC.t(), hidden_nD, out=gradients.weight_CD)
    elif gradients.weight_CD is not None and _sums_in_fp32(slope_nC):
        own = gradients.weight_CD
        torch.addmm(own, slope_nC.t(), hidden_nD, alpha=factor, out_dtype=own.dtype, out=own)
    elif gradients.weight_CD is not None and _is_counted(slope_nC):
        torch.mm(slope_nC.t(), hidden_nD, out_dtype=gradients.weight_CD.dtype, out=gradients.weight_CD)
    elif gradients.weight_CD is not None:
        num_classes, width = weight_CD.shape
        for block in slices(num_classes, max(1, _BLOCK_ELEMENTS // width)):
            gradients.weight_CD[block].add_(_product(slope_nC[:, block].t(), hidden_nD), alpha=factor)
    if gradients.bias_C is not None:
        gradients.bias_C.add_(slope_nC.sum(0, dtype=gradients.bias_C.dtype), alpha=factor)


def _sums_in_fp32(slope_nC: Tensor) -> bool:
    """Return whether a product of halves can be added to sums in fp32 by its own kernel; not under modes that count."""
    return slope_nC.is_cuda and slope_nC.dtype in (torch.float16, torch.bfloat16) and num_dispatch_modes() == 0


def _is_counted(slope_nC: Tensor) -> bool:
    """Return whether a pass that predicts counts that kernel, which it takes for a product."""
    halves = slope_nC.dtype in (torch.float16, torch.bfloat16)
    return halves and isinstance(slope_nC, FakeTensor) and computes_on_gpu(slope_nC)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply without overflow of fp16 sums: with an fp32 result where the device can, or in fp32."""
    if left.is_cuda and left.dtype in (torch.float16, torch.bfloat16):
        return torch.mm(left, right, out_dtype=torch.float32)
    if left.dtype == torch.float16:
        return left.float() @ right.float()
    return left @ right


def scaled(gradient: Tensor | None, factor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return ``gradient · factor`` (0-dim) in ``dtype``, multiplied in fp32 and rounded once."""
    if gradient is None:
        return None
    result = torch.empty_like(gradient, dtype=dtype)
    # A 0-dim factor takes no part in type promotion: it would be rounded to half precision first.
    factor = factor.reshape([1] * gradient.dim())
    per_row = max(1, gradient[:1].numel())
    for some in slices(gradient.shape[0], max(1, _BLOCK_ELEMENTS // per_row)):
        torch.mul(gradient[some], factor, out=result[some])
    return result
