"""Replace attention in blocks that see only a part of the tokens: torch's, and transformers' with sinks."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from meshwright.errors import ModelError
from meshwright.methods.tensor.axis_exchange import as_products
from meshwright.methods.tokens.ring_attention import (
    Alone,
    AttentionOver,
    Ring,
    attend_in_ring,
    outputs_of,
)
from meshwright.methods.tokens.token_order import TokenOrder, with_four_dims

Attend = Callable[..., torch.Tensor]


class TokenRanks(ABC):
    """The ranks along one axis that hold the parts of one sequence."""

    axis: ClassVar[str]
    order: TokenOrder
    tokens: int | None = None
    """Number of tokens of the sequence that runs; ``token_split.py`` sets it. None: the ranks have equal parts."""

    def whole(self, part: int) -> int:
        """Return the number of tokens of all ranks, without padding, where each rank has ``part``."""
        every = part * self.order.size
        return self.tokens if self.tokens is not None and self.order.padded(self.tokens) == every else every

    @abstractmethod
    def gather(self, hidden: torch.Tensor) -> torch.Tensor:
        """Gather (batch, tokens / n, features) to all tokens, in order; backward sums gradients and scatters them."""

    @property
    def place(self) -> tuple[int, int]:
        """This rank's index along the axis, and the axis' size."""
        return self.order.index, self.order.size

    @abstractmethod
    def total(self, part: torch.Tensor) -> torch.Tensor:
        """Sum over the axis; backward sums gradients, too."""

    @abstractmethod
    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute ``scaled_dot_product_attention`` of this rank's queries over the keys and values of all ranks.

        Args:
            query: (batch, heads, tokens / n, features).
            key: (batch, heads, tokens / n, features); fewer heads with ``enable_gqa``.
            value: Like ``key``.
            attn_mask: Mask for all tokens, as on one device: (…, tokens or 1, tokens).
            dropout_p: As in torch.
            is_causal: As in torch.
            scale: As in torch.
            enable_gqa: As in torch.
            sinks: See :func:`attention_with_sinks`.

        Returns:
            (batch, heads, tokens / n, features of ``value``).

        Raises:
            ModelError: When it is not attention among these tokens; on every rank of the axis.
        """


