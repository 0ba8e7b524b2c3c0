"""An expert axis in a trace: what a rank sends and receives where all experts get as many tokens. For predictions.

A trace runs without data, so nothing is routed anywhere. A rank computes as many rows as it sends: here those of its
own tokens. A block around listed experts, whose forward looks at the routes, is replaced by what it asks in the mean.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal
from unittest import mock

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from meshwright.cost import Boundary
from meshwright.methods.expert.layers import ExpertLayer, ListedExperts, StackedExperts
from meshwright.methods.expert.listed import answer_dtype
from meshwright.methods.expert.proof import prove
from meshwright.methods.expert.stacked import Call
from meshwright.methods.traced_transformers import without_grouped_kernels
from meshwright.nn import class_names

_COUNT_BYTES = 8  # a number of rows


class ExpertTrace:
    """Lets a plain model run as one of the ranks of an expert axis would; nothing is sent, all is counted.

    Args:
        model: The model.
        layers: Its experts.
        ranks: Size of the axis.

    Raises:
        ModelError: When listed experts cannot be divided.
    """

    divides_batch: ClassVar[bool] = True

    def __init__(self, model: nn.Module, layers: Sequence[ExpertLayer], ranks: int) -> None:
        parameters = dict(model.named_parameters())
        self._model, self._layers = model, layers
        self._proved = {layer: prove(layer, ranks) for layer in layers if isinstance(layer, ListedExperts)}
        self.experts = {
            parameters[name]: (number, layer.num_experts) for layer in layers for name, number in layer.names()
        }
        """For every expert's parameter the number of its expert in a list (None: stacked), and of how many."""
        self.dims: dict[nn.Parameter, int] = {}
        """The dims of parameters that the axis divides as it divides work: none."""
        self.stands_in = False
        """Whether stacked experts only count: for those that cannot run without data."""
        self._stack: list[nn.Module] = []  # the modules that run
        self._log: list[tuple[nn.Module, ...]] = []
        self._sent: list[tuple[Literal["forward", "backward"], int, int, tuple[nn.Module, ...]]] = []

    def local_shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """The shape a trace computes with: the whole, as one rank's rows are for all experts here."""
        return tuple(parameter.shape)

    @contextlib.contextmanager
    def running(self, log: list[tuple[nn.Module, ...]]) -> Iterator[None]:
        """Around one forward pass.

        Args:
            log: Grows with every tensor saved for backward.
        """
        self._log, self._sent, self._stack = log, [], []
        with contextlib.ExitStack() as stack:
            for module in self._model.modules():
                stack.callback(module.register_forward_pre_hook(self._enter).remove)
                stack.callback(module.register_forward_hook(self._leave, prepend=True, always_call=True).remove)
            for layer in self._layers:
                if isinstance(layer, StackedExperts):
                    stack.callback(
                        layer.module.register_forward_pre_hook(self._counted(layer), with_kwargs=True).remove
                    )
                elif self._proved[layer] is not None:
                    stack.enter_context(mock.patch.object(layer.block, "forward", self._mean_forward(layer)))
                if self.stands_in and isinstance(layer, StackedExperts):
                    stack.enter_context(mock.patch.object(layer.module, "forward", _stand_in(layer.module)))
            stack.enter_context(without_grouped_kernels())
            yield

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._stack.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()

    def _counted(self, layer: StackedExperts) -> Callable[..., None]:
        def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = Call.of(module, args, kwargs)
            grad = call.hidden.requires_grad or any(weight.requires_grad for weight in module.parameters())
            size = call.index.numel() * call.hidden.shape[1] * call.hidden.element_size()
            self._count(layer, size, size, grad=grad)

        return count

    def _mean_forward(self, layer: ListedExperts) -> Callable[..., torch.Tensor]:
        """Gives every expert as many of the block's tokens, and adds up the answers."""
        features, rate = self._proved[layer] or (0, 0.0)

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            hidden = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
            tokens = hidden.reshape(-1, features)
            places = torch.arange(round(tokens.shape[0] * rate), device=hidden.device) % tokens.shape[0]
            grad = hidden.requires_grad or any(weight.requires_grad for weight in layer.experts.parameters())
            numel = len(places) * features
            self._count(layer, numel * hidden.element_size(), numel * answer_dtype(hidden).itemsize, grad=grad)
            parts = tokens[places].tensor_split(layer.num_experts)
            answers = torch.cat([expert(part) for expert, part in zip(layer.experts, parts, strict=True)])
            return torch.zeros_like(tokens).index_add(0, places, answers.to(tokens.dtype)).view(hidden.shape)

        return forward

    def _count(self, layer: ExpertLayer, asked: int, answered: int, *, grad: bool) -> None:
        """Counts, in bytes, the numbers of rows that ranks tell each other, the rows, and the answers."""
        position, around = len(self._log), tuple(self._stack)
        for size in (layer.num_experts * _COUNT_BYTES, asked, answered):
            self._sent.append(("forward", size, position, around))
        for size in (asked, answered) if grad else ():
            self._sent.append(("backward", size, position, around))

    def boundaries(self, model: nn.Module, log: list[tuple[nn.Module, ...]]) -> tuple[Boundary, ...]:
        """What the last run sends in one micro-batch."""
        found = []
        paths = {module: path for path, module in model.named_modules()}
        for moment, size, position, around in self._sent:
            needed = {module for stack in log[position:] for module in stack}
            needed_in = _names([module for module in around if module in needed])
            path = paths[around[-1]]
            found.append(Boundary("all_to_all", moment, size, _names(around), needed_in, path, axis="expert"))
        return tuple(found)


def _names(modules: Sequence[nn.Module]) -> tuple[str, ...]:
    return tuple(sorted({name for module in modules for name in class_names(module)}))


def _stand_in(module: nn.Module) -> Callable[..., torch.Tensor]:
    """Something of the shape of the answers, for which gradients are needed if they are for the experts."""
    weights = list(module.parameters())

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        hidden = Call.of(module, args, kwargs).hidden
        anchor = torch.zeros((), dtype=hidden.dtype, device=hidden.device)
        return hidden + anchor.requires_grad_(any(weight.requires_grad for weight in weights))

    return forward
