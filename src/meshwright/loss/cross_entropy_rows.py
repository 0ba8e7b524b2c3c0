"""Cross entropy of a few rows of logits at a time, in at least fp32, and the checks that all cross entropies share.

Shapes: n rows (tokens) of N, C classes. With f = logits − max, s = Σ exp f, t the target, w the class weights and ε the
label smoothing (Szegedy et al. 2016),

loss = (1 − ε)·w_t·(log s − f_t) + ε/C·Σ_c w_c·(log s − f_c)
∂loss/∂f_c = ((1 − ε)·w_t + ε/C·Σ w)·exp(f_c)/s − (1 − ε)·w_t·[c = t] − ε/C·w_c

as ``torch.nn.functional.cross_entropy`` computes. Max and s are kept apart, for their log-sum-exp would lose digits of
logits that are large and close together.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.errors import ConfigError, DataError, ModelError, did_you_mean
from meshwright.runtime import computes_on_gpu
from meshwright.runtime.torch_internals.autograd import num_dispatch_modes
from meshwright.runtime.torch_internals.fake_tensors import FakeTensor


class _Refuse(torch.autograd.Function):
    """Identity of gradients whose backward raises the error."""

    @staticmethod
    def forward(ctx: Any, name: str, anchor: Tensor, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.name = name
        return tuple(None if gradient is None else gradient.view_as(gradient) for gradient in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise ModelError(
            f"The second derivative of {ctx.name} is not available",
            expected="one backward pass through the loss",
            got="a gradient that is differentiated again (create_graph=True)",
            fix="use torch.nn.functional.cross_entropy for losses that contain gradients",
        )


def once(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a Function's ``backward`` so that differentiating its results is an error.

    Otherwise a second differentiation would silently miss terms that depend on the saved values.

    Args:
        name: Name of the loss, for the error.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def wrapper(ctx: Any, *gradients: Tensor) -> Any:
            with torch.no_grad():
                results = backward(ctx, *gradients)
            if not torch.is_grad_enabled() or torch.compiler.is_compiling():  # compiled graphs refuse it themselves
                return results
            anchor = torch.empty(0, requires_grad=True)
            return _Refuse.apply(name, anchor, *results)

        return wrapper

    return decorate


# --- Checks of options, targets and tensors.

REDUCTIONS = ("mean", "sum", "none")


def check_options(reduction: str, label_smoothing: float) -> None:
    """Check that the reduction exists and the smoothing is a fraction."""
    if reduction not in REDUCTIONS:
        raise ConfigError(
            f"Unknown reduction {reduction!r}{did_you_mean(str(reduction), REDUCTIONS)}",
            expected=f"one of {', '.join(REDUCTIONS)}",
            got=repr(reduction),
            fix="use one of these",
        )
    if not 0.0 <= label_smoothing <= 1.0:
        raise ConfigError(
            "label_smoothing is not a fraction",
            expected="0 to 1",
            got=repr(label_smoothing),
            fix="use 0 for targets that are certain",
        )


def check_plain(name: str, tensor: Tensor) -> None:
    """Check that a tensor is no DTensor, whose other rows or columns are on other ranks."""
    if isinstance(tensor, DTensor):
        raise ModelError(
            f"The loss cannot work on a DTensor ({name})",
            expected="the whole tensor, on every rank",
            got=f"placements {tuple(tensor.placements)}",
            fix=f"pass {name}.full_tensor(), or compute the loss in the forward of the module that holds it, where it "
            "is gathered",
        )


def check_floating(name: str, tensor: Tensor) -> None:
    """Check that a tensor is floating-point, so that it has a gradient."""
    if not tensor.is_floating_point():
        raise ModelError(
            f"The loss needs {name} that are floating-point numbers",
            expected="fp16, bf16 or fp32",
            got=str(tensor.dtype),
            fix=f"convert the {name}, or check the order of the arguments",
        )


def check_target(target: Tensor, expected: tuple[int, ...]) -> None:
    """Check that targets are one class index per row."""
    if target.is_floating_point() or target.is_complex() or tuple(target.shape) != expected:
        raise DataError(
            "The targets are not one class per row",
            expected=f"class indices (int64) of shape {expected}",
            got=f"{target.dtype} of shape {tuple(target.shape)}",
            fix="for class probabilities use torch.nn.functional.cross_entropy"
            if target.is_floating_point()
            else "give every row of the input one target",
        )


def check_class_weight(class_weight: Tensor | None, num_classes: int, name: str) -> None:
    """Check that class weights are one constant per class."""
    if class_weight is None:
        return
    check_plain(name, class_weight)
    if tuple(class_weight.shape) != (num_classes,) or class_weight.requires_grad:
        raise ModelError(
            f"{name} is not one constant per class",
            expected=f"shape ({num_classes},), without a gradient",
            got=f"shape {tuple(class_weight.shape)}{', with a gradient' if class_weight.requires_grad else ''}",
            fix=f"give as many weights as there are classes, detached (the loss is not differentiated by {name})",
        )


# --- Losses and gradients of rows.

# Elements processed at a time: about as many as fit a core's cache, or fill a GPU (64 MiB in fp32).
_FAKE_SLICES = 16
_CPU_ELEMENTS, _GPU_ELEMENTS = 2**18, 2**24


class Rows(NamedTuple):
    """Targets of rows, and how much each one counts."""

    target_n1: Tensor  # int64; class 0 where the row is ignored
    valid_n: Tensor  # bool
    weight_n: Tensor  # of the target's class; 0 where the row is ignored
    class_weight_C: Tensor | None
    label_smoothing: float

    def part(self, rows: slice) -> Rows:
        """Return the targets of some rows."""
        return self._replace(target_n1=self.target_n1[rows], valid_n=self.valid_n[rows], weight_n=self.weight_n[rows])


class Softmax(NamedTuple):
    """Softmax before the division: exp(logits − max), and its sum."""

    exps_nC: Tensor
    max_n1: Tensor
    sum_n1: Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type to compute in: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def make_rows(
    target_n: Tensor, dtype: torch.dtype, class_weight_C: Tensor | None, ignore_index: int, label_smoothing: float
) -> Rows:
    """Prepare targets: which rows count, and how much; ``dtype`` is that of the logits."""
    valid_n = target_n != ignore_index
    target_n = torch.where(valid_n, target_n, 0).long()
    if class_weight_C is None:
        weight_n = valid_n.to(wide(dtype))
    else:
        class_weight_C = class_weight_C.to(wide(dtype))
        weight_n = torch.where(valid_n, class_weight_C[target_n], 0.0)
    return Rows(target_n.unsqueeze(1), valid_n, weight_n, class_weight_C, label_smoothing)


def row_losses(logits_nC: Tensor, rows: Rows, *, overwrite: bool = False) -> tuple[Tensor, Softmax]:
    """Return the loss of every row (n,), 0 where it is ignored, and the softmax for the gradient.

    ``overwrite`` computes in the logits' own memory if their type allows.
    """
    max_n1 = logits_nC.amax(1, keepdim=True).to(wide(logits_nC.dtype))
    shifted_nC = logits_nC.sub_(max_n1) if overwrite and logits_nC.dtype == max_n1.dtype else logits_nC - max_n1
    at_target_n = shifted_nC.gather(1, rows.target_n1).squeeze(1)
    smooth_n = None
    if rows.label_smoothing > 0:
        smooth_n = shifted_nC.sum(1) if rows.class_weight_C is None else shifted_nC.mv(rows.class_weight_C)
    exps_nC = shifted_nC.exp_()
    sum_n1 = exps_nC.sum(1, keepdim=True)
    log_n = sum_n1.squeeze(1).log()
    loss_n = (1.0 - rows.label_smoothing) * rows.weight_n * (log_n - at_target_n)
    if smooth_n is not None:
        num_classes = logits_nC.shape[1]
        loss_n += rows.label_smoothing / num_classes * (sum_of_weights(rows, num_classes) * log_n - smooth_n)
    return torch.where(rows.valid_n, loss_n, 0.0), Softmax(exps_nC, max_n1, sum_n1)


def row_gradients_(softmax: Softmax, rows: Rows, upstream_n: Tensor, out_nC: Tensor) -> Tensor:
    """Write the logits' gradient into ``out_nC`` and return it; ``softmax.exps_nC`` is overwritten, and may be it.

    ``upstream_n`` is the gradient of each row's loss.
    """
    exps_nC, num_classes = softmax.exps_nC, softmax.exps_nC.shape[1]
    # An ignored row's upstream gradient can be 1/0, if the caller takes a mean over no rows.
    upstream_n1 = torch.where(rows.valid_n, upstream_n, 0.0).unsqueeze(1)
    hard_n1 = upstream_n1 * (1.0 - rows.label_smoothing) * rows.weight_n.unsqueeze(1)
    soft_n1 = upstream_n1 * (rows.label_smoothing / num_classes)
    scale_n1 = (hard_n1 + soft_n1 * sum_of_weights(rows, num_classes)) / softmax.sum_n1
    at_target_n1 = exps_nC.gather(1, rows.target_n1) * scale_n1 - hard_n1
    if rows.label_smoothing == 0:
        torch.mul(exps_nC, scale_n1, out=out_nC)
    elif rows.class_weight_C is None:
        torch.sub(exps_nC.mul_(scale_n1), soft_n1, out=out_nC)
        at_target_n1 -= soft_n1
    else:
        out_nC.copy_(exps_nC.mul_(scale_n1).addcmul_(soft_n1, rows.class_weight_C, value=-1.0))
        at_target_n1 -= soft_n1 * rows.class_weight_C[rows.target_n1]
    return out_nC.scatter_(1, rows.target_n1, at_target_n1.to(out_nC.dtype))


def losses_and_gradients_(logits_nC: Tensor, rows: Rows, upstream_n: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses of rows (n,), and the gradient of the logits, which are overwritten.

    On a GPU one compiled pass does it where torch can compile; else it is done for a few rows at a time, whose numbers
    in fp32 stay in the cache.
    """
    if not computes_on_gpu(logits_nC):
        loss_n, softmax = row_losses(logits_nC, rows, overwrite=True)
        # In fp32 the exponentials have overwritten the logits already.
        return loss_n, row_gradients_(softmax, rows, upstream_n, logits_nC)
    if _is_counted(logits_nC, rows):
        # The kernel moves the logits twice, and their gradient.
        return logits_nC.amax(1).to(rows.weight_n.dtype), logits_nC * upstream_n.unsqueeze(1).to(logits_nC.dtype)
    kernel = _kernel(_plain_rows, logits_nC, rows)
    if kernel is not None:
        losses_and_slopes: tuple[Tensor, Tensor] = kernel(
            logits_nC, rows.target_n1, rows.valid_n, rows.weight_n, upstream_n
        )
        return losses_and_slopes
    loss_n, gradient_nC = torch.empty_like(rows.weight_n), torch.empty_like(logits_nC)
    for some in slices(logits_nC.shape[0], rows_at_a_time(logits_nC)):
        loss_n[some], softmax = row_losses(logits_nC[some], rows.part(some), overwrite=True)
        row_gradients_(softmax, rows.part(some), upstream_n[some], gradient_nC[some])
        del softmax
    return loss_n, gradient_nC


