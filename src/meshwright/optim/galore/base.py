"""What all GaLore optimizers share: projectors among the states, and a group key that switches them on."""

from __future__ import annotations

from collections.abc import Generator, Hashable
from typing import Any
from weakref import WeakKeyDictionary

from meshwright.optim.eight_bit import MomentAdamW, variant_of_moments
from meshwright.optim.galore.checks import check_projection
from meshwright.optim.galore.projection import (
    contracts_split_dims,
    is_projected,
    is_time_to_renew,
    low_rank_form,
    projected,
    projector_forms,
    take_projected_step,
)
from meshwright.optim.sharded import Chunk, Kept, Layout, Request, ShardedOptimizer, TensorList

_DEFAULTS = {"update_proj_gap": 200, "scale": 0.25, "proj_type": "std", "svd": "exact"}


class ProjectedGroups(ShardedOptimizer):
    """Base of optimizers over groups with a rank, whose gradients are projected, and groups without."""

    states_can_be_averaged = False  # every replica projects by its own gradients

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; one with a rank is projected."""
        if is_projected(param_group):
            param_group = {**_DEFAULTS, **param_group}
        super().add_param_group(param_group)

    def check_group(self, group: dict[str, Any]) -> None:
        """Refuses numbers out of range, and projections that cannot be.

        Raises:
            ConfigError: Naming the hyperparameter.
            ModelError: Naming the parameter.
        """
        super().check_group(group)
        if is_projected(group):
            check_projection(group)

    def projector_states(self, layout: Layout, group: dict[str, Any]) -> dict[str, Kept]:
        """Projectors of shape (contracted dim, rank), split as the parameter is."""
        forms = projector_forms(layout, group) if is_projected(group) else {}
        return {name: form(layout) for name, form in forms.items()}

    def projected(self, chunk: Chunk) -> Generator[list[Request], list[Any], TensorList]:
        """Projected gradients; rounds: the decompositions, when it is time; sums, where a contracted dim is split."""
        return projected(chunk, self._replicas)


class GaLoreMoments(ProjectedGroups, MomentAdamW):
    """Base of AdamW with moments of projected gradients; groups without rank are AdamW."""

    host_chunk_elements = 1 << 20  # its passes over whole matrices are products, one matrix at a time

    def _begin(self) -> None:
        super()._begin()
        self._forms: WeakKeyDictionary[Layout, dict[Any, tuple[Kept, Hashable]]] = WeakKeyDictionary()

    def form(self, layout: Layout, group: dict[str, Any]) -> Kept:
        """The form of the moments: low rank, where gradients are projected."""
        return self._known(layout, group)[0]

    def variant(self, layout: Layout, group: dict[str, Any]) -> Hashable:
        """Sides of the projection, and how blocks are cut."""
        return self._known(layout, group)[1]

    def kept_states(self, layout: Layout, group: dict[str, Any]) -> dict[str, Kept]:
        """The moments and the projectors."""
        return {**super().kept_states(layout, group), **self.projector_states(layout, group)}

    def asks(self, chunk: Chunk) -> bool:
        """Decompositions, and sums of projected gradients, too, where the dim that is contracted is split."""
        projects = is_projected(chunk.group) and (is_time_to_renew(chunk) or contracts_split_dims(chunk))
        return projects or super().asks(chunk)

    def observed(self, chunk: Chunk) -> Generator[list[Request], list[Any], TensorList]:
        """Gradients, projected where their group has a rank."""
        return (yield from self.projected(chunk)) if is_projected(chunk.group) else chunk.gradients

    def move(self, chunk: Chunk, direction: TensorList, remaining: float) -> None:
        """Takes the step back into the whole space."""
        if is_projected(chunk.group):
            take_projected_step(chunk, direction, remaining)
        else:
            super().move(chunk, direction, remaining)

    def _known(self, layout: Layout, group: dict[str, Any]) -> tuple[Kept, Hashable]:
        """Form and variant; remembered, as they are asked for in every step."""
        key = (group.get("rank"), group.get("proj_type"), group["nbits"], group["min_8bit_size"], group["block_wise"])
        known = self._forms.setdefault(layout, {})
        if key not in known:
            form = low_rank_form(layout, group) if is_projected(group) else super().form(layout, group)
            sides = tuple(projector_forms(layout, group).values()) if is_projected(group) else ()
            known[key] = form, (layout.ndim, sides, variant_of_moments(layout, form, group))
        return known[key]