class AttentionCalls(TorchFunctionMode):
    """Calls ``attend`` in place of ``scaled_dot_product_attention`` wherever it is called inside.

    Eager attention with sinks of transformers' models (GPT-OSS) becomes a call of :func:`attention_with_sinks`, which
    is replaced, too.

    Args:
        attend: Computes attention.
        compare: Is given what a model's own attention with sinks returns, and ours; None: the former is not computed.

    Attributes:
        count: Number of such calls.
    """

    def __init__(self, attend: Attend, compare: Callable[[torch.Tensor, torch.Tensor], None] | None = None) -> None:
        super().__init__()
        self._attend, self._compare = attend, compare
        self._eager = contextlib.ExitStack()
        self.count = 0

    def __enter__(self) -> Self:
        """Begin to replace."""
        if not torch.compiler.is_compiling():
            self._eager.enter_context(_eager_attention(self._with_sinks))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Replace nothing any more."""
        super().__exit__(*error)
        self._eager.close()

    def _with_sinks(self, own: Callable[..., Any], module: Any, *tensors: Any, **options: Any) -> Any:
        """Compute eager attention of a transformers model; ``own`` is the model's function."""
        if "s_aux" not in options:
            return own(module, *tensors, **options)
        query, key, value, mask, *_ = (*tensors, options.get("attention_mask"))
        found = attend_with_sinks(query, key, value, mask, options)
        if self._compare is not None:
            self._compare(own(module, *tensors, **options)[0], found)
        return found, None

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace attention; run any other function as it is."""
        if func is _RING and args[5] == _NUMBER_ALONE:  # what attention with sinks is in compiled code
            self.count += 1
            query, key, value, mask, sinks, _, is_causal, scale, _ = args
            return self._attend(
                query, key, value, mask, 0.0, is_causal, scale=scale, enable_gqa=True, sinks=sinks
            ), None
        if func is not scaled_dot_product_attention and func is not attention_with_sinks:
            return func(*args, **(kwargs or {}))
        self.count += 1
        return self._attend(*args, **(kwargs or {}))


@contextlib.contextmanager
def _eager_attention(replaced: Callable[..., Any]) -> Iterator[None]:
    """Call ``replaced`` where transformers' models look their own eager attention up, with that in front."""
    interface = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", None)
    look_up = getattr(interface, "get_interface", None)
    if look_up is None:
        yield
        return

    def get_interface(implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        found: Callable[..., Any] = look_up(implementation, default)
        return functools.partial(replaced, found) if implementation == "eager" else found

    before = vars(interface).get("get_interface")
    vars(interface)["get_interface"] = get_interface
    try:
        yield
    finally:
        if before is None:
            del vars(interface)["get_interface"]
        else:
            vars(interface)["get_interface"] = before


# --- Attention with sinks, and rings in compiled code

# [Note: rings in compiled code] Torch captures no sends between neighbours, and masks are read while attention runs. So
# compiled code has a whole ring as one operator, of whose results it knows the shapes alone. Operators take numbers and
# no objects: rings have one.

_RINGS: weakref.WeakValueDictionary[int, Ring] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


def number_of(ring: Ring) -> int:
    """Return the number of a new ring; it has that as long as it lives."""
    number = next(_NUMBERS)
    _RINGS[number] = ring
    return number


_ALONE = Alone()
_NUMBER_ALONE = number_of(_ALONE)
_ARGUMENTS = "Tensor? mask, Tensor? sinks, int ring, bool is_causal, float? scale, SymInt tokens"


@torch.library.custom_op(
    "meshwright::ring_attention",
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, {_ARGUMENTS}) -> (Tensor, Tensor)",
)
def ring_in_compiled_code(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    ring: int,
    *how: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend as one operator; see [Note: rings in compiled code]. Return the output, and its log-sum-exp."""
    attention = AttentionOver.of(_RINGS[ring], mask, sinks, *how)
    return attention.forward(query, key, value, with_four_dims(mask) if mask is not None else None, sinks)


@ring_in_compiled_code.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = outputs_of(query, value.shape[-1])
    return out.to(query.dtype), lse


@torch.library.custom_op(
    "meshwright::ring_attention_backward",
    mutates_args=(),
    schema="(Tensor gradient, Tensor out, Tensor lse, Tensor query, Tensor key, Tensor value, "
    f"{_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _ring_backward(
    gradient: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    ring: int,
    *how: Any,
) -> tuple[torch.Tensor, ...]:
    attention = AttentionOver.of(_RINGS[ring], mask, sinks, *how)
    mask = with_four_dims(mask) if mask is not None else None
    found = attention.backward(gradient, query, key, value, mask, sinks, out, lse, trains_sinks=True)
    of_query, *others, of_sinks = found
    laid_out = of_query if of_query.stride() == query.stride() else torch.empty_like(query).copy_(of_query)
    return laid_out, *others, of_sinks if of_sinks is not None else query.new_empty(0)


@_ring_backward.register_fake
def _(gradient: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
    query, key, value, _, sinks, *_ = given
    return *map(torch.empty_like, (query, key, value)), query.new_empty(0) if sinks is None else torch.empty_like(sinks)


_RING: Any = torch.ops.meshwright.ring_attention.default


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    tensors, ctx.how = inputs[:5], inputs[5:]
    ctx.save_for_backward(*output, *tensors)
    ctx.mark_non_differentiable(output[1])


def _back(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    query, key, value, sinks = _ring_backward(gradient, *ctx.saved_tensors, *ctx.how)
    return query, key, value, None, sinks if ctx.needs_input_grad[4] else None, *(None,) * 4


ring_in_compiled_code.register_autograd(_back, setup_context=_keep)


def attend_with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    options: Mapping[str, Any],
    *,
    is_causal: bool = False,
) -> torch.Tensor:
    """Attend as transformers' functions are asked to.

    Args:
        query: (batch, heads, queries, features).
        key: (batch, groups, keys, features).
        value: Like ``key``.
        mask: As torch's attention takes it.
        options: ``s_aux``, the sinks or None, ``dropout`` and ``scaling``.
        is_causal: Whether a query sees the keys up to its own.

    Returns:
        (batch, queries, heads, features of ``value``).
    """
    grouped, sinks = key.shape[1] != query.shape[1], options.get("s_aux")
    attend: Attend = scaled_dot_product_attention
    if sinks is not None:
        attend = functools.partial(attention_with_sinks, sinks=sinks)
    how = {"scale": options.get("scaling"), "enable_gqa": grouped}
    out = attend(query, key, value, mask, options.get("dropout", 0.0), is_causal, **how)
    return out.transpose(1, 2).contiguous()


def attention_with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """Compute ``scaled_dot_product_attention`` with one more score per head that brings no value: its sink (heads).

    Raises:
        ModelError: With dropout.
    """
    tensors = (query, key, value, sinks)
    if not torch.compiler.is_compiling() and has_torch_function(tensors):
        answer: torch.Tensor = handle_torch_function(
            attention_with_sinks, tensors, *tensors[:3], attn_mask, dropout_p, is_causal,
            scale=scale, enable_gqa=enable_gqa, sinks=sinks,
        )  # fmt: skip
        return answer
    if dropout_p > 0:
        raise ModelError(
            "Attention with sinks is computed without dropout",
            expected="dropout_p=0",
            got=str(dropout_p),
            fix="switch the dropout of attention weights off (attention_dropout=0 in the model's config)",
        )
    tokens = query.shape[2]
    if torch.compiler.is_compiling():
        products = map(as_products, tensors[:3])
        out, _ = _RING(*products, attn_mask, sinks, _NUMBER_ALONE, is_causal, scale, tokens)
        return out
    return attend_in_ring(_ALONE, *tensors[:3], attn_mask, tokens, is_causal=is_causal, scale=scale, sinks=sinks)


@contextlib.contextmanager
def grouped_keys() -> Iterator[None]:
    """Let transformers pass grouped keys and values to attention, so that they are sent without repetition.

    Otherwise it repeats their heads if there is a mask, as there always is in a pass over fake tensors.
    """
    if torch.compiler.is_compiling():  # its graph would break: ``compile`` does this around it
        yield
        return
    name = "TRANSFORMERS_SDPA_FORCE_GQA"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def answering(path: str, ranks: TokenRanks) -> Callable[..., Any]:
    """Return the wrapper of a block's forward in which ``ranks`` compute attention over all tokens."""

    def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        calls = AttentionCalls(ranks.attend)
        with grouped_keys(), calls:
            output = forward(*args, **kwargs)
        if not calls.count:
            raise cannot_intercept(path, ranks.order.method)
        return output

    return run


def cannot_intercept(path: str, method: str) -> ModelError:
    """Return the error for a block that calls no attention that can be replaced."""
    return ModelError(
        f"{method}: {path} calls no attention that can be replaced",
        expected="calls of torch.nn.functional.scaled_dot_product_attention in every block",
        got="none",
        fix='use it in the block; load a transformers model with attn_implementation="sdpa"; leave compile out where '
        "attention has sinks",
    )


def check_among_parts(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, method: str) -> None:
    """Refuse attention that is not among the tokens that the ranks divide, such as cross-attention.

    Raises:
        ModelError: On every rank of the axis, since their parts have the same shape.
    """
    shapes = [tuple(tensor.shape) for tensor in (query, key, value)]
    if any(len(shape) != 4 for shape in shapes) or len({(shape[0], shape[2]) for shape in shapes}) > 1:
        raise ModelError(
            f"{method}: attention is not among the tokens that the ranks divide",
            expected="queries, keys and values (batch, heads, tokens, features) of the same tokens",
            got=", ".join(map(str, shapes)),
            fix="use fsdp or tensor_parallel; cross-attention is not covered",
        )


def check_mask(mask: torch.Tensor, tokens: int, method: str) -> None:
    """Refuse masks that do not cover all ``tokens``.

    Raises:
        ModelError: On every rank of the axis.
    """
    if mask.shape[-1] != tokens or (mask.dim() > 1 and mask.shape[-2] not in (1, tokens)):
        raise ModelError(
            f"{method}: an attention mask does not cover all tokens",
            expected=f"a mask (…, {tokens} or 1, {tokens}), made outside the blocks or for all tokens",
            got=str(tuple(mask.shape)),
            fix="make the mask before the first block, or use is_causal=True",
        )
