"""Cross entropy of half-precision logits without an fp32 copy, and the next-token loss built on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.errors import ModelError
from meshwright.loss.cross_entropy_rows import (
    Rows,
    Softmax,
    check_class_weight,
    check_floating,
    check_options,
    check_plain,
    check_target,
    make_rows,
    mean,
    once,
    row_gradients_,
    row_losses,
    rows_at_a_time,
    slices,
    without_autocast,
)
from meshwright.loss.lazy_logits import LazyLogits
from meshwright.loss.vocabulary_parallel import Vocabulary, parallel_row_losses
from meshwright.runtime import tensor_size
from meshwright.runtime.torch_internals.autograd import Function


def fused_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    parallel: bool = False,
) -> Tensor:
    """Compute ``F.cross_entropy(input.float(), target, …)`` without an fp32 copy (BMTrain's ``FusedCrossEntropy``).

    Between forward and backward it saves the input itself and two fp32 numbers per row; BMTrain saves half-precision
    probabilities, and torch fp32 ones. It never modifies its arguments.

    Args:
        input: Logits (C,), (N, C) or (N, C, d1, …), of any floating-point type. The last form is copied.
        target: Class indices (), (N,) or (N, d1, …).
        weight: Weights of the classes (C,), constants.
        ignore_index: Rows with this target are ignored.
        reduction: ``"mean"`` (over the weights of the targets that count), ``"sum"`` or ``"none"``.
        label_smoothing: Part of the target spread over all classes (Szegedy et al. 2016), 0 to 1.
        parallel: Whether each rank of a tensor group (``init_distributed``'s ``tp_size``) holds a part of the classes,
            in rank order: C is then ``tp_size`` times that of ``input``. Logits are never gathered. Target, weight and
            result are equal on all of them.

    Returns:
        fp32 (fp64 for fp64): 0-dim, or of ``target``'s shape for ``"none"``. A mean over no rows is nan with a gradient
        of 0, as in torch.

    Raises:
        ModelError: When ``input`` or ``weight`` do not fit, or are DTensors; and for the second derivative.
        DataError: When ``target`` is not one class index per row. An index that is no class raises torch's
            ``IndexError`` or ``RuntimeError`` on the CPU, and a device-side assertion on CUDA.
        ConfigError: For an unknown reduction or a smoothing that is not a fraction.
    """
    check_options(reduction, label_smoothing)
    if isinstance(input, LazyLogits):
        if input.are_rows:
            return input.cross_entropy(target, weight, ignore_index, reduction, label_smoothing)
        input = input.materialised()
    groups = tensor_size() if parallel else 1
    _check(input, target, weight, groups)
    logits_NC = input.unsqueeze(0) if input.dim() == 1 else input.movedim(1, -1).reshape(-1, input.shape[1])
    rows = make_rows(target.reshape(-1), input.dtype, weight, ignore_index, label_smoothing)
    loss_N = (
        _RowLosses.apply(logits_NC, *rows)
        if groups == 1
        else parallel_row_losses(logits_NC, rows, Vocabulary.of_tensor_group(logits_NC.shape[1]), sums_upstream=True)
    )
    if reduction == "none":
        return loss_N.view(target.shape)
    return loss_N.sum() if reduction == "sum" else mean(loss_N.sum(), rows)


def _check(input: Tensor, target: Tensor, weight: Tensor | None, groups: int) -> None:
    check_plain("input", input)
    check_plain("target", target)
    check_floating("logits", input)
    if input.dim() == 0:
        raise ModelError(
            "The loss needs logits", expected="shape (C,), (N, C) or (N, C, d1, …)", got="shape ()", fix="add classes"
        )
    check_target(target, tuple(input.shape[:1] + input.shape[2:]) if input.dim() > 1 else ())
    check_class_weight(weight, groups * (input.shape[0] if input.dim() == 1 else input.shape[1]), "weight")


class _RowLosses(Function):
    """Losses (N,) of logits (N, C)."""

    @staticmethod
    def forward(ctx: Any, logits_NC: Tensor, *rows: Any) -> Tensor:
        every = Rows(*rows)
        # Allocated before the large pieces: small tensors between those would keep the allocator from reusing their
        # memory, and the process would grow by an fp32 copy after all.
        loss_N, max_N1, sum_N1 = (torch.empty_like(every.weight_n.unsqueeze(1)) for _ in range(3))
        with without_autocast(logits_NC.device):
            for some in slices(logits_NC.shape[0], rows_at_a_time(logits_NC)):
                loss_n, softmax = row_losses(logits_NC[some], every.part(some))
                loss_N[some, 0], max_N1[some], sum_N1[some] = loss_n, softmax.max_n1, softmax.sum_n1
                del softmax  # free its exponentials before the next ones are made
        ctx.label_smoothing = every.label_smoothing
        row_tensors = every.target_n1, every.valid_n, every.weight_n, every.class_weight_C
        ctx.save_for_backward(logits_NC, *row_tensors, max_N1, sum_N1)
        return loss_N.squeeze(1)

    @staticmethod
    @once("FusedCrossEntropy")
    def backward(ctx: Any, upstream_N: Tensor) -> tuple[Tensor | None, ...]:
        logits_NC, *row_tensors, max_N1, sum_N1 = ctx.saved_tensors
        every = Rows._make([*row_tensors, ctx.label_smoothing])
        gradient_NC = torch.empty_like(logits_NC, memory_format=torch.contiguous_format)
        with without_autocast(logits_NC.device):
            for some in slices(logits_NC.shape[0], rows_at_a_time(logits_NC)):
                exps_nC = (logits_NC[some] - max_N1[some]).exp_()
                softmax = Softmax(exps_nC, max_N1[some], sum_N1[some])
                row_gradients_(softmax, every.part(some), upstream_N[some], gradient_NC[some])
                del exps_nC, softmax
        return gradient_NC, None, None, None, None, None


class FusedCrossEntropy(nn.Module):
    """Module of :func:`fused_cross_entropy`: ``loss_func(input, target)``.

    Args:
        weight: Weights of the classes (C,), constants.
        ignore_index: Target of rows to ignore.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        label_smoothing: 0 to 1.
        parallel: Whether the input is this tensor rank's part of the classes.
    """

    weight: Tensor | None

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        parallel: bool = False,
    ) -> None:
        super().__init__()
        check_options(reduction, label_smoothing)
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.parallel = parallel

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the loss in fp32; see :func:`fused_cross_entropy` for the shapes."""
        return fused_cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            parallel=self.parallel,
        )

    def extra_repr(self) -> str:
        """Return the options."""
        options = f"ignore_index={self.ignore_index}, reduction={self.reduction!r}"
        return f"{options}, label_smoothing={self.label_smoothing}, parallel={self.parallel}"


# --- The loss of language models. Shapes: B batch · T time · V vocabulary.

_IGNORED = -100


def next_token_loss(model_input: Any, output: Any) -> Tensor:
    """Return the mean cross entropy, in nats per token, of predicting token t + 1 from the tokens up to t.

    It is computed in fp32 by :func:`fused_cross_entropy`. Beyond the logits it takes 4 bytes per fp32 logit and 2 per
    half-precision one; ``F.cross_entropy`` takes 12.

    Args:
        model_input: Token ids (B, T), or a mapping with them as ``"input_ids"``.
        output: Logits (B, T, V), or an output with them as ``logits``.

    Raises:
        ModelError: When the output has no logits of that shape.
    """
    ids_BT = model_input["input_ids"] if isinstance(model_input, Mapping) else model_input
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    logits_BTV = output if named is None else named
    if not isinstance(logits_BTV, Tensor) or logits_BTV.dim() != 3 or logits_BTV.shape[:2] != ids_BT.shape:
        shape = f" of shape {tuple(logits_BTV.shape)}" if isinstance(logits_BTV, Tensor) else ""
        raise ModelError(
            "The model's output is not what the next-token loss is made for",
            expected=f"logits of shape ({', '.join(map(str, ids_BT.shape))}, vocabulary), or an output with .logits",
            got=f"{type(logits_BTV).__name__}{shape}",
            fix="return logits, or give a loss of your own",
        )
    # All positions, the last one ignored: cutting it off would copy the logits.
    target_BT = F.pad(ids_BT[:, 1:], (0, 1), value=_IGNORED)
    return fused_cross_entropy(logits_BTV.flatten(0, 1), target_BT.flatten(), ignore_index=_IGNORED)
