"""A linear head, its losses and its gradients, some tokens at a time. N tokens · n of them · D width · C classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.loss.rows import Rows, row_gradients_, row_losses, slices, wide, without_autocast

# Largest part of a product that waits to be added, or of a gradient that is converted (64 MiB in fp32).
_BLOCK_ELEMENTS = 2**24

# The logits' gradient before it is divided by the number of tokens: fp16 rounds probabilities below 6e-8 to nothing,
# and with 100,000 classes many are hardly above. Multiplied by this they keep their digits.
_FP16_LIFT = 256.0


class HeadGradients(NamedTuple):
    """None for what needs no gradient."""

    hidden_ND: Tensor | None  # in the type of hidden
    weight_CD: Tensor | None  # in at least fp32, as the bias
    bias_C: Tensor | None


def head_losses(hidden_ND: Tensor, weight_CD: Tensor, bias_C: Tensor | None, rows: Rows, chunk: int) -> Tensor:
    """The loss of every token (N,)."""
    loss_N = torch.empty_like(rows.weight_n)
    with without_autocast(hidden_ND.device):
        for some in slices(hidden_ND.shape[0], chunk):
            logits_nC = F.linear(hidden_ND[some], weight_CD, bias_C)
            loss_N[some] = row_losses(logits_nC, rows.part(some), overwrite=True)[0]
            del logits_nC  # else it would live beside the next ones
    return loss_N


def head_gradients(
    hidden_ND: Tensor,
    weight_CD: Tensor,
    bias_C: Tensor | None,
    rows: Rows,
    chunk: int,
    upstream_N: Tensor | None,
    wanted: Sequence[bool],
) -> tuple[Tensor, HeadGradients]:
    """The losses, and the gradients of their sum weighted by ``upstream_N``.

    Args:
        hidden_ND: See :func:`head_losses`, as are the next four.
        weight_CD: Head.
        bias_C: Head.
        rows: What each token is to predict.
        chunk: Tokens at a time.
        upstream_N: The gradient of each loss; None for ones, which gives the gradients of the plain sum.
        wanted: Which of the gradients of hidden, weight and bias to compute.
    """
    loss_N = torch.empty_like(rows.weight_n)
    gradients = _zeros(hidden_ND, weight_CD, wanted)
    lift = _FP16_LIFT if upstream_N is None and hidden_ND.dtype == torch.float16 else 1.0
    upstream_N = torch.full_like(loss_N, lift) if upstream_N is None else upstream_N
    with without_autocast(hidden_ND.device):
        for some in slices(hidden_ND.shape[0], chunk):
            logits_nC = F.linear(hidden_ND[some], weight_CD, bias_C)
            loss_N[some], softmax = row_losses(logits_nC, rows.part(some), overwrite=True)
            # In fp32 the exponentials already lie where the logits were; in half precision the logits are done with.
            row_gradients_(softmax, rows.part(some), upstream_N[some], logits_nC)
            del softmax
            _add(gradients, some, logits_nC, hidden_ND[some], weight_CD, 1.0 / lift)
            del logits_nC
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
    """Adds the part of one chunk; ``slope_nC`` is the gradient of its logits, over ``factor``."""
    if gradients.hidden_ND is not None:
        product_nD = _product(slope_nC, weight_CD)
        gradients.hidden_ND[some] = product_nD if factor == 1.0 else product_nD.mul_(factor)
    if gradients.weight_CD is not None and slope_nC.dtype == gradients.weight_CD.dtype:
        # In place; addmm_ is not counted by FlopCounterMode.
        torch.addmm(gradients.weight_CD, slope_nC.t(), hidden_nD, out=gradients.weight_CD)
    elif gradients.weight_CD is not None:
        num_classes, width = weight_CD.shape
        for block in slices(num_classes, max(1, _BLOCK_ELEMENTS // width)):
            gradients.weight_CD[block].add_(_product(slope_nC[:, block].t(), hidden_nD), alpha=factor)
    if gradients.bias_C is not None:
        gradients.bias_C.add_(slope_nC.sum(0, dtype=gradients.bias_C.dtype), alpha=factor)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """A product that no fp16 sum overflows: in fp32 where the device can, or where fp16 would need it."""
    if left.is_cuda and left.dtype in (torch.float16, torch.bfloat16):
        return torch.mm(left, right, out_dtype=torch.float32)
    if left.dtype == torch.float16:
        return left.float() @ right.float()
    return left @ right


def scaled(gradient: Tensor | None, factor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """``gradient · factor`` (0-dim) in ``dtype``, multiplied in fp32 and rounded once."""
    if gradient is None:
        return None
    result = torch.empty_like(gradient, dtype=dtype)
    # With dims, the factor takes part in type promotion; a 0-dim one would be rounded to half precision first.
    factor = factor.reshape([1] * gradient.dim())
    per_row = max(1, gradient[:1].numel())
    for some in slices(gradient.shape[0], max(1, _BLOCK_ELEMENTS // per_row)):
        torch.mul(gradient[some], factor, out=result[some])
    return result
