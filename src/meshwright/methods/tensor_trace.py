"""A tensor axis in a trace: one rank's shapes, and what it would send. Twin of ``tensor_engine`` for predictions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn

from meshwright.cost import Boundary
from meshwright.methods.tensor_plan import PlannedLayer
from meshwright.nn import class_names

SaveLog = list[tuple[nn.Module, ...]]
"""For every tensor saved for backward so far: the modules that were running."""

_Sent = tuple[Literal["all_reduce", "all_gather"], Literal["forward", "backward"], int, str, int]


class SplitTrace:
    """Lets a plain model, with parameters of one rank's shapes, run as one of the ranks of a tensor axis would.

    Args:
        layers: What is split; every divided dim is a multiple of ``ranks``.
        ranks: Size of the axis.
    """

    def __init__(self, layers: list[PlannedLayer], ranks: int) -> None:
        self._layers, self._ranks = layers, ranks
        self.dims = {parameter: dim for layer in layers for _, parameter, dim in layer.parameters() if dim is not None}
        """The dim of each parameter that the axis divides."""
        self._sent: list[_Sent] = []
        self._inputs: dict[str, list[torch.Tensor]] = {}  # of each group: those whose gradient is accounted for

    def local_shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """The shape that one rank holds."""
        dim = self.dims.get(parameter)
        return tuple(size // self._ranks if d == dim else size for d, size in enumerate(parameter.shape))

    @contextlib.contextmanager
    def running(self, log: SaveLog) -> Iterator[None]:
        """Around one forward pass: inputs and outputs of layers become those of one rank, and are counted.

        Args:
            log: Grows while the model runs.
        """
        self._sent, self._inputs = [], {}
        hooks = []
        for layer in self._layers:
            hooks.append(layer.module.register_forward_pre_hook(self._entering(layer, log), prepend=True))
            hooks.append(layer.module.register_forward_hook(self._leaving(layer, log)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._inputs = {}

    def boundaries(self, model: nn.Module, log: SaveLog) -> tuple[Boundary, ...]:
        """What the last run sends in one micro-batch."""
        found = []
        for kind, moment, size, path, position in self._sent:
            parts = path.split(".")
            around = [model.get_submodule(".".join(parts[: depth + 1])) for depth in range(len(parts))]
            needed = {module for stack in log[position:] for module in stack}
            needed_in = _names([each for each in around if each in needed])
            found.append(Boundary(kind, moment, size, _names(around), needed_in, path))
        return tuple(found)

    def _entering(self, layer: PlannedLayer, log: SaveLog) -> Any:
        style = layer.style

        def enter(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            if style.name == "replicated_with_grad_allreduce":
                for parameter in module.parameters(recurse=False):
                    if parameter.requires_grad:
                        self._sent.append(("all_reduce", "backward", _bytes(parameter), layer.path, len(log)))
            if style.gradient == "nothing":
                return args
            tensor, *others = args
            known = self._inputs.setdefault(layer.group, [])
            if tensor.requires_grad and not any(tensor is each for each in known):
                known.append(tensor)
                self._sent.append((style.gradient, "backward", _bytes(tensor), layer.path, len(log)))
            return (tensor.chunk(self._ranks, -1)[0] if style.splits_input else tensor, *others)

        return enter

    def _leaving(self, layer: PlannedLayer, log: SaveLog) -> Any:
        style = layer.style

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            if style.output == "as computed":
                return output
            whole = torch.cat([output] * self._ranks, -1) if style.output == "all_gather" else output
            self._sent.append((style.output, "forward", _bytes(whole), layer.path, len(log)))
            return whole

        return leave


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _names(modules: list[nn.Module]) -> tuple[str, ...]:
    return tuple(sorted({name for module in modules for name in class_names(module)}))
