"""Running a plain model as one rank of the axes that divide its layers, tokens or experts would."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Protocol, cast

from torch import nn

if TYPE_CHECKING:
    from meshwright.cost import Boundary
    from meshwright.methods import ContextParallel, ExpertParallel, Resolved, SampleRun, TensorParallel, TokensTrace
    from meshwright.methods.sequence.trace import Ranks
    from meshwright.methods.tensor.trace import SaveLog


class Trace(Protocol):
    """What an axis, or several, make of one rank's run; nothing is sent, all is counted."""

    dims: dict[nn.Parameter, int]
    divides_batch: ClassVar[bool]
    """Whether tokens or samples are divided: a model that cannot be traced so cannot be trained so either."""

    def local_shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """The shape that one rank holds."""

    def running(self, log: SaveLog) -> contextlib.AbstractContextManager[None]:
        """Around one forward pass; ``log`` grows with every tensor saved for backward."""

    def boundaries(self, model: nn.Module, log: SaveLog) -> tuple[Boundary, ...]:
        """What the last run sends in one micro-batch."""


class LayersAndTokens:
    """Layers divided by one trace, and tokens by another.

    Args:
        layers: Of a tensor axis.
        tokens: Of sequence and context axes.
    """

    divides_batch: ClassVar[bool] = True

    def __init__(self, layers: Trace, tokens: TokensTrace) -> None:
        self._layers, self._tokens = layers, tokens
        self.dims = layers.dims

    def local_shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """The shape that one rank holds."""
        return self._layers.local_shape(parameter)

    @contextlib.contextmanager
    def running(self, log: SaveLog) -> Iterator[None]:
        """Tokens are cut around the layers."""
        with self._layers.running(log), self._tokens.running(log):
            yield

    def boundaries(self, model: nn.Module, log: SaveLog) -> tuple[Boundary, ...]:
        """What both send."""
        return self._layers.boundaries(model, log) + self._tokens.boundaries(model, log)


def trace_of(resolved: Resolved, model: nn.Module, sample: SampleRun) -> Trace | None:
    """How the axes of a strategy divide the work; None where none does.

    Raises:
        ModelError: When the model cannot be divided so.
    """
    sizes = dict(resolved.axes)
    experts = cast("ExpertParallel | None", resolved.strategy.get("expert_parallel"))
    if experts is not None and sizes.get("expert", 1) > 1:
        return experts.trace(model, sizes["expert"])
    tensor = cast("TensorParallel | None", resolved.strategy.get("tensor_parallel"))
    layers = tensor.trace(model, sizes.get("tensor", 1), sample) if tensor is not None else None
    tokens = _tokens_trace(resolved, model)
    return LayersAndTokens(layers, tokens) if layers and tokens else layers or tokens


def _tokens_trace(resolved: Resolved, model: nn.Module) -> TokensTrace | None:
    sizes, context = dict(resolved.axes), cast("ContextParallel | None", resolved.strategy.get("context_parallel"))
    ring, heads = sizes.get("context", 1), sizes.get("sequence", 1)
    if max(ring, heads) == 1:
        return None
    from meshwright.methods import TokensTrace, TracedContext, TracedSequence

    axes: list[Ranks] = []
    if "sequence_parallel" in resolved.strategy and heads > 1:
        axes.append(functools.partial(TracedSequence, heads, ring))
    if context is not None and ring > 1:
        axes.append(functools.partial(TracedContext, ring, context.balance, heads))
    return TokensTrace(model, *axes) if axes else None


def trace_key(resolved: Resolved) -> tuple[object, ...]:
    """Equal for strategies with one trace."""
    axes = ("tensor", "sequence", "context", "expert")
    named = [resolved.strategy.get(f"{name}_parallel") for name in axes]
    return *named, *(dict(resolved.axes).get(axis, 1) for axis in axes)
