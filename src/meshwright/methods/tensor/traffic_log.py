"""Log what one rank of an axis would send while a trace runs a plain model as that rank would.

The traces of tensor, sequence, context and expert axes share it. They run in one process, send nothing, and note each
collective with the modules around it. If one of these modules recomputes its forward, a collective in it is repeated
only if something after it is saved for backward; so the log also keeps how much was saved by then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.cost import Boundary, BoundaryAxis, CollectiveKind, Moment
from meshwright.nn import class_names
from meshwright.runtime.torch_internals.pytree import tree_leaves

SaveLog = list[tuple[nn.Module, ...]]
"""For every tensor saved for backward so far: the modules that were running."""


class TrafficLog:
    """Collectives that one rank would send in a trace's last run.

    Args:
        axis: The mesh axis, unless :meth:`note` is given another.
    """

    def __init__(self, axis: BoundaryAxis) -> None:
        self._axis = axis
        self._saves: SaveLog = []
        self._sent: list[tuple[Boundary, int, tuple[nn.Module, ...]]] = []

    def begin(self, saves: SaveLog) -> None:
        """Forget the last run; ``saves`` grows with every tensor saved for backward in the next."""
        self._saves, self._sent = saves, []

    def note(
        self,
        kind: CollectiveKind,
        moment: Moment,
        num_bytes: int,
        path: str,
        around: Sequence[nn.Module],
        axis: BoundaryAxis | None = None,
        saves_before: int | None = None,
        *,
        beside: bool = False,
    ) -> None:
        """Note one collective.

        Args:
            kind: Which collective.
            moment: When it is sent.
            num_bytes: Payload, as in :class:`~meshwright.cost.Boundary`.
            path: Path of the layer that sends it.
            around: The modules that run, or would run, when it is sent.
            axis: The mesh axis; None: the log's.
            saves_before: How many tensors are saved for backward before it; None: those saved by now.
            beside: See :class:`~meshwright.cost.Boundary`.
        """
        inside = _names(around)
        boundary = Boundary(kind, moment, num_bytes, inside, path=path, axis=axis or self._axis, beside=beside)
        position = len(self._saves) if saves_before is None else saves_before
        self._sent.append((boundary, position, tuple(around)))

    def boundaries(self) -> tuple[Boundary, ...]:
        """Return the collectives of the last run in one micro-batch."""
        found = []
        for boundary, position, around in self._sent:
            needed = {module for stack in self._saves[position:] for module in stack}
            needed_in = _names(module for module in around if module in needed)
            found.append(dataclasses.replace(boundary, needed_in=needed_in))
        return tuple(found)


def stand_in(module: nn.Module) -> Callable[..., torch.Tensor]:
    """Return a forward for stacked experts that skips them, where they cannot run over fake tensors.

    Its result has the answers' shape, and requires a gradient if the experts train.
    """
    weights = list(module.parameters())

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        hidden = next(tensor for tensor in tensors if tensor.is_floating_point())
        anchor = torch.zeros((), dtype=hidden.dtype, device=hidden.device)
        return hidden + anchor.requires_grad_(any(weight.requires_grad for weight in weights))

    return forward


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def _names(modules: Iterable[nn.Module]) -> tuple[str, ...]:
    return tuple(sorted({name for module in modules for name in class_names(module)}))
