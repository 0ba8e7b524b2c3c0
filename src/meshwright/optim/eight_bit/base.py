"""AdamW whose moments may be of another form than the weights, and kept in 8 bits."""

from __future__ import annotations

import math
from collections.abc import Generator, Hashable
from typing import Any

import torch

from meshwright.optim.adam.rule import AdamRule
from meshwright.optim.eight_bit.blocks import blocks_of
from meshwright.optim.eight_bit.moments import Moments, is_eight_bit, kept_moments, variant_of_moments
from meshwright.optim.eight_bit.percentile import NORMS, clipped, kept_norms
from meshwright.optim.sharded import (
    Chunk,
    Kept,
    Layout,
    Request,
    ShardedOptimizer,
    TensorList,
    Update,
    bad_value,
    check_at_least_zero,
    check_betas,
)

QUANTISATION = {
    "nbits": 32,
    "min_8bit_size": 4096,
    "percentile_clipping": 100,
    "block_wise": True,
    "is_paged": False,
}
"""Moments as they are, and gradients too."""


_LATE = 10**9
"""A step number at which torch's kernels correct nothing."""


class MomentAdamW(ShardedOptimizer):
    """Base of AdamW variants: what the moments are of, how they are kept, and how the weights follow can be changed.

    Decay comes after the step and with the whole learning rate, as in Hugging Face's AdamW and bitsandbytes::

        p -= lr · m̂ / (√v̂ + eps)        p -= lr · weight_decay · p
    """

    def check_group(self, group: dict[str, Any]) -> None:
        """Refuses numbers out of range.

        Raises:
            ConfigError: Naming the first.
        """
        check_at_least_zero(group, "lr", "eps", "weight_decay", "min_8bit_size")
        check_betas(group, 2)
        if group["nbits"] not in (8, 32):
            raise bad_value("nbits", group["nbits"], "8 or 32")
        percentile = group["percentile_clipping"]
        if not isinstance(percentile, int) or not 0 < percentile <= 100:
            raise bad_value("percentile_clipping", percentile, "a whole number from 1 to 100 (100 clips nothing)")

    def form(self, layout: Layout, group: dict[str, Any]) -> Kept:
        """The form of the moments: the parameter's."""
        return Kept(layout.shape, tuple(range(layout.ndim)))

    def kept_states(self, layout: Layout, group: dict[str, Any]) -> dict[str, Kept]:
        """Moments, and the last norms where gradients are clipped by them."""
        norms = {NORMS: kept_norms()} if group["percentile_clipping"] < 100 else {}
        return {**kept_moments(layout, self.form(layout, group), group), **norms}

    def variant(self, layout: Layout, group: dict[str, Any]) -> Hashable:
        """Shape in kind, and how blocks are cut."""
        return layout.ndim, variant_of_moments(layout, self.form(layout, group), group)

    def asks(self, chunk: Chunk) -> bool:
        """Norms or shared scales."""
        return chunk.group["percentile_clipping"] < 100 or self._shares_scales(chunk)

    def lives_on_host(self, group: dict[str, Any]) -> bool:
        """Paged states wait in host memory between steps."""
        return bool(group["is_paged"])

    def update(self, chunk: Chunk) -> Update:
        """Rounds: what :meth:`observed` asks; norms, where they clip; scales, where ranks share a block."""
        group: Any = chunk.group
        gradients = yield from self.observed(chunk)
        if group["percentile_clipping"] < 100:
            dims = tuple(dim for dim in self.form(chunk.layout, group).dims if dim is not None)
            gradients = yield from clipped(chunk, gradients, dims)
        moments = Moments(chunk, lambda layout: self.form(layout, group))
        # Moments are contiguous, and torch's kernels take all their tensors to be laid out alike.
        gradients = gradients.map(torch.Tensor.contiguous)
        direction = TensorList([torch.zeros_like(gradient) for gradient in gradients])
        self.rule(group, chunk.step).update(
            direction.tensors, gradients.tensors, moments.first.tensors, moments.second.tensors, _LATE, scale=1.0
        )  # fmt: skip
        yield from moments.keep()
        remaining = 1.0 - float(group["lr"]) * float(group["weight_decay"])
        self.move(chunk, direction, remaining)

    def _shares_scales(self, chunk: Chunk) -> bool:
        group: Any = chunk.group
        form = self.form(chunk.layout, group)
        return is_eight_bit(form, group) and blocks_of(chunk.layout, form, group["block_wise"]).over is not None

    def observed(self, chunk: Chunk) -> Generator[list[Request], list[Any], TensorList]:
        """What the moments are of: the gradients."""
        yield from ()
        return chunk.gradients

    def move(self, chunk: Chunk, direction: TensorList, remaining: float) -> None:
        """Takes the step, and what decay leaves of the result.

        Args:
            chunk: With the weights.
            direction: lr · m̂ / (√v̂ + eps), negative.
            remaining: 1 − lr · weight_decay.
        """
        if remaining != 1.0:
            chunk.weights.mul_(remaining)
        chunk.weights.add_(direction, alpha=remaining)

    def rule(self, group: dict[str, Any], step: int) -> AdamRule:
        """The step without decay. Its number's corrections are in lr and eps: variants differ in where eps stands."""
        beta1, beta2 = map(float, group["betas"])
        root = math.sqrt(1.0 - beta2**step)
        return AdamRule(
            lr=float(group["lr"]) * root / (1.0 - beta1**step), beta1=beta1, beta2=beta2,
            eps=float(group["eps"]) * root, weight_decay=0.0, decoupled=True, maximize=False, hold_steps=0,
        )  # fmt: skip
