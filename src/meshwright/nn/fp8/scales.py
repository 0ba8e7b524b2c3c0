"""The end of a step: largest values enter the histories, and scales follow; of all layers at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from meshwright.nn.fp8.linear import Fp8Linear
from meshwright.nn.fp8.recipe import GRADIENT, INPUT, WEIGHT


@torch.no_grad()
def update_scales(layers: Sequence[Fp8Linear], group: dist.ProcessGroup | None = None) -> None:
    """Ends a step: moves the largest values of the step into the histories, and updates the scales when it is due.

    Called once before every optimizer step. Nothing in it waits for the device, and its kernels do not grow in number
    with the layers. A tensor that was not seen in the step, or was zero, enters as 0, and a history of zeros leaves a
    scale as it was. What was inf or nan does not enter.

    Args:
        layers: All of one recipe and device; the same on every rank of ``group``.
        group: The ranks that hold these layers: one all-reduce of all largest values makes histories and scales equal
            on them. None updates each rank by what it has seen itself.
    """
    if not layers:
        return
    recipe = layers[0].fp8.recipe
    amax_L3 = torch.stack([_numbers(layer.fp8_amax) for layer in layers])
    if group is not None:
        dist.all_reduce(amax_L3, dist.ReduceOp.MAX, group=group)
    history_L3H = torch.stack([_numbers(layer.fp8_amax_history) for layer in layers]).roll(1, dims=-1)
    history_L3H[..., 0] = amax_L3
    by_L3 = amax_L3 if recipe.amax_compute_algo == "most_recent" else history_L3H.amax(dim=-1)
    scale_L3 = torch.stack([_numbers(layer.fp8_scale) for layer in layers])
    wanted_L3 = torch.stack([recipe.scale(by_L3[:, role], role) for role in (INPUT, WEIGHT, GRADIENT)], dim=1)
    due_L1 = torch.stack([layer.fp8_num_updates for layer in layers]).remainder(recipe.interval).eq(0).unsqueeze(1)
    scale_L3 = torch.where(due_L1 & (by_L3 > 0) & torch.isfinite(wanted_L3), wanted_L3, scale_L3)
    torch._foreach_copy_([_numbers(layer.fp8_amax_history) for layer in layers], list(history_L3H))
    torch._foreach_copy_([_numbers(layer.fp8_scale) for layer in layers], list(scale_L3))
    torch._foreach_add_([layer.fp8_num_updates for layer in layers], 1)
    torch._foreach_zero_([layer.fp8_amax for layer in layers])


def _numbers(bits: torch.Tensor) -> torch.Tensor:
    """A view of int32 bits as the fp32 numbers that they are."""
    return bits.view(torch.float32)
