"""Recompute modules under torch's checkpoint, and choose the operators whose results are kept.

The method ``checkpoint`` calls :func:`recompute`, which wraps the forward of modules. Predictions ask :func:`kept_now`
for the same choice while a model runs on fake tensors.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint as torch_checkpoint,
    create_selective_checkpoint_contexts,
)

from meshwright.cost.activations import EVERY_SECOND, FROM_LOW_RANK, PRODUCTS, TO_LOW_RANK, keeps
from meshwright.errors import ModelError, StrategyError, join_names
from meshwright.nn import (
    SameBuffers,
    carried,
    is_cache,
    is_compiled,
    outside_compiled,
    recompute_contexts,
    wrap_method,
)
from meshwright.runtime.torch_internals.operators import ANNOTATIONS, SCHEMA, OpOverloadPacket, schema_of

# Where results are kept, torch numbers the calls of every operator, and fails if recomputation makes more of them.
# FSDP2 takes a unit inside of a block that runs again for a root, and annotates that, too.
SAC_IGNORED_OPS.update(ANNOTATIONS)

SELECTIVE = PRODUCTS | frozenset(
    {
        "aten._efficient_attention_forward", "aten._flash_attention_forward",
        "aten._scaled_dot_product_cudnn_attention", "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_flash_attention", "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_fused_attention_overrideable",
        "_c10d_functional.all_gather_into_tensor", "_c10d_functional.all_reduce",
        "_c10d_functional.all_to_all_single", "_c10d_functional.reduce_scatter_tensor",
        "flash_attn._flash_attn_forward", "flash_attn._flash_attn_varlen_forward", TO_LOW_RANK,
        "meshwright.ring_attention",
    }
)  # fmt: skip
"""Operators whose results ``policy="selective"`` keeps: products with weights, fused attention, collectives.

Products of activations (``aten.bmm``) are not among them: the scores of unfused attention are large and cheap, and the
first to recompute (Korthikanti et al. 2022, §5)."""

POLICIES = ("full", "selective", "every_second")
"""The policies that have names."""
OPERATORS_OF: Mapping[str, frozenset[str]] = {"selective": SELECTIVE, "every_second": SELECTIVE | {EVERY_SECOND}}
"""The operators whose results a policy keeps, see :func:`meshwright.cost.activations.keeps`."""

_running: list[_Products] = []  # of the modules whose forward runs now, innermost last


class _Products:
    """The choice of the results that one run of a module keeps, which counts its products.

    Args:
        kept: See :func:`meshwright.cost.activations.keeps`.
    """

    def __init__(self, kept: frozenset[str]) -> None:
        self._kept, self._count = kept, 0

    def keeps(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return whether the next call's result is kept."""
        name, turn = call_name(operator, args), self._count
        self._count += name in PRODUCTS
        return keeps(self._kept, name, turn) and can_keep(operator, args, kwargs)


def operator_name(operator: Any) -> str:
    """Return an operator's name without its overload: ``"aten.mm"``."""
    schema = getattr(operator, SCHEMA, None)
    return schema.name.replace("::", ".") if schema is not None else f"higher_order.{operator.name()}"


# Rows and columns of a product's weight, by its arguments.
_WEIGHT_IN: Mapping[str, Callable[[tuple[Any, ...]], tuple[int, int]]] = {
    "aten.addmm": lambda args: args[2].shape,
    "aten.mm": lambda args: args[1].shape,
    "meshwright.four_bit_product": lambda args: (args[2][1], args[2][0]),
}
_INSIDE = {"meshwright.four_bit_product": "aten.mm"}  # compiled code has it as one operator: see nn/four_bit.py
_LOW_RANK, _NARROWER = 128, 8


def call_name(operator: Any, args: tuple[Any, ...]) -> str:
    """Return the name by which recomputation chooses a call: an operator's, or that of products of low rank."""
    name = operator_name(operator)
    if name not in _WEIGHT_IN:
        return name
    rows, columns = _WEIGHT_IN[name](args)
    if not is_of_low_rank(rows, columns):
        return _INSIDE.get(name, name)
    return FROM_LOW_RANK if rows < columns else TO_LOW_RANK


def is_of_low_rank(rows: int, columns: int) -> bool:
    """Return whether a matrix is of a rank so low that a GPU waits for memory while it multiplies with it."""
    rank = min(rows, columns)
    return rank <= _LOW_RANK and _NARROWER * rank <= max(rows, columns)


def can_keep(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether recomputation can use a kept result instead of running the operator again.

    It cannot for operators that change their arguments, views, which have no storage of their own, and operators that
    draw random numbers: skipping one would change all later draws.
    """
    schema = getattr(operator, SCHEMA, None)
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
    """Return whether the module that runs now keeps the result of this call."""
    return bool(_running) and _running[-1].keeps(operator, args, kwargs)


def selective_contexts(kept: frozenset[str]) -> tuple[Any, Any]:
    """Return the contexts of forward and of recomputation for torch's checkpoint."""
    first, again = _Products(kept), _Products(kept)

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = (again if context.is_recompute else first).keeps(operator, args, kwargs)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)
    return contexts


