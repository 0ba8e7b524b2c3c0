"""AdamW with moments in 8 bits, and percentile clipping of gradients."""

from __future__ import annotations

import math
from collections.abc import Generator, Hashable, Mapping
from typing import Any

import torch

from meshwright.optim.adam.adam_rule import UNCORRECTED, AdamRule
from meshwright.optim.eight_bit_moments import Moments, blocks_of, is_eight_bit, kept_moments, variant_of_moments
from meshwright.optim.sharded import (
    Chunk,
    Kept,
    Layout,
    Request,
    ShardedOptimizer,
    Sum,
    TensorList,
    Update,
    bad_value,
    check_at_least_zero,
    check_betas,
)
from meshwright.runtime.torch_internals.optim import foreach_copy_

QUANTISATION = {
    "nbits": 32,
    "min_8bit_size": 4096,
    "percentile_clipping": 100,
    "block_wise": True,
    "is_paged": False,
}
"""Hyperparameters of moments in fp32, without clipping."""


class MomentAdamW(ShardedOptimizer):
    """Base class of AdamW variants, which may change what is averaged, how it is stored, and how weights move.

    Decay follows the step and uses the whole learning rate, as in Hugging Face's AdamW and bitsandbytes::

        p -= lr · m̂ / (√v̂ + eps)        p -= lr · weight_decay · p
    """

    def check_group(self, group: dict[str, Any]) -> None:
        """Refuse numbers out of range.

        Raises:
            ConfigError: Naming the hyperparameter.
        """
        check_at_least_zero(group, "lr", "eps", "weight_decay", "min_8bit_size")
        check_betas(group, 2)
        if group["nbits"] not in (8, 32):
            raise bad_value("nbits", group["nbits"], "8 or 32")
        percentile = group["percentile_clipping"]
        if not isinstance(percentile, int) or percentile < 1:
            raise bad_value("percentile_clipping", percentile, "a whole number from 1 (100 and more clip nothing)")

    def form(self, layout: Layout, group: dict[str, Any]) -> Kept:
        """Return the form of the moments, by default the parameter's."""
        return Kept(layout.shape, tuple(range(layout.ndim)))

    def kept_states(self, layout: Layout, group: dict[str, Any]) -> dict[str, Kept]:
        """Return the moments, and the last norms if gradients are clipped by them."""
        norms = {NORMS: norms_form()} if group["percentile_clipping"] < 100 else {}
        return {**kept_moments(layout, self.form(layout, group), group), **norms}

    def variant(self, layout: Layout, group: dict[str, Any]) -> Hashable:
        """Return the number of dims, and a key of the blocks of 8-bit moments."""
        return layout.ndim, variant_of_moments(layout, self.form(layout, group), group)

    def asks(self, chunk: Chunk) -> bool:
        """Return whether the update asks for norms or shared scales."""
        return chunk.group["percentile_clipping"] < 100 or self._shares_scales(chunk)

    def lives_on_host(self, group: dict[str, Any]) -> bool:
        """Return whether states are paged, that is, live in host memory between steps."""
        return bool(group["is_paged"])

    def update(self, chunk: Chunk) -> Update:
        """Update a chunk, asking for norms if they clip, and for scales where ranks share a block."""
        group: Any = chunk.group
        gradients = yield from self.observed(chunk)
        if group["percentile_clipping"] < 100:
            dims = tuple(dim for dim in self.form(chunk.layout, group).dims if dim is not None)
            gradients = yield from clipped(chunk, gradients, dims)
        moments = Moments(chunk, lambda layout: self.form(layout, group))
        # Moments are contiguous, and torch's kernels expect all their tensors to have one layout.
        gradients = gradients.map(torch.Tensor.contiguous)
        direction = TensorList([torch.zeros_like(gradient) for gradient in gradients])
        self.rule(group, chunk.step).update(
            direction.tensors, gradients.tensors, moments.first.tensors, moments.second.tensors, UNCORRECTED, scale=1.0
        )  # fmt: skip
        yield from moments.keep()
        remaining = 1.0 - float(group["lr"]) * float(group["weight_decay"])
        self.move(chunk, direction, remaining)

    def _shares_scales(self, chunk: Chunk) -> bool:
        group: Any = chunk.group
        form = self.form(chunk.layout, group)
        return is_eight_bit(form, group) and blocks_of(chunk.layout, form, group["block_wise"]).over is not None

    def observed(self, chunk: Chunk) -> Generator[list[Request], list[Any], TensorList]:
        """Return the values that the moments average, by default the gradients."""
        yield from ()
        return chunk.gradients

    def move(self, chunk: Chunk, direction: TensorList, remaining: float) -> None:
        """Apply the step, and then weight decay.

        Args:
            chunk: The chunk whose weights move.
            direction: The step, −lr · m̂ / (√v̂ + eps).
            remaining: 1 − lr · weight_decay.
        """
        if remaining != 1.0:
            chunk.weights.mul_(remaining)
        chunk.weights.add_(direction, alpha=remaining)

    def rule(self, group: dict[str, Any], step: int) -> AdamRule:
        """Return the step without decay, with bias corrections in lr and eps: variants differ in where eps stands."""
        beta1, beta2 = map(float, group["betas"])
        root = math.sqrt(1.0 - beta2**step)
        lr = float(group["lr"]) * root / (1.0 - beta1**step)
        return AdamRule(lr, beta1, beta2, eps=float(group["eps"]) * root)


