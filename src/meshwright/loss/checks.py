"""What the cross entropies refuse, before anything is computed."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.errors import ConfigError, DataError, ModelError, did_you_mean

REDUCTIONS = ("mean", "sum", "none")


def check_options(reduction: str, label_smoothing: float) -> None:
    """Refuses a reduction that does not exist and a smoothing that is not a fraction."""
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
    """Refuses a sharded tensor: its other rows or columns are on other ranks."""
    if isinstance(tensor, DTensor):
        raise ModelError(
            f"The loss cannot work on a DTensor ({name})",
            expected="the whole tensor, on every rank",
            got=f"placements {tuple(tensor.placements)}",
            fix=f"pass {name}.full_tensor(), or compute the loss in the forward of the module that holds it, where it "
            "is gathered",
        )


def check_floating(name: str, tensor: Tensor) -> None:
    """Refuses what has no gradient."""
    if not tensor.is_floating_point():
        raise ModelError(
            f"The loss needs {name} that are floating-point numbers",
            expected="fp16, bf16 or fp32",
            got=str(tensor.dtype),
            fix=f"convert the {name}, or check the order of the arguments",
        )


def check_target(target: Tensor, expected: tuple[int, ...]) -> None:
    """Refuses targets that are not one class index per row."""
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
    """Refuses class weights that are not one constant per class."""
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