@contextlib.contextmanager
def keeping(kept: frozenset[str]) -> Iterator[None]:
    """Enter the forward of a module whose choice :func:`kept_now` is to answer."""
    if torch.compiler.is_compiling():
        yield
        return
    _running.append(_Products(kept))
    try:
        yield
    finally:
        _running.pop()


def operator_names(value: Any) -> Any:
    """Turn an operator, a name, or several into names without overloads; the names of policies stay.

    Raises:
        StrategyError: When torch does not know one, or its results cannot be kept.
    """
    if value is None or value in POLICIES:
        return value
    listed = value if isinstance(value, tuple | list | set | frozenset) else [value]
    return tuple(sorted({_known_name(each) for each in listed}))


def _known_name(value: Any) -> str:
    packet = getattr(value, "overloadpacket", value)
    written = str(packet) if isinstance(packet, OpOverloadPacket) else packet
    if not isinstance(written, str):
        raise _unknown(value)
    namespace, _, rest = written.replace("::", ".").partition(".")
    name = rest.partition(".")[0]
    found = getattr(getattr(torch.ops, namespace), name, None) if namespace.isidentifier() and name else None
    if not isinstance(found, OpOverloadPacket):
        raise _unknown(value)
    overloads = [getattr(found, overload) for overload in found.overloads()]
    if all(schema_of(each).is_mutable or each.is_view for each in overloads):
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
        expected=f"{join_names(map(repr, POLICIES))}, or operators such as 'aten.mm' that this process has registered",
        got=repr(value),
        fix="correct the name, or import the package that registers it first",
    )


# --- Running a module's forward under torch's checkpoint, which runs it again in backward

# Activation offloading moves what autograd saves; kept results stay out of it, which torch 2.15 makes a choice.
_RESPECT = "respect_saved_tensors_hooks"
_AS_EVER: dict[str, Any] = {_RESPECT: False} if _RESPECT in inspect.signature(torch_checkpoint).parameters else {}

_RECOMPUTED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_KEEPING: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules that keep results of operators


def recompute(modules: Sequence[nn.Module], kept: frozenset[str], *, no_reentrant: bool) -> None:
    """Make modules run their forward again in backward; parameter names stay as they are.

    Args:
        modules: The modules to wrap.
        kept: Operators whose results are kept; only without reentrant autograd.
        no_reentrant: False uses torch's reentrant implementation.
    """
    _RECOMPUTED.update(modules)
    run = functools.partial(_selective, kept) if kept else _whole
    if kept and no_reentrant:
        _KEEPING.update(modules)
    around = functools.partial(_recomputed, run if no_reentrant else _reentrant)
    for module in modules:
        wrap_method(module, "forward", around)


def recomputes(model: nn.Module) -> bool:
    """Return whether :func:`recompute` has wrapped a module of the model."""
    return any(map(is_recomputed, model.modules()))


def is_recomputed(module: nn.Module) -> bool:
    """Return whether :func:`recompute` has wrapped the module."""
    return module in _RECOMPUTED


def keeps_results(model: nn.Module) -> bool:
    """Return whether a module keeps results of operators outside of autograd; compiled modules save them in it."""
    return any(module in _KEEPING and not is_compiled(module) for module in outside_compiled(model))


def _owner(forward: Callable[..., Any]) -> nn.Module:
    """Return the module of a wrapped forward, which ``wrap_method`` passes with its module as first argument."""
    module: nn.Module = forward.args[0]  # type: ignore[attr-defined]
    return module


def _recomputed(run: Callable[..., Any], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``run`` where a backward may follow, and the plain forward elsewhere."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    cache = next((value for value in (*args, *kwargs.values()) if is_cache(value)), None)
    if cache is not None:
        raise ModelError(
            "checkpoint: a block is called with a cache of keys and values, which recomputing would fill a second time",
            expected="training without past_key_values",
            got=type(cache).__name__,
            fix="leave checkpoint out; prefix tuning cannot do without its cache, LoRA and prompt tuning need none",
        )
    return run(forward, *args, **kwargs)


def _whole(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return torch_checkpoint(
        carried(forward), *args, use_reentrant=False, **recompute_contexts([_owner(forward)]), **kwargs
    )


def _selective(kept: frozenset[str], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    contexts = recompute_contexts([_owner(forward)], functools.partial(selective_contexts, kept))
    with keeping(kept):
        return torch_checkpoint(carried(forward), *args, use_reentrant=False, **_AS_EVER, **contexts, **kwargs)


def _reentrant(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # Reentrant checkpoint takes only positional arguments, and only those get gradients.
    names, count, same, forward = list(kwargs), len(args), SameBuffers([_owner(forward)]), carried(forward)

    def positional(*every: Any) -> Any:
        # The first run is without gradients.
        with same.again() if torch.is_grad_enabled() else same.first():
            return forward(*every[:count], **dict(zip(names, every[count:], strict=True)))

    return torch_checkpoint(positional, *args, *kwargs.values(), use_reentrant=True)
