"""Cross entropy of logits whose classes are divided over ranks. N rows · c of C classes (one rank's).

Three numbers per row are reduced over the ranks (Shoeybi et al. 2019, §3): the largest logit, the sum of exponentials,
and the target's logit. :mod:`meshwright.loss.cross_entropy_rows` has the formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.comm.collectives import all_gather
from meshwright.comm.transport import members_of, reduced
from meshwright.loss.cross_entropy_rows import (
    Rows,
    check_class_weight,
    check_options,
    check_target,
    make_rows,
    mean,
    once,
    one_pass_slopes,
    one_pass_sums,
    rows_at_a_time,
    slices,
    sum_of_weights,
    without_autocast,
)
from meshwright.runtime import tensor_mesh
from meshwright.runtime.torch_internals.autograd import Function
from meshwright.runtime.torch_internals.tensors import assert_async


@dataclass(frozen=True)
class Vocabulary:
    """Division of classes over ranks, and the collectives of these ranks.

    Args:
        first: This rank's first class.
        size: Number of all classes.
        sum: Sums a tensor over the ranks, without gradients.
        max: Takes the maximum over the ranks, without gradients.
        gather: Gathers all ranks' logits (…, c) to (…, C), with gradients.
    """

    first: int
    size: int
    sum: Callable[[Tensor], Tensor]
    max: Callable[[Tensor], Tensor]
    gather: Callable[[Tensor], Tensor]

    @classmethod
    def of_tensor_group(cls, num_local: int) -> Vocabulary:
        """Divide classes over BMTrain's tensor group: ``num_local`` on every rank, in rank order."""
        members = members_of(tensor_mesh())
        return cls(
            first=members.rank * num_local,
            size=members.size * num_local,
            sum=lambda value: reduced(value, "sum", members),
            max=lambda value: reduced(value, "max", members),
            gather=lambda part: (
                all_gather(part.movedim(-1, 0).contiguous(), tensor_mesh()).flatten(0, 1).movedim(0, -1)
            ),
        )