# Passes over logits that a compiler makes one kernel of, for losses without smoothing: there weights of classes are
# weights of rows.

_Pass = Callable[..., Any]


def _is_counted(logits_nC: Tensor, rows: Rows) -> bool:
    """Return whether a pass that predicts counts what such a kernel would move."""
    return rows.label_smoothing == 0 and isinstance(logits_nC, FakeTensor) and computes_on_gpu(logits_nC)


def _kernel(function: _Pass, logits_nC: Tensor, rows: Rows) -> _Pass | None:
    """Return a pass as one kernel, where it can be for these logits."""
    if rows.label_smoothing > 0 or not logits_nC.is_cuda or torch.compiler.is_compiling() or num_dispatch_modes():
        return None
    return _compiled(function) if _can_compile() else None


@functools.cache
def _compiled(function: _Pass) -> _Pass:
    compiled: _Pass = torch.compile(function, fullgraph=True)
    return compiled


@functools.cache
def _can_compile() -> bool:
    """Return whether torch can compile for CUDA here; a notice says so if it cannot."""
    from meshwright.runtime.torch_internals.compilers import missing_compiler

    try:
        missing = missing_compiler("cuda")
        if not missing:  # Triton also needs a C compiler, and says so when it compiles
            torch.compile(lambda number: number * 2 + 1)(torch.ones(8, device="cuda"))
    except Exception as error:
        missing = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    if missing:
        warnings.warn(f"The loss is computed by more kernels: none can be compiled here ({missing})", stacklevel=2)
    return not missing


