"""CAME: Adafactor with momentum, scaled element by element by how far updates have agreed with it."""

from __future__ import annotations

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
    stack,
)
from meshwright.optim.sharded import (
    Chunk,
    Kept,
    Layout,
    ShardedOptimizer,
    Sum,
    Update,
    check_at_least_zero,
    check_betas,
)
from meshwright.runtime.torch_internals.optim import foreach_add_, foreach_addcmul_, foreach_mul_, foreach_sub_


class CAME(ShardedOptimizer):
    """CAME (Luo et al. 2023, arXiv 2307.02047, Algorithm 2), right on any layout; three all-reduces a step.

    The numbers are those of ``came_pytorch.CAME``. V̂, the average of g² + eps[0], and Û, the average of the
    instability, are stored as rows and columns (:mod:`meshwright.optim.factored`)::

        u = g / √V̂        u /= max(1, RMS(u) / clip_threshold)        m = β₁ m + (1 − β₁) u
        Û averages (u − m)² + eps[1]        p -= lr · weight_decay · p        p -= lr · m / √Û

    Vectors and scalars have all of their squares and no instability: p -= lr · m. As in the paper, no average is
    corrected for its start from zero.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate; there is no default.
        eps: Added to squared gradients, and to the instability.
        clip_threshold: Largest RMS of u, d in the paper.
        betas: Decay rates of m, V̂ and Û.
        weight_decay: Decoupled from the moments.
        half_update: See :class:`~meshwright.optim.sharded.ShardedOptimizer`.

    Raises:
        ConfigError: When lr is missing or a hyperparameter is out of range.
        ModelError: For parameters that are not fp32, fp16 or bf16.
    """

    host_chunk_elements = BLOCKED_CHUNK_ELEMENTS

    def __init__(
        self,
        params: Any,
        lr: float | None = None,
        eps: tuple[float, float] = (1e-30, 1e-16),
        clip_threshold: float = 1.0,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        weight_decay: float = 0.0,
        *,
        half_update: str = "master",
    ) -> None:
        defaults = {
            "lr": lr,
            "eps": eps,
            "clip_threshold": clip_threshold,
            "betas": betas,
            "weight_decay": weight_decay,
            "half_update": half_update,
        }
        super().__init__(params, defaults)

    def check_group(self, group: dict[str, Any]) -> None:
        """Refuse numbers out of range.

        Raises:
            ConfigError: Naming the hyperparameter.
        """
        if group["lr"] is None:
            raise ConfigError(
                "CAME has no default learning rate",
                expected="an lr, for all parameters or in every group",
                got="None",
                fix="pass lr; the paper pre-trains BERT with 4e-4 and more, a tenth of what Adafactor takes",
            )
        check_at_least_zero(group, "lr", "weight_decay")
        check_betas(group, 3)
        check_floors(group)
        check_clip_threshold(group)

    def kept_states(self, layout: Layout, group: dict[str, Any]) -> dict[str, Kept]:
        """Return the momentum, and means of squares and instability over rows and columns (all squares of a vector)."""
        whole = Kept(layout.shape, tuple(range(layout.ndim)))
        if not is_factored(layout):
            return {"exp_avg": whole, "exp_avg_sq": whole}
        return {"exp_avg": whole, **kept_means(layout, "exp_avg_sq"), **kept_means(layout, "exp_avg_res")}

    def variant(self, layout: Layout, group: dict[str, Any]) -> Hashable:
        """Return the shape of matrices, and one key for all vectors."""
        return matrix_variant(layout)

    def update(self, chunk: Chunk) -> Update:
        """Update a chunk, asking for means of squares, RMS(u), and means of the instability; of vectors for RMS(u)."""
        group, momentum = chunk.group, chunk.states["exp_avg"]
        lr, (beta1, beta2, beta3), (floor, stability) = float(group["lr"]), group["betas"], group["eps"]
        if not is_factored(chunk.layout):
            directions = direction_of_vectors(chunk, beta2, floor)
            (squares,) = yield [Sum(directions.squares())]
            momentum.mul_(beta1).addcmul_(directions, (1.0 - beta1) / _clips(chunk, squares))
            _decay(chunk.weights.tensors, group)
            chunk.weights.add_(momentum, alpha=-lr)
            return
        moment, gradient_squares = FactoredMoment(chunk, "exp_avg_sq", beta2, floor), BlockedSquares(chunk)
        for part in gradient_squares:
            moment.add(part)
        moment.take((yield moment.requests()))
        (squares,) = yield [Sum(moment.scaled_sums(gradient_squares))]
        moment.scale_(1.0 / _clips(chunk, squares))
        # u − m with the new m is β₁ (u − m) with the old.
        instability = FactoredMoment(chunk, "exp_avg_res", beta3, stability, scale=beta1 * beta1)
        _average(chunk, moment, instability, beta1)
        instability.take((yield instability.requests()))
        instability.scale_(lr)
        _decay(chunk.weights.tensors, group)
        blocks = Blocks(chunk)
        for weights, means, factors in zip(
            blocks.of(chunk.weights), blocks.of(momentum), instability.factors(), strict=True
        ):
            foreach_addcmul_(weights, means, factors, value=-1.0)


def _average(chunk: Chunk, moment: FactoredMoment, instability: FactoredMoment, beta1: float) -> None:
    """Move the momentum towards u = g / √V̂, and add (u − m)², with the old m, to the instability.

    The difference is computed and squared: sums of u², u m and m² would cancel where m agrees with u, which is exactly
    what the instability measures.
    """
    blocks = Blocks(chunk)
    parts = zip(blocks.of(chunk.states["exp_avg"]), blocks.of(chunk.gradients), moment.factors(), strict=True)
    for momentum, gradients, apart in parts:
        foreach_mul_(apart, gradients)
        foreach_sub_(apart, momentum)
        foreach_add_(momentum, apart, alpha=1.0 - beta1)
        foreach_mul_(apart, apart)
        instability.add(stack(list(apart)))


def _clips(chunk: Chunk, squares: torch.Tensor) -> torch.Tensor:
    return clips(squares, numels(chunk), float(chunk.group["clip_threshold"]))


def _decay(weights: list[torch.Tensor], group: Mapping[str, Any]) -> None:
    if group["weight_decay"] != 0:  # not times 1 − …: that is rounded the same way in every step
        foreach_add_(weights, weights, alpha=-float(group["lr"]) * group["weight_decay"])
