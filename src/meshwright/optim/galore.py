"""GaLore: AdamW and Adafactor with moments in the space of the gradients' leading singular vectors."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from meshwright.errors import ConfigError
from meshwright.optim.adafactor import Adafactor
from meshwright.optim.adam.adam_rule import AdamRule
from meshwright.optim.eight_bit_adamw import QUANTISATION, AdamW8bit, MomentAdamW
from meshwright.optim.eight_bit_moments import variant_of_moments
from meshwright.optim.galore_projection import (
    check_projection,
    contracts_split_dims,
    is_projected,
    is_time_to_renew,
    low_rank_form,
    projected,
    projector_forms,
    take_projected_step,
)
from meshwright.optim.sharded import Chunk, Kept, Layout, Request, ShardedOptimizer, Sum, TensorList, Update

_DEFAULTS = {"update_proj_gap": 200, "scale": 0.25, "proj_type": "std", "svd": "exact"}


class ProjectedGroups(ShardedOptimizer):
    """Base class of optimizers that project the gradients of groups with a ``rank``."""

    takes_whole_tensors = True  # decompositions
    states_can_be_averaged = False  # every replica projects by its own gradients

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with GaLore's defaults if it has a rank."""
        if is_projected(param_group):
            param_group = {**_DEFAULTS, **param_group}
        super().add_param_group(param_group)

    def check_group(self, group: dict[str, Any]) -> None:
        """Refuse numbers out of range, and impossible projections.

        Raises:
            ConfigError: Naming the hyperparameter.
            ModelError: Naming the parameter.
        """
        super().check_group(group)
        if is_projected(group):
            check_projection(group)

    def projector_states(self, layout: Layout, group: dict[str, Any]) -> dict[str, Kept]:
        """Return the forms of the projectors: (contracted dim, rank), split like the parameter."""
        forms = projector_forms(layout, group) if is_projected(group) else {}
        return {name: form(layout) for name, form in forms.items()}

    def projected(self, chunk: Chunk) -> Generator[list[Request], list[Any], TensorList]:
        """Return projected gradients, asking for decompositions when due, and for sums over split contracted dims."""
        return projected(chunk, self._replicas)


class GaLoreMoments(ProjectedGroups, MomentAdamW):
    """Base class of AdamW with moments of projected gradients; groups without a rank are plain AdamW."""

    host_chunk_elements = 1 << 20  # passes over whole matrices are products, one matrix at a time

    def _begin(self) -> None:
        super()._begin()
        self._forms: WeakKeyDictionary[Layout, dict[Any, tuple[Kept, Hashable]]] = WeakKeyDictionary()

    def form(self, layout: Layout, group: dict[str, Any]) -> Kept:
        """Return the form of the moments: of low rank where gradients are projected."""
        return self._known(layout, group)[0]

    def variant(self, layout: Layout, group: dict[str, Any]) -> Hashable:
        """Return a key of the sides of the projection and of the blocks of 8-bit moments."""
        return self._known(layout, group)[1]

    def kept_states(self, layout: Layout, group: dict[str, Any]) -> dict[str, Kept]:
        """Return the moments and the projectors."""
        return {**super().kept_states(layout, group), **self.projector_states(layout, group)}

    def asks(self, chunk: Chunk) -> bool:
        """Return whether the update asks for decompositions, sums of projected gradients, or 8-bit scales."""
        projects = is_projected(chunk.group) and (is_time_to_renew(chunk) or contracts_split_dims(chunk))
        return projects or super().asks(chunk)

    def observed(self, chunk: Chunk) -> Generator[list[Request], list[Any], TensorList]:
        """Return the gradients, projected if the group has a rank."""
        return (yield from self.projected(chunk)) if is_projected(chunk.group) else chunk.gradients

    def move(self, chunk: Chunk, direction: TensorList, remaining: float) -> None:
        """Apply the step in the parameters' space."""
        if is_projected(chunk.group):
            take_projected_step(chunk, direction, remaining)
        else:
            super().move(chunk, direction, remaining)

    def _known(self, layout: Layout, group: dict[str, Any]) -> tuple[Kept, Hashable]:
        # Cached, as both are read in every step.
        key = (group.get("rank"), group.get("proj_type"), group["nbits"], group["min_8bit_size"], group["block_wise"])
        known = self._forms.setdefault(layout, {})
        if key not in known:
            form = low_rank_form(layout, group) if is_projected(group) else super().form(layout, group)
            sides = tuple(projector_forms(layout, group).values()) if is_projected(group) else ()
            known[key] = form, (layout.ndim, sides, variant_of_moments(layout, form, group))
        return known[key]