def one_pass_sums(
    logits_nC: Tensor, max_n1: Tensor, place_n1: Tensor, here_n1: Tensor, rows: Rows
) -> tuple[Tensor, Tensor] | None:
    """Return sums of exponentials and the targets' shifted logits (n, 1), by one kernel; None where there is none.

    Args:
        logits_nC: Logits.
        max_n1: What they are shifted by.
        place_n1: Places of the targets among the classes.
        here_n1: Whether a target is one of the classes; its logit is 0 otherwise.
        rows: Targets.
    """
    if _is_counted(logits_nC, rows):  # the kernel reads the logits
        sum_n1 = logits_nC.amax(1, keepdim=True).to(max_n1.dtype)
        return sum_n1, sum_n1
    kernel = _kernel(_plain_sums, logits_nC, rows)
    return None if kernel is None else kernel(logits_nC, max_n1, place_n1, here_n1)


def _plain_sums(logits_nC: Tensor, max_n1: Tensor, place_n1: Tensor, here_n1: Tensor) -> tuple[Tensor, Tensor]:
    shifted_nC = logits_nC.to(max_n1.dtype) - max_n1
    return shifted_nC.exp().sum(1, keepdim=True), torch.where(here_n1, shifted_nC.gather(1, place_n1), 0.0)


