"""Adafactor: second moments stored as rows and columns, and step sizes relative to the size of the weights."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from meshwright.errors import ConfigError
from meshwright.optim.factored import (
    BLOCKED_CHUNK_ELEMENTS,
    BlockedSquares,
    Blocks,
    FactoredMoment,
    check_clip_threshold,
    check_floors,
    clips,
    direction_of_vectors,
    is_factored,
    kept_means,
    matrix_variant,
    numels,
)
from meshwright.optim.sharded import (
    Chunk,
    Kept,
    Layout,
    ShardedOptimizer,
    Sum,
    TensorList,
    Update,
    bad_value,
    check_at_least_zero,
)
from meshwright.runtime.torch_internals.optim import foreach_add_, foreach_addcmul_, foreach_mul_, foreach_sub_


class Adafactor(ShardedOptimizer):
    """Adafactor (Shazeer & Stern 2018, arXiv 1804.04235), right on any layout; two all-reduces a step.

    The numbers are those of ``transformers.Adafactor``, RMS(p) included. V = g² + eps[0] is averaged with
    β₂ = 1 − tᵞ (γ the ``decay_rate``); the average V̂ is stored as rows and columns for tensors of two and more dims
    (:mod:`meshwright.optim.factored`)::

        u = g / √V̂        u /= max(1, RMS(u) / clip_threshold)        α = max(eps[1], RMS(p)) · ρ
        m = beta1 · m + (1 − beta1) · α · u        p -= weight_decay · α · p        p -= m

    where ρ is ``lr``, or min(1e-2, 1/√t) with ``relative_step``.

    Args:
        params: Parameters or groups of them.
        lr: ρ; None with ``relative_step``.
        eps: Added to squared gradients; lower bound of RMS(p).
        clip_threshold: Largest RMS of u, d in the paper.
        decay_rate: γ, 0 or below.
        beta1: Decay rate of m; None for no momentum, and p -= α · u.
        weight_decay: Decoupled from the moments.
        scale_parameter: Whether step sizes are relative to RMS(p); otherwise α = ρ.
        relative_step: Whether ρ depends on the number of the step.
        warmup_init: Whether ρ = min(1e-6 · t, 1/√t).
        half_update: See :class:`~meshwright.optim.sharded.ShardedOptimizer`.

    Raises:
        ConfigError: When a hyperparameter is out of range, or contradicts another.
        ModelError: For parameters that are not fp32, fp16 or bf16.
    """

    host_chunk_elements = BLOCKED_CHUNK_ELEMENTS

    def __init__(
        self,
        params: Any,
        lr: float | None = None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
        *,
        half_update: str = "master",
    ) -> None:
        defaults = {
            "lr": lr,
            "eps": eps,
            "clip_threshold": clip_threshold,
            "decay_rate": decay_rate,
            "beta1": beta1,
            "weight_decay": weight_decay,
            "scale_parameter": scale_parameter,
            "relative_step": relative_step,
            "warmup_init": warmup_init,
            "half_update": half_update,
        }
        super().__init__(params, defaults)

    def check_group(self, group: dict[str, Any]) -> None:
        """Refuse numbers out of range, and two ways to choose a step size at once.

        Raises:
            ConfigError: Naming the hyperparameter.
        """
        _check_step_size(group)
        check_at_least_zero(group, "weight_decay")
        check_floors(group)
        check_clip_threshold(group)
        if not float(group["decay_rate"]) <= 0:
            raise bad_value("decay_rate", group["decay_rate"], "0 or less")
        if group["beta1"] is not None and not 0 <= float(group["beta1"]) < 1:
            raise bad_value("beta1", group["beta1"], "a number from 0 to below 1, or None")

    def kept_states(self, layout: Layout, group: dict[str, Any]) -> dict[str, Kept]:
        """Return the means of squares over rows and columns (all squares of a vector), and perhaps the momentum."""
        whole = Kept(layout.shape, tuple(range(layout.ndim)))
        states = kept_means(layout, "exp_avg_sq") if is_factored(layout) else {"exp_avg_sq": whole}
        return states if group["beta1"] is None else {**states, "exp_avg": whole}

    def variant(self, layout: Layout, group: dict[str, Any]) -> Hashable:
        """Return the shape of matrices, and one key for all vectors."""
        return matrix_variant(layout)

    def update(self, chunk: Chunk) -> Update:
        """Update a chunk, asking for means of squares and RMS(p), then for RMS(u); of vectors for both at once."""
        decay = 1.0 - chunk.step ** float(chunk.group["decay_rate"])
        floor = float(chunk.group["eps"][0])
        weight_sums = self.size_requests(chunk)
        if not is_factored(chunk.layout):
            directions = direction_of_vectors(chunk, decay, floor)
            *weight_squares, squares = yield [*weight_sums, Sum(directions.squares())]
            sizes = self.sizes(chunk, weight_squares)
            _move_vectors(chunk, directions, sizes, _clipped(chunk, sizes, squares))
            return
        moment, gradient_squares = FactoredMoment(chunk, "exp_avg_sq", decay, floor), BlockedSquares(chunk)
        for part in gradient_squares:
            moment.add(part)
        asked = moment.requests()
        answers = yield asked + weight_sums
        moment.take(answers[: len(asked)])
        sizes = self.sizes(chunk, answers[len(asked) :])
        (squares,) = yield [Sum(moment.scaled_sums(gradient_squares))]
        _move_matrices(chunk, moment, sizes, _clipped(chunk, sizes, squares))

    def size_requests(self, chunk: Chunk) -> list[Sum]:
        """Return the sums that step sizes depend on: Σp², unless ``scale_parameter`` is off."""
        return [Sum(chunk.weights.squares())] if chunk.group["scale_parameter"] else []

    def sizes(self, chunk: Chunk, weight_squares: list[torch.Tensor]) -> torch.Tensor | float:
        """Return α before clipping, of every parameter (shape ``(n,)``) or as one number, from the answered sums."""
        rho = _relative_step(chunk.group, chunk.step)
        if not weight_squares:
            return rho
        return (weight_squares[0] / numels(chunk)).sqrt_().clamp_(min=float(chunk.group["eps"][1])).mul_(rho)


def _check_step_size(group: dict[str, Any]) -> None:
    lr, relative = group["lr"], group["relative_step"]
    if lr is not None and relative:
        raise ConfigError(
            "lr and relative_step both choose the step size",
            expected="an lr with relative_step=False, or lr=None with relative_step=True",
            got=f"lr={lr!r}, relative_step=True",
            fix="pass relative_step=False (and scale_parameter=False for steps of exactly lr)",
        )
    if lr is None and not relative:
        raise ConfigError(
            "Nothing chooses the step size",
            expected="an lr, or relative_step=True",
            got="lr=None, relative_step=False",
            fix="pass an lr",
        )
    if group["warmup_init"] and not relative:
        raise ConfigError(
            "warmup_init is a form of the relative step",
            expected="relative_step=True with warmup_init=True",
            got="relative_step=False",
            fix="leave warmup_init out and warm lr up with a scheduler",
        )
    if lr is not None:
        check_at_least_zero(group, "lr")


def _relative_step(group: Mapping[str, Any], step: int) -> float:
    if not group["relative_step"]:
        return float(group["lr"])
    return min(1e-6 * step if group["warmup_init"] else 1e-2, 1.0 / math.sqrt(step))


def _clipped(chunk: Chunk, sizes: torch.Tensor | float, squares: torch.Tensor) -> torch.Tensor:
    return sizes / clips(squares, numels(chunk), float(chunk.group["clip_threshold"]))


def _move_vectors(chunk: Chunk, directions: TensorList, sizes: torch.Tensor | float, clipped: torch.Tensor) -> None:
    group, weights = chunk.group, chunk.weights
    _decay(weights.tensors, sizes, group)
    if group["beta1"] is None:
        weights.addcmul_(directions, clipped, value=-1.0)
        return
    momentum = chunk.states["exp_avg"].mul_(group["beta1"])
    weights.add_(momentum.addcmul_(directions, clipped * (1.0 - group["beta1"])), alpha=-1.0)


def _move_matrices(chunk: Chunk, moment: FactoredMoment, sizes: torch.Tensor | float, clipped: torch.Tensor) -> None:
    group, beta1 = chunk.group, chunk.group["beta1"]
    _decay(chunk.weights.tensors, sizes, group)
    moment.scale_(clipped if beta1 is None else clipped * (1.0 - beta1))
    blocks = Blocks(chunk)
    parts = zip(blocks.of(chunk.weights), blocks.of(chunk.gradients), moment.factors(), strict=True)
    if beta1 is None:
        for weights, gradients, factors in parts:
            foreach_addcmul_(weights, gradients, factors, value=-1.0)
        return
    for momentum, (weights, gradients, factors) in zip(blocks.of(chunk.states["exp_avg"]), parts, strict=True):
        foreach_mul_(momentum, beta1)
        foreach_addcmul_(momentum, gradients, factors)
        foreach_sub_(weights, momentum)


def _decay(weights: list[torch.Tensor], sizes: torch.Tensor | float, group: Mapping[str, Any]) -> None:
    # Not p times 1 − weight_decay · α, which would be rounded the same way in every step.
    if group["weight_decay"] == 0:
        return
    if isinstance(sizes, float):
        foreach_add_(weights, weights, alpha=-group["weight_decay"] * sizes)
    else:
        foreach_addcmul_(weights, weights, sizes.unbind(), value=-group["weight_decay"])