# --- Parameter groups: which weights are projected

_NOT_DECAYED = ("bias", "LayerNorm.weight")


def get_galore_param_groups(
    model: nn.Module,
    weight_decay: float | None = None,
    rank: int = 256,
    update_proj_gap: int = 200,
    scale: float = 0.25,
    proj_type: str = "std",
    *,
    decay: float | None = None,
    svd: str = "exact",
) -> list[dict[str, Any]]:
    """Divide a model's parameters into three groups, as ColossalAI's function of this name does.

    Args:
        model: Its parameters may be sharded; those that need no gradient are left out.
        weight_decay: Weight decay of the first two groups.
        rank: Number of singular vectors.
        update_proj_gap: Steps between decompositions.
        scale: Factor of projected steps.
        proj_type: See :class:`~meshwright.optim.galore.GaLoreAdamW`.
        decay: Another name of ``weight_decay``, which ColossalAI's documentation uses.
        svd: How singular vectors are computed.

    Returns:
        Projected matrices; other parameters; and parameters without decay (names with ``bias`` or
        ``LayerNorm.weight``). A matrix with a side of ``rank`` or less is not projected, as nothing would be saved.

    Raises:
        ConfigError: When both or neither of ``weight_decay`` and ``decay`` are given, or no matrix can be projected.
    """
    if (weight_decay is None) == (decay is None):
        raise ConfigError(
            "The weight decay is named by weight_decay or by decay",
            expected="one of them",
            got=f"weight_decay={weight_decay}, decay={decay}",
            fix="pass weight_decay=…",
        )
    whole: dict[str, list[nn.Parameter]] = {"projected": [], "other": [], "not decayed": []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            whole[_kind(name, parameter, rank)].append(parameter)
    if not whole["projected"]:
        raise ConfigError(
            "No matrix of the model is larger than the rank",
            expected="a rank below the smaller side of the model's matrices",
            got=f"rank={rank}",
            fix="choose a smaller rank, or an optimizer that does not project",
        )
    decayed = {"weight_decay": weight_decay if decay is None else decay}
    projection = {"rank": rank, "update_proj_gap": update_proj_gap, "scale": scale, "proj_type": proj_type, "svd": svd}
    return [
        {"params": whole["projected"], **decayed, **projection},
        {"params": whole["other"], **decayed},
        {"params": whole["not decayed"], "weight_decay": 0.0},
    ]


def _kind(name: str, parameter: nn.Parameter, rank: int) -> str:
    if any(part in name for part in _NOT_DECAYED):
        return "not decayed"
    return "projected" if parameter.ndim == 2 and min(parameter.shape) > rank else "other"


# --- GaLore over AdamW


class GaLoreAdamW(GaLoreMoments):
    """GaLore (Zhao et al. 2024, arXiv 2403.03507) with AdamW's moments in fp32, right on any layout.

    Groups with a ``rank`` are projected. P are the leading singular vectors of the gradient G of every
    ``update_proj_gap``-th step, and m and v the moments of R = G·P (or Pᵀ·G, if that is smaller)::

        p += scale · (N·Pᵀ)        N = −lr · √(1 − β₂ᵗ) / (1 − β₁ᵗ) · m / (√v + eps)        p -= lr · weight_decay · p

    The order is that of ``galore_torch.GaLoreAdamW``; the moments stay as they are when P changes. To compute P, one
    rank per matrix gathers the gradient, and the work is spread over all ranks. Otherwise only R is sent, where the
    contracted dim is split: one all-reduce per mesh axis and step. When singular vectors cannot be computed (a gradient
    is not finite), the old ones stay.

    Args:
        params: Parameters or groups of them, plain or DTensors, as :func:`get_galore_param_groups` makes them. Keys of
            projected groups: ``rank``; ``update_proj_gap`` = 200; ``scale`` = 0.25; ``proj_type`` = ``"std"``
            (contracts the shorter dim), ``"reverse_std"``, ``"right"``, ``"left"`` or ``"full"`` (both sides);
            ``svd`` = ``"exact"`` or ``"randomised"`` (cheaper by min(H, W) / rank, nearly as good, the same on all
            ranks). Stacks of matrices (experts, shape (E, H, W)) are projected matrix by matrix.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Added to √v.
        weight_decay: Applied after the step, with the whole learning rate.
        correct_bias: Whether to apply the factor of t.
        half_update: See :class:`~meshwright.optim.sharded.ShardedOptimizer`.

    Raises:
        ConfigError: When a hyperparameter is out of range.
        ModelError: For parameters of other types than fp32, fp16 and bf16, and matrices smaller than the rank.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
        *,
        half_update: str = "master",
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "correct_bias": correct_bias,
            "half_update": half_update,
        }
        super().__init__(params, {**defaults, **QUANTISATION})

    def rule(self, group: dict[str, Any], step: int) -> AdamRule:
        """Return the step with eps beside the uncorrected √v, and a corrected lr if ``correct_bias``."""
        rule = replace(super().rule(group, step), eps=float(group["eps"]))
        return rule if group["correct_bias"] else replace(rule, lr=float(group["lr"]))


class GaLoreAdamW8bit(GaLoreMoments, AdamW8bit):
    """:class:`GaLoreAdamW` with moments in 8 bits, as in :class:`~meshwright.optim.AdamW8bit`.

    As in the kernels of bitsandbytes, eps stands beside the corrected √v̂. Projectors stay in fp32. ``min_8bit_size``
    and ``percentile_clipping`` apply to the size and the norm of projected gradients.

    Arguments and errors are those of :class:`~meshwright.optim.AdamW8bit`, with another default of ``lr``, and for
    groups those of :class:`GaLoreAdamW`.
    """

    def __init__(self, params: Any, lr: float = 1e-2, *arguments: Any, **options: Any) -> None:
        super().__init__(params, lr, *arguments, **options)


# --- GaLore over Adafactor


class GaLoreAdafactor(ProjectedGroups, Adafactor):
    """GaLore (Zhao et al. 2024, arXiv 2403.03507) over :class:`~meshwright.optim.adafactor.Adafactor`.

    Groups with a ``rank`` are projected: row and column means, RMS(u) and momentum are those of the projected gradient
    R; RMS(p) is that of the whole weight. With u Adafactor's step for R::

        p -= weight_decay · α · p        p -= scale · (u·Pᵀ)

    The numbers are those of ``galore_torch.GaLoreAdafactor``. A step takes three all-reduces per mesh axis, or two
    where no contracted dim is split.

    Arguments and errors are those of :class:`~meshwright.optim.adafactor.Adafactor` and, for groups, of
    :class:`~meshwright.optim.galore.GaLoreAdamW`.
    """

    def _begin(self) -> None:
        super()._begin()
        self._low_layouts: WeakKeyDictionary[Layout, dict[Any, Layout]] = WeakKeyDictionary()

    def kept_states(self, layout: Layout, group: dict[str, Any]) -> dict[str, Kept]:
        """Return Adafactor's states of the projected gradient, and the projectors."""
        if not is_projected(group):
            return super().kept_states(layout, group)
        form = low_rank_form(layout, group)
        low = super().kept_states(layout.restricted(form), group)
        states = {name: replace(each, dims=_dims_of_parameter(each.dims, form)) for name, each in low.items()}
        return {**states, **self.projector_states(layout, group)}

    def update(self, chunk: Chunk) -> Update:
        """Project the gradients, run Adafactor's update of them, and apply the step in the parameters' space."""
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
        """Return the layout of a projected gradient, from a cache."""
        known = self._low_layouts.setdefault(layout, {})
        key = group["rank"], group["proj_type"]
        if key not in known:
            known[key] = layout.restricted(low_rank_form(layout, group))
        return known[key]

    def size_requests(self, chunk: Chunk) -> list[Sum]:
        """Return the request for Σp² of the whole weights."""
        if not isinstance(chunk, _LowChunk):
            return super().size_requests(chunk)
        return [_OfWhole(request.partial) for request in super().size_requests(chunk.whole)]

    def sizes(self, chunk: Chunk, weight_squares: list[torch.Tensor]) -> torch.Tensor | float:
        """Return α by RMS(p) of the whole weights."""
        if not isinstance(chunk, _LowChunk):
            return super().sizes(chunk, weight_squares)
        chunk.sizes = super().sizes(chunk.whole, weight_squares)
        return chunk.sizes


class _OfWhole(Sum):
    """A sum over parameters, among sums over projected gradients."""


@dataclass(kw_only=True)
class _LowChunk(Chunk):
    """Projected gradients, with zeros for weights, which an update turns into its steps."""

    whole: Chunk
    sizes: torch.Tensor | float = 0.0

    @classmethod
    def of(cls, chunk: Chunk, gradients: TensorList, layouts: list[Layout]) -> _LowChunk:
        """Return the projected gradients of a chunk, and their layouts."""
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
    """Translate the requests of an update of projected gradients to the parameters' dims."""
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