def one_pass_slopes(
    logits_nC: Tensor,
    max_n1: Tensor,
    sum_n1: Tensor,
    place_n1: Tensor,
    here_n1: Tensor,
    rows: Rows,
    upstream_n: Tensor,
) -> Tensor | None:
    """Return the gradient of logits, by one kernel; None where there is none. See :func:`one_pass_sums`."""
    hard_n1 = (torch.where(rows.valid_n, upstream_n, 0.0) * rows.weight_n).unsqueeze(1)
    if _is_counted(logits_nC, rows):  # the kernel reads the logits, and writes the gradient
        return logits_nC * hard_n1.to(logits_nC.dtype)
    kernel = _kernel(_plain_slopes, logits_nC, rows)
    return None if kernel is None else kernel(logits_nC, max_n1, sum_n1, place_n1, here_n1, hard_n1)


def _plain_slopes(
    logits_nC: Tensor, max_n1: Tensor, sum_n1: Tensor, place_n1: Tensor, here_n1: Tensor, hard_n1: Tensor
) -> Tensor:
    exps_nC = (logits_nC.to(max_n1.dtype) - max_n1).exp()
    is_target_nC = (torch.arange(logits_nC.shape[1], device=logits_nC.device) == place_n1) & here_n1
    return (exps_nC * (hard_n1 / sum_n1) - torch.where(is_target_nC, hard_n1, 0.0)).to(logits_nC.dtype)


def _plain_rows(
    logits_nC: Tensor, target_n1: Tensor, valid_n: Tensor, weight_n: Tensor, upstream_n: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the losses and the gradient of rows without smoothing and class weights, to be compiled."""
    wide_nC = logits_nC.to(wide(logits_nC.dtype))
    shifted_nC = wide_nC - wide_nC.amax(1, keepdim=True)
    exps_nC = shifted_nC.exp()
    sum_n1 = exps_nC.sum(1, keepdim=True)
    loss_n = weight_n * (sum_n1.log() - shifted_nC.gather(1, target_n1)).squeeze(1)
    scale_n1 = (torch.where(valid_n, upstream_n, 0.0) * weight_n).unsqueeze(1)
    is_target_nC = torch.arange(logits_nC.shape[1], device=logits_nC.device) == target_n1
    slope_nC = exps_nC * (scale_n1 / sum_n1) - torch.where(is_target_nC, scale_n1, 0.0)
    return torch.where(valid_n, loss_n, 0.0), slope_nC.to(logits_nC.dtype)


def sum_of_weights(rows: Rows, num_classes: int) -> Tensor | float:
    """Return the sum of all classes' weights."""
    return float(num_classes) if rows.class_weight_C is None else rows.class_weight_C.sum()


def mean(total: Tensor, rows: Rows) -> Tensor:
    """Divide the summed loss by the weights of the targets that count, as torch does; nan when no row counts."""
    some_count = rows.valid_n.any()
    # Not 0/0, whose gradient would be nan, too; torch's is 0.
    return torch.where(some_count, total, torch.nan) / torch.where(some_count, rows.weight_n.sum(), 1.0)


def rows_at_a_time(logits_NC: Tensor) -> int:
    """Return the number of rows of logits to process at once."""
    num_rows, num_classes = logits_NC.shape
    # All of them for a compiler, which fuses everything into one pass.
    if torch.compiler.is_compiling():
        return max(num_rows, 1)
    each = max(1, (_CPU_ELEMENTS if logits_NC.device.type == "cpu" else _GPU_ELEMENTS) // max(num_classes, 1))
    # A pass over fake tensors, which predicts memory and time, takes a few slices for many.
    return max(each, -(-num_rows // _FAKE_SLICES)) if isinstance(logits_NC, FakeTensor) else each


def slices(num_rows: int, rows_at_a_time: int) -> Iterator[slice]:
    """Cut ``num_rows`` into slices."""
    for start in range(0, num_rows, rows_at_a_time):
        yield slice(start, min(start + rows_at_a_time, num_rows))


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Return a context without autocast, which would compute products in half precision."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):  # ``meta`` has no autocast
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
