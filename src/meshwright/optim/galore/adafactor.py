"""Adafactor in the space of the gradients' leading singular vectors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from meshwright.optim.adafactor import Adafactor
from meshwright.optim.galore.base import ProjectedGroups
from meshwright.optim.galore.projection import is_projected, low_rank_form, take_projected_step
from meshwright.optim.sharded import Chunk, Kept, Layout, Sum, TensorList, Update


class GaLoreAdafactor(ProjectedGroups, Adafactor):
    """GaLore (Zhao et al. 2024, arXiv 2403.03507) over :class:`~meshwright.optim.adafactor.Adafactor`.

    Groups with a ``rank`` are projected: the rows and columns whose squares are averaged are those of the projected
    gradient R, and so are RMS(u) and the momentum; RMS(p) is of the whole weight. With u Adafactor's step for R::

        p -= weight_decay · α · p        p -= scale · (u·Pᵀ)

    The numbers are those of ``galore_torch.GaLoreAdafactor``. Three all-reduces per mesh axis and step, two where no
    contracted dim is split.

    Args and errors: those of :class:`~meshwright.optim.adafactor.Adafactor` and, for groups,
    :class:`~meshwright.optim.galore.GaLoreAdamW`.
    """

    def _begin(self) -> None:
        super()._begin()
        self._low_layouts: WeakKeyDictionary[Layout, dict[Any, Layout]] = WeakKeyDictionary()

    def kept_states(self, layout: Layout, group: dict[str, Any]) -> dict[str, Kept]:
        """Adafactor's states of the projected gradient, and the projectors."""
        if not is_projected(group):
            return super().kept_states(layout, group)
        form = low_rank_form(layout, group)
        low = super().kept_states(layout.restricted(form), group)
        states = {name: replace(kept, dims=_dims_of_parameter(kept.dims, form)) for name, kept in low.items()}
        return {**states, **self.projector_states(layout, group)}

    def update(self, chunk: Chunk) -> Update:
        """Adafactor's rounds, after that of projected gradients where a contracted dim is split."""
        if not is_projected(chunk.group):
            yield from super().update(chunk)
            return
        gradients = yield from self.projected(chunk)
        low = _LowChunk.of(chunk, gradients, [self._low_layout(layout, chunk.group) for layout in chunk.layouts])
        yield from _translated(super().update(low), low_rank_form(chunk.layout, chunk.group))
        decay = chunk.group["weight_decay"]
        if decay != 0:
            chunk.weights.add_(chunk.weights * (low.sizes * decay), alpha=-1.0)
        take_projected_step(chunk, low.weights, 1.0)

    def _low_layout(self, layout: Layout, group: Mapping[str, Any]) -> Layout:
        """The layout of a projected gradient; remembered."""
        known = self._low_layouts.setdefault(layout, {})
        key = group["rank"], group["proj_type"]
        if key not in known:
            known[key] = layout.restricted(low_rank_form(layout, group))
        return known[key]

    def size_requests(self, chunk: Chunk) -> list[Sum]:
        """Σp² of the whole weights."""
        if not isinstance(chunk, _LowChunk):
            return super().size_requests(chunk)
        return [_OfWhole(request.partial) for request in super().size_requests(chunk.whole)]

    def sizes(self, chunk: Chunk, weight_squares: list[torch.Tensor]) -> torch.Tensor | float:
        """α by RMS(p) of the whole weights."""
        if not isinstance(chunk, _LowChunk):
            return super().sizes(chunk, weight_squares)
        chunk.sizes = super().sizes(chunk.whole, weight_squares)
        return chunk.sizes


class _OfWhole(Sum):
    """A sum over parameters, among those over their projected gradients."""


@dataclass(kw_only=True)
class _LowChunk(Chunk):
    """Projected gradients, with zeros for weights, which their steps then are."""

    whole: Chunk
    sizes: torch.Tensor | float = 0.0

    @classmethod
    def of(cls, chunk: Chunk, gradients: TensorList, layouts: list[Layout]) -> _LowChunk:
        """The projected gradients of a chunk, and their layouts."""
        group = {**chunk.group, "weight_decay": 0.0}
        members = [
            replace(member, slot=replace(member.slot, layout=layout))
            for member, layout in zip(chunk.members, layouts, strict=True)
        ]
        steps = TensorList([torch.zeros_like(gradient) for gradient in gradients])
        return cls(group, chunk.step, members, steps, gradients, chunk.states, chunk.has_gradients, whole=chunk)


def _dims_of_parameter(dims: tuple[int | None, ...], form: Kept) -> tuple[int | None, ...]:
    return tuple(None if dim is None else form.dims[dim] for dim in dims)


def _translated(update: Update, form: Kept) -> Update:
    """An update of projected gradients, whose sums are asked for by the parameters' dims."""
    asked = next(update, None)
    while asked is not None:
        answers = yield [_asked_of_parameter(request, form) for request in asked]
        try:
            asked = update.send(answers)
        except StopIteration:
            return


def _asked_of_parameter(request: Any, form: Kept) -> Sum:
    if isinstance(request, _OfWhole):
        return request
    dims = range(len(form.dims)) if request.over is None else [dim % len(form.dims) for dim in request.over]
    over = tuple(dim for dim in (form.dims[own] for own in dims) if dim is not None)
    return Sum(request.partial, over, request.largest)