_READ_FROM_ARGS = {
    "nbits": ("optim_bits", "nbits"),
    "min_8bit_size": ("min_8bit_size",),
    "percentile_clipping": ("percentile_clipping",),
    "block_wise": ("block_wise",),
}


class AdamW8bit(MomentAdamW):
    """AdamW with moments in 8 bits (Dettmers et al. 2022, arXiv 2110.02861), equal on any layout.

    A byte stands for one of 256 numbers from −1 to 1 (0 to 1 for second moments), which are dense near 0. Blocks of up
    to 256 elements of a row share an fp32 scale, their largest absolute value. Moments take 2.03 bytes per element
    instead of 8; rows shorter than 256 elements have a scale each and take more. Blocks do not depend on the layout: a
    model trains to the same weights on one process and on many, and states can move between them.

    Unlike in bitsandbytes, a second moment above 0 is never rounded to 0, which would divide the next step by eps.

    Args:
        params: Parameters or groups of them, plain or DTensors.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Added to √v̂.
        weight_decay: p -= lr · weight_decay · p, after the step.
        nbits: 8, or 32 for moments in fp32.
        min_8bit_size: Moments of fewer elements, counted over all ranks, stay in fp32.
        percentile_clipping: Scale a gradient down to this percentile of its own last 100 norms; from 100 on, nothing
            is clipped.
        block_wise: False for one scale per tensor.
        is_paged: Whether moments live in page-locked host memory and are copied to the device chunk by chunk; a step
            then ends by waiting for the copies. No effect on a CPU.
        args: An object or mapping with any of ``optim_bits`` (or ``nbits``), ``min_8bit_size``,
            ``percentile_clipping`` and ``block_wise``, which override the arguments, as in bitsandbytes.
        half_update: See :class:`~meshwright.optim.sharded.ShardedOptimizer`.

    Raises:
        ConfigError: When a hyperparameter is out of range.
        ModelError: For parameters that are not fp32, fp16 or bf16.
    """

    states_can_be_averaged = False  # their codes have different scales

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        nbits: int = 8,
        min_8bit_size: int = 4096,
        percentile_clipping: int = 100,
        block_wise: bool = True,
        is_paged: bool = False,
        args: Any = None,
        *,
        half_update: str = "master",
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "nbits": nbits,
            "min_8bit_size": min_8bit_size,
            "percentile_clipping": percentile_clipping,
            "block_wise": block_wise,
            "is_paged": is_paged,
            "half_update": half_update,
        }
        super().__init__(params, {**defaults, **_overrides(args)})


def _overrides(args: Any) -> dict[str, Any]:
    values = args if isinstance(args, Mapping) else vars(args) if args is not None else {}
    return {key: values[name] for key, names in _READ_FROM_ARGS.items() for name in names if name in values}


# --- Percentile clipping: each gradient by its own last norms

NORMS = "gnorm_vec"
HISTORY = 100
"""Number of norms that are stored."""


def norms_form() -> Kept:
    """Return the form of a parameter's last squared norms."""
    return Kept((HISTORY,), (None,))


def clipped(
    chunk: Chunk, gradients: TensorList, over: tuple[int, ...] | None
) -> Generator[list[Sum], list[Any], TensorList]:
    """Scale gradients down to the ``percentile_clipping`` percentile of their last 100 norms.

    This is the clipping of bitsandbytes (until 0.49), with the norm of the whole gradient, and over the norms that
    there have been: bitsandbytes' buffer begins with zeros, to which low percentiles clip the first steps.

    Args:
        chunk: A chunk with the norms among its states.
        gradients: The values that the moments average.
        over: The parameter's dims that these share.
    """
    (squares,) = yield [Sum(gradients.squares(), over)]
    histories, known = chunk.states[NORMS].tensors, min(chunk.step, HISTORY)
    place = (chunk.step - 1) % HISTORY
    foreach_copy_([history[place] for history in histories], list(squares.unbind()))
    ranked = torch.stack(histories)[:, :known].sort(1).values
    limit = ranked[:, chunk.group["percentile_clipping"] * known // HISTORY]
    return gradients * torch.where(squares > limit, (limit / squares).sqrt(), 1.0)
