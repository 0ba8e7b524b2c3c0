"""A tensor axis in a trace: one rank's shapes, and what it would send. Twin of ``engine`` for predictions."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from meshwright.cost import Boundary
from meshwright.loss import Vocabulary, VocabularyShards
from meshwright.methods.tensor.plan import PlannedLayer
from meshwright.methods.tensor.sequence import check_tokens
from meshwright.methods.tensor.sequence_trial import TOKENS_DIM
from meshwright.methods.tensor.split import Split
from meshwright.methods.tensor.styles import is_linear
from meshwright.methods.tensor.tokens import change_hidden_input, change_hidden_output
from meshwright.methods.tensor.trial import adjusted
from meshwright.nn import class_names

SaveLog = list[tuple[nn.Module, ...]]
"""For every tensor saved for backward so far: the modules that were running."""

_Sent = tuple[Literal["all_reduce", "reduce_scatter", "all_gather"], Literal["forward", "backward"], int, str, int]


class SplitTrace:
    """Lets a plain model, with parameters of one rank's shapes, run as one of the ranks of a tensor axis would.

    Args:
        model: The model.
        split: What is split; every divided dim is a multiple of ``ranks``.
        ranks: Size of the axis.
    """

    divides_batch: ClassVar[bool] = False

    def __init__(self, model: nn.Module, split: Split, ranks: int) -> None:
        self._model, self._adjustments = model, split.adjustments
        self._layers, self._ranks, self._sequence = split.layers, ranks, split.sequence
        self.dims = {
            parameter: dim for layer in self._layers for _, parameter, dim in layer.parameters() if dim is not None
        }
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
        hooks += self._token_hooks(log)
        try:
            with adjusted(self._model, self._adjustments):
                yield
        finally:
            for hook in hooks:
                hook.remove()
            self._inputs = {}

    def _token_hooks(self, log: SaveLog) -> list[Any]:
        """What ``tokens`` does, and counts it."""
        if self._sequence is None:
            return []
        hooks = []
        for path in self._sequence.first:
            module, above = self._model.get_submodule(path), path.rpartition(".")[0]
            hooks.append(change_hidden_input(module, functools.partial(self._cut, above, log)))
        for path in self._sequence.last:
            module, above = self._model.get_submodule(path), path.rpartition(".")[0]
            hooks.append(change_hidden_output(module, functools.partial(self._gathered, above, log, summed=False)))
        for path in self._sequence.scopes:
            module, above = self._model.get_submodule(path), path.rpartition(".")[0]
            if not is_linear(module):
                hooks.append(change_hidden_input(module, functools.partial(self._gathered, above, log)))
        return hooks

    def _cut(self, path: str, log: SaveLog, hidden: torch.Tensor) -> torch.Tensor:
        check_tokens(hidden, self._ranks)
        if hidden.requires_grad:
            self._sent.append(("all_gather", "backward", _bytes(hidden), path, len(log)))
        # In memory of its own, as each rank keeps it.
        return hidden.chunk(self._ranks, TOKENS_DIM)[0].clone()

    def _gathered(self, path: str, log: SaveLog, hidden: torch.Tensor, *, summed: bool = True) -> torch.Tensor:
        whole = torch.cat([hidden] * self._ranks, TOKENS_DIM)
        self._sent.append(("all_gather", "forward", _bytes(whole), path, len(log)))
        if summed and hidden.requires_grad:
            self._sent.append(("reduce_scatter", "backward", _bytes(whole), path, len(log)))
        return whole

    def _scattered(self, layer: PlannedLayer, log: SaveLog, output: torch.Tensor) -> torch.Tensor:
        for moment, kind in (("forward", "reduce_scatter"), ("backward", "all_gather")):
            self._sent.append((kind, moment, _bytes(output), layer.path, len(log)))  # type: ignore[arg-type]
        bias = layer.module._parameters["bias"]
        if bias is not None and bias.requires_grad:
            self._sent.append(("all_reduce", "backward", _bytes(bias), layer.path, len(log)))
        return output.chunk(self._ranks, TOKENS_DIM)[0].clone()

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
            if self._sequence is not None and self._sequence.gathers_above(layer.path):
                return args
            tensor, *others = args
            if self._sequence is not None and layer.path in self._sequence.scopes:
                return (self._gathered_once(layer, log, tensor), *others)
            known = self._inputs.setdefault(layer.group, [])
            if tensor.requires_grad and not any(tensor is each for each in known):
                known.append(tensor)
                self._sent.append((style.gradient, "backward", _bytes(tensor), layer.path, len(log)))
            return (tensor.chunk(self._ranks, -1)[0] if style.splits_input else tensor, *others)

        return enter

    def _gathered_once(self, layer: PlannedLayer, log: SaveLog, tensor: torch.Tensor) -> torch.Tensor:
        """All tokens of an input, gathered once for all layers that take it."""
        known = self._inputs.setdefault(layer.group, [])
        for before, whole in itertools.pairwise(known):
            if before is tensor:
                return whole
        whole = self._gathered(layer.parent_path, log, tensor)
        self._inputs[layer.group] = [tensor, whole]
        return whole

    def _leaving(self, layer: PlannedLayer, log: SaveLog) -> Any:
        style = layer.style

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            if style.output == "as computed":
                return output
            if style.output == "logits":
                return VocabularyShards.of(output, self._vocabulary(output))
            if style.name == "rowwise" and self._sequence is not None and self._sequence.covers(layer.path):
                return self._scattered(layer, log, output)
            whole = torch.cat([output] * self._ranks, -1) if style.output == "all_gather" else output
            self._sent.append((style.output, "forward", _bytes(whole), layer.path, len(log)))
            return whole

        return leave

    def _vocabulary(self, part: torch.Tensor) -> Vocabulary:
        """What cross entropy, or whoever wants the whole logits, would send."""

        def reduced(numbers: torch.Tensor) -> torch.Tensor:
            self._sent.append(("all_reduce", "forward", _bytes(numbers), "", 0))
            return numbers.clone()

        def gathered(part: torch.Tensor) -> torch.Tensor:
            whole = torch.cat([part] * self._ranks, -1)
            self._sent.append(("all_gather", "forward", _bytes(whole), "", 0))
            return whole

        return Vocabulary(0, part.shape[-1] * self._ranks, reduced, reduced, gathered)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _names(modules: list[nn.Module]) -> tuple[str, ...]:
    return tuple(sorted({name for module in modules for name in class_names(module)}))
