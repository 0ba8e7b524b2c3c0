"""Operators whose results recomputation keeps: their names, and running a module under such a choice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from meshwright.errors import StrategyError

SELECTIVE = frozenset(
    {
        "aten.addmm", "aten.convolution", "aten.mm", "aten._grouped_mm", "aten._scaled_grouped_mm", "aten._scaled_mm",
        "aten._efficient_attention_forward", "aten._flash_attention_forward",
        "aten._scaled_dot_product_cudnn_attention", "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_flash_attention", "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_fused_attention_overrideable",
        "_c10d_functional.all_gather_into_tensor", "_c10d_functional.all_reduce",
        "_c10d_functional.all_to_all_single", "_c10d_functional.reduce_scatter_tensor",
        "flash_attn._flash_attn_forward", "flash_attn._flash_attn_varlen_forward",
    }
)  # fmt: skip
"""What ``policy="selective"`` keeps: products with weights, fused attention and functional collectives.

Products of activations (``aten.bmm``) are not among them: scores of attention that is not fused are large and cheap,
and the first to be recomputed (Korthikanti et al. 2022, §5)."""

_running: list[frozenset[str]] = []  # the choice of the modules whose forward runs now, innermost last


def operator_name(operator: Any) -> str:
    """An operator's name without its overload: ``"aten.mm"``."""
    schema = getattr(operator, "_schema", None)
    return schema.name.replace("::", ".") if schema is not None else f"higher_order.{operator.name()}"


def can_keep(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a result can stand for running the operator again.

    Not if it changes its arguments; a view holds no result of its own; and one that draws random numbers must draw them
    again, or those that follow would be other ones.
    """
    schema = getattr(operator, "_schema", None)
    if schema is None:
        return True
    if schema.is_mutable or operator.is_view:
        return False
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return True
    for index, argument in enumerate(schema.arguments):
        if argument.name == "dropout_p":
            given = args[index] if index < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(given == 0)
    return False


def kept_now(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the module that runs now keeps the result of this call."""
    return bool(_running) and operator_name(operator) in _running[-1] and can_keep(operator, args, kwargs)


def selective_contexts(kept: frozenset[str]) -> tuple[Any, Any]:
    """The contexts of forward and of recomputation for torch's checkpoint."""

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = operator_name(operator) in kept and can_keep(operator, args, kwargs)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)
    return contexts


@contextlib.contextmanager
def keeping(kept: frozenset[str]) -> Iterator[None]:
    """Around the forward of a module: lets :func:`kept_now` know its choice."""
    if torch.compiler.is_compiling():
        yield
        return
    _running.append(kept)
    try:
        yield
    finally:
        _running.pop()


def operator_names(value: Any) -> Any:
    """An operator or its name, or several -> a tuple of names without overloads; ``full`` and ``selective`` stay.

    Raises:
        StrategyError: When one is not known to torch, or its results cannot be kept.
    """
    if value is None or value in ("full", "selective"):
        return value
    listed = value if isinstance(value, tuple | list | set | frozenset) else [value]
    return tuple(sorted({_known_name(each) for each in listed}))


def _known_name(value: Any) -> str:
    packet = getattr(value, "overloadpacket", value)
    written = str(packet) if isinstance(packet, torch._ops.OpOverloadPacket) else packet
    if not isinstance(written, str):
        raise _unknown(value)
    namespace, _, rest = written.replace("::", ".").partition(".")
    name = rest.partition(".")[0]
    found = getattr(getattr(torch.ops, namespace), name, None) if namespace.isidentifier() and name else None
    if not isinstance(found, torch._ops.OpOverloadPacket):
        raise _unknown(value)
    overloads = [getattr(found, overload) for overload in found.overloads()]
    if all(each._schema.is_mutable or each.is_view for each in overloads):
        raise StrategyError(
            f"checkpoint: the results of {namespace}.{name} cannot be kept",
            expected="operators that return new tensors",
            got="one that returns a view, or changes its arguments",
            fix="name the operators whose results it sees, such as aten.mm",
        )
    return f"{namespace}.{name}"


def _unknown(value: Any) -> StrategyError:
    return StrategyError(
        "checkpoint: policy names an unknown operator",
        expected="'full', 'selective', or operators such as 'aten.mm' that are registered in this process",
        got=repr(value),
        fix="correct the name, or import the package that registers it first",
    )