def parallel_cross_entropy(
    logits_Nc: Tensor,
    target_N: Tensor,
    vocabulary: Vocabulary,
    class_weight_C: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute ``torch.nn.functional.cross_entropy`` of the whole logits, in at least fp32, without gathering them.

    Collective.

    Args:
        logits_Nc: This rank's logits, of any floating-point type.
        target_N: Class indices, equal on all ranks.
        vocabulary: Division of the classes.
        class_weight_C: Weights of all classes, constants.
        ignore_index: Rows with this target are ignored.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        label_smoothing: 0 to 1.

    Returns:
        fp32 (fp64 for fp64), equal on all ranks: 0-dim, or (N,) for ``"none"``.

    Raises:
        ModelError: When the class weights do not fit; and for the second derivative.
        DataError: When the target is not one class index per row.
        ConfigError: For an unknown reduction or a smoothing that is not a fraction.
    """
    check_options(reduction, label_smoothing)
    check_target(target_N, tuple(logits_Nc.shape[:1]))
    check_class_weight(class_weight_C, vocabulary.size, "weight")
    rows = make_rows(target_N, logits_Nc.dtype, class_weight_C, ignore_index, label_smoothing)
    loss_N = parallel_row_losses(logits_Nc, rows, vocabulary)
    if reduction == "none":
        return loss_N
    return loss_N.sum() if reduction == "sum" else mean(loss_N.sum(), rows)


def parallel_row_losses(
    logits_Nc: Tensor, rows: Rows, vocabulary: Vocabulary, *, sums_upstream: bool = False
) -> Tensor:
    """Return the loss of every row (N,), equal on all ranks; 0 where it is ignored. Collective.

    Args:
        logits_Nc: This rank's logits.
        rows: Targets among all C classes, equal on all ranks.
        vocabulary: Division of the classes.
        sums_upstream: Whether every rank's loss counts, so that backward sums their upstream gradients as BMTrain's
            layers do. Else one loss counts, which all ranks compute alike.
    """
    check_classes(rows, vocabulary)
    loss_N: Tensor = _ParallelRowLosses.apply(logits_Nc, vocabulary, sums_upstream, *rows)
    return loss_N


def check_classes(rows: Rows, vocabulary: Vocabulary) -> None:
    """Check that targets are classes, on a GPU without waiting.

    No rank would notice an index that is none: each would take it for another rank's.
    """
    inside = (rows.target_n1 >= 0) & (rows.target_n1 < vocabulary.size)
    assert_async(inside.all(), f"targets are not in 0..{vocabulary.size - 1}")  # type: ignore[call-arg]


class _ParallelRowLosses(Function):
    """Losses (N,) of logits (N, c)."""

    @staticmethod
    def forward(ctx: Any, logits_Nc: Tensor, vocabulary: Vocabulary, sums_upstream: bool, *rows: Any) -> Tensor:
        every = Rows(*rows)
        loss_N, max_N1, sum_N1 = losses_of_parts(logits_Nc, every, vocabulary)
        ctx.vocabulary, ctx.sums_upstream, ctx.label_smoothing = vocabulary, sums_upstream, every.label_smoothing
        row_tensors = every.target_n1, every.valid_n, every.weight_n, every.class_weight_C
        ctx.save_for_backward(logits_Nc, *row_tensors, max_N1, sum_N1.clone())
        return loss_N

    @staticmethod
    @once("parallel_cross_entropy")
    def backward(ctx: Any, upstream_N: Tensor) -> tuple[Tensor | None, ...]:
        logits_Nc, *row_tensors, max_N1, sum_N1 = ctx.saved_tensors
        every = Rows._make([*row_tensors, ctx.label_smoothing])
        if ctx.sums_upstream:
            upstream_N = ctx.vocabulary.sum(upstream_N)
        gradient_Nc = gradients_of_parts(logits_Nc, max_N1, sum_N1, every, upstream_N, ctx.vocabulary)
        return (gradient_Nc, *[None] * 7)


def losses_of_parts(logits_nc: Tensor, rows: Rows, vocabulary: Vocabulary) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of every row (n,), 0 where it is ignored, the largest logit and the sum of exponentials (n, 1).

    Collective, without gradients; all results are equal on all ranks.
    """
    max_n1 = vocabulary.max(logits_nc.amax(1, keepdim=True).to(rows.weight_n.dtype))
    with without_autocast(logits_nc.device):
        sums_Kn1 = vocabulary.sum(_local_sums(logits_nc, max_n1, rows, vocabulary))
    log_n, at_target_n = sums_Kn1[0].squeeze(1).log(), sums_Kn1[1].squeeze(1)
    loss_n = (1.0 - rows.label_smoothing) * rows.weight_n * (log_n - at_target_n)
    if rows.label_smoothing > 0:
        total = sum_of_weights(rows, vocabulary.size)
        loss_n += rows.label_smoothing / vocabulary.size * (total * log_n - sums_Kn1[2].squeeze(1))
    return torch.where(rows.valid_n, loss_n, 0.0), max_n1, sums_Kn1[0]


def gradients_of_parts(
    logits_Nc: Tensor,
    max_N1: Tensor,
    sum_N1: Tensor,
    rows: Rows,
    upstream_N: Tensor,
    vocabulary: Vocabulary,
    *,
    overwrite: bool = False,
) -> Tensor:
    """Return the gradient of this rank's logits.

    ``upstream_N`` is the gradient of each row's loss; the other arguments are those and results of
    :func:`losses_of_parts`. ``overwrite`` allows computing in the logits' own memory.
    """
    place_N1, here_N1 = _places(rows, vocabulary.first, logits_Nc.shape[1])
    with without_autocast(logits_Nc.device):
        slopes_Nc = one_pass_slopes(logits_Nc, max_N1, sum_N1, place_N1, here_N1, rows, upstream_N)
    if slopes_Nc is not None:
        return slopes_Nc
    weights_c = _local_weights(rows, logits_Nc, vocabulary.first)
    # An ignored row's upstream gradient can be 1/0, if the caller takes a mean over no rows.
    upstream_N1 = torch.where(rows.valid_n, upstream_N, 0.0).unsqueeze(1)
    hard_N1 = upstream_N1 * (1.0 - rows.label_smoothing) * rows.weight_n.unsqueeze(1)
    soft_N1 = upstream_N1 * (rows.label_smoothing / vocabulary.size)
    scale_N1 = (hard_N1 + soft_N1 * sum_of_weights(rows, vocabulary.size)) / sum_N1
    out_Nc = logits_Nc if overwrite else torch.empty_like(logits_Nc, memory_format=torch.contiguous_format)
    with without_autocast(logits_Nc.device):
        for some in slices(logits_Nc.shape[0], rows_at_a_time(logits_Nc)):
            slope_nc = (logits_Nc[some] - max_N1[some]).exp_().mul_(scale_N1[some])
            if rows.label_smoothing > 0:
                slope_nc -= soft_N1[some] * weights_c
            slope_nc.scatter_add_(1, place_N1[some], torch.where(here_N1[some], -hard_N1[some], 0.0))
            out_Nc[some] = slope_nc
            del slope_nc  # free it before the next one is made
    return out_Nc


def _places(rows: Rows, first: int, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return the target's index among this rank's classes (0 if it is not one of them), and whether it is one."""
    place_N1 = rows.target_n1 - first
    here_N1 = (place_N1 >= 0) & (place_N1 < num_classes)
    return torch.where(here_N1, place_N1, 0), here_N1


def _local_weights(rows: Rows, logits_Nc: Tensor, first: int) -> Tensor:
    num_classes = logits_Nc.shape[1]
    if rows.class_weight_C is None:
        return rows.weight_n.new_ones(num_classes)
    return rows.class_weight_C[first : first + num_classes]


def _local_sums(logits_nc: Tensor, max_n1: Tensor, rows: Rows, vocabulary: Vocabulary) -> Tensor:
    """Return, of every row, the sum of exponentials, the target's logit, and with smoothing the weighted sum."""
    place_n1, here_n1 = _places(rows, vocabulary.first, logits_nc.shape[1])
    sums = one_pass_sums(logits_nc, max_n1, place_n1, here_n1, rows)
    if sums is not None:
        return torch.stack(sums)
    smooth = rows.label_smoothing > 0
    weights_c = _local_weights(rows, logits_nc, vocabulary.first)
    sums_Kn1 = max_n1.new_empty((3 if smooth else 2, *max_n1.shape))
    for some in slices(logits_nc.shape[0], rows_at_a_time(logits_nc)):
        shifted_nc = logits_nc[some] - max_n1[some]
        sums_Kn1[1, some] = torch.where(here_n1[some], shifted_nc.gather(1, place_n1[some]), 0.0)
        if smooth:
            sums_Kn1[2, some, 0] = shifted_nc.mv(weights_c)
        sums_Kn1[0, some] = shifted_nc.exp_().sum(1, keepdim=True)
        del shifted_nc
    return sums_Kn1
