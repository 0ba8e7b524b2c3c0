"""Cross entropy of logits whose classes are split over a tensor group. N rows · c classes of this rank · C of all.

Nobody gathers logits: the ranks agree on every row's maximum, then on its sums (two all-reduces of a few numbers per
row; Shoeybi et al. 2019, §3). The formulas are those of :mod:`meshwright.loss.rows`; target and max are of all classes,
exponentials and gradients of this rank's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function

from meshwright.distributed.members import Members, members_of
from meshwright.distributed.transport import reduced
from meshwright.loss.once import once
from meshwright.loss.rows import Rows, rows_at_a_time, slices, sum_of_weights, wide, without_autocast
from meshwright.runtime import tensor_mesh


class _Mine(NamedTuple):
    """What this rank's classes have to do with each row."""

    target_n1: Tensor  # the target among them; 0 where it is another rank's
    is_mine_n1: Tensor
    class_weight_c: Tensor | None


def parallel_row_losses(logits_Nc: Tensor, rows: Rows) -> Tensor:
    """The loss of every row (N,), equal on all ranks of the tensor group; 0 where it is ignored. Collective.

    Backward adds the ranks' upstream gradients up, so that a mean over ranks counts the loss once.

    Args:
        logits_Nc: Of equal shape on all ranks of the group: the r-th has classes c·r to c·(r+1).
        rows: Of all C classes, equal on all ranks of the group.
    """
    return _ParallelRowLosses.apply(logits_Nc, *rows)


class _ParallelRowLosses(Function):
    @staticmethod
    def forward(ctx: Any, logits_Nc: Tensor, *rows: Any) -> Tensor:
        every, members = Rows(*rows), members_of(tensor_mesh())
        num_classes = logits_Nc.shape[1] * members.size
        _check_targets(every, num_classes)
        mine = _mine(every, logits_Nc.shape[1], members)
        with without_autocast(logits_Nc.device):
            max_N1 = reduced(logits_Nc.amax(1, keepdim=True), "max", members).to(wide(logits_Nc.dtype))
            sums_3N = torch.empty(3, logits_Nc.shape[0], dtype=max_N1.dtype, device=max_N1.device)
            for some in slices(logits_Nc.shape[0], rows_at_a_time(logits_Nc)):
                _add_up(logits_Nc[some] - max_N1[some], mine, some, every.label_smoothing, sums_3N[:, some])
            sum_N, at_target_N, smooth_N = reduced(sums_3N, "sum", members).unbind()
        log_N = sum_N.log()
        loss_N = (1.0 - every.label_smoothing) * every.weight_n * (log_N - at_target_N)
        if every.label_smoothing > 0:
            loss_N += every.label_smoothing / num_classes * (sum_of_weights(every, num_classes) * log_N - smooth_N)
        ctx.label_smoothing, ctx.members = every.label_smoothing, members
        row_tensors = every.target_n1, every.kept_n, every.weight_n, every.class_weight_C
        ctx.save_for_backward(logits_Nc, *row_tensors, max_N1, sum_N.unsqueeze(1))
        return torch.where(every.kept_n, loss_N, 0.0)

    @staticmethod
    @once("FusedCrossEntropy(parallel=True)")
    def backward(ctx: Any, upstream_N: Tensor) -> tuple[Tensor | None, ...]:
        logits_Nc, *row_tensors, max_N1, sum_N1 = ctx.saved_tensors
        every = Rows._make([*row_tensors, ctx.label_smoothing])
        mine = _mine(every, logits_Nc.shape[1], ctx.members)
        upstream_N = reduced(upstream_N, "sum", ctx.members)
        num_classes = logits_Nc.shape[1] * ctx.members.size
        # An ignored row's upstream gradient can be 1/0, in a mean that the caller takes over no rows at all.
        upstream_N1 = torch.where(every.kept_n, upstream_N, 0.0).unsqueeze(1)
        hard_N1 = upstream_N1 * (1.0 - every.label_smoothing) * every.weight_n.unsqueeze(1)
        soft_N1 = upstream_N1 * (every.label_smoothing / num_classes)
        scale_N1 = (hard_N1 + soft_N1 * sum_of_weights(every, num_classes)) / sum_N1
        gradient_Nc = torch.empty_like(logits_Nc, memory_format=torch.contiguous_format)
        with without_autocast(logits_Nc.device):
            for some in slices(logits_Nc.shape[0], rows_at_a_time(logits_Nc)):
                slope_nc = (logits_Nc[some] - max_N1[some]).exp_().mul_(scale_N1[some])
                if every.label_smoothing > 0:
                    weight = 1.0 if mine.class_weight_c is None else mine.class_weight_c
                    slope_nc -= soft_N1[some] * weight
                slope_nc.scatter_add_(1, mine.target_n1[some], torch.where(mine.is_mine_n1[some], -hard_N1[some], 0.0))
                gradient_Nc[some] = slope_nc
                del slope_nc
        return gradient_Nc, None, None, None, None, None


def _add_up(shifted_nc: Tensor, mine: _Mine, some: slice, label_smoothing: float, sums_3n: Tensor) -> None:
    """Writes this rank's parts of the sum of exponentials, the logit at the target, and the weighted sum of logits."""
    at_target_n1 = shifted_nc.gather(1, mine.target_n1[some])
    sums_3n[1] = torch.where(mine.is_mine_n1[some], at_target_n1, 0.0).squeeze(1)
    weight_c = mine.class_weight_c
    sums_3n[2] = 0.0
    if label_smoothing > 0:
        sums_3n[2] = shifted_nc.sum(1) if weight_c is None else shifted_nc.mv(weight_c)
    sums_3n[0] = shifted_nc.exp_().sum(1)


def _mine(rows: Rows, num_local: int, members: Members) -> _Mine:
    first = members.rank * num_local
    is_mine_n1 = (rows.target_n1 >= first) & (rows.target_n1 < first + num_local)
    local_n1 = torch.where(is_mine_n1, rows.target_n1 - first, 0)
    weight_C = rows.class_weight_C
    return _Mine(local_n1, is_mine_n1, None if weight_C is None else weight_C[first : first + num_local])


def _check_targets(rows: Rows, num_classes: int) -> None:
    """No rank would miss a class that is nobody's."""
    inside = (rows.target_n1 >= 0) & (rows.target_n1 < num_classes)
    torch._assert_async(inside.all(), f"targets are not in 0..{num_classes - 1}")  # type: ignore[call-arg]
