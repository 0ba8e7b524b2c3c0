"""Statistics of a tensor in a form that merges: count, mean, sum of squared deviations, minimum, maximum.

Parts are merged with the pairwise formula of Chan, Golub & LeVeque ("Algorithms for computing the sample variance",
1983), here for any number of parts at once. All arithmetic is fp64: a sum of fp32 squares would lose a small spread
beside a large mean.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch

COUNT, MEAN, SQUARES, MIN, MAX = range(5)
"""The columns of a row of moments; SQUARES is the sum of squared deviations from the mean."""

# A large shard is never copied whole: 2 MiB of fp64 stay in a CPU's cache, 128 MiB keep a GPU busy.
_CHUNK_ELEMENTS = {"cpu": 1 << 18, "other": 1 << 24}


def nothing() -> torch.Tensor:
    """The moments of no elements: merging them with others changes nothing."""
    return torch.tensor([0.0, 0.0, 0.0, math.inf, -math.inf], dtype=torch.float64)


@torch.no_grad()
def moments(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Moments of each tensor, computed where it lives; the host waits once per device.

    Args:
        tensors: Plain tensors of any real type, shape and device; they may be empty.

    Returns:
        Shape ``(len(tensors), 5)``, fp64, on the CPU. NaN and infinity show in every column they would show in.
    """
    table = nothing().repeat(len(tensors), 1)
    places: dict[torch.device, list[int]] = defaultdict(list)
    for place, tensor in enumerate(tensors):
        if tensor.numel() > 0:
            places[tensor.device].append(place)
    for here in places.values():
        table[here] = torch.stack([_of_one(tensors[place]) for place in here]).cpu()
    return table


def _of_one(tensor: torch.Tensor) -> torch.Tensor:
    size = _CHUNK_ELEMENTS["cpu" if tensor.is_cpu else "other"]
    return merge(torch.stack([_of_chunk(chunk) for chunk in tensor.detach().reshape(-1).split(size)]))


def _of_chunk(chunk: torch.Tensor) -> torch.Tensor:
    elements = chunk.to(torch.float64, copy=True)
    low, high = elements.aminmax()
    mean = elements.mean()
    elements -= mean  # two passes: four times as fast as torch.var_mean, and as exact
    return torch.stack([torch.full_like(mean, chunk.numel()), mean, torch.dot(elements, elements), low, high])


def merge(parts: torch.Tensor) -> torch.Tensor:
    """Moments of all parts taken together.

    Args:
        parts: Shape ``(parts, …, 5)``, fp64.

    Returns:
        Shape ``(…, 5)``, fp64.
    """
    count, mean, squares, low, high = parts.unbind(-1)
    total = count.sum(0)
    centre = (count * mean).sum(0) / total.clamp(min=1)
    spread = (squares + count * (mean - centre).square()).sum(0)
    return torch.stack([total, centre, spread, low.amin(0), high.amax(0)], dim=-1)


def statistics(row: torch.Tensor) -> tuple[float, float, float, float]:
    """``(max, min, std, mean)`` of one row of moments.

    The standard deviation is the unbiased one (divided by n - 1), as ``torch.std`` and BMTrain compute it. A single
    element has none: it is 0.0 here, where torch gives NaN. Without elements all four are NaN.
    """
    count, mean, squares, low, high = row.tolist()
    if count == 0:
        return math.nan, math.nan, math.nan, math.nan
    return high, low, math.sqrt(squares / max(count - 1, 1)), mean
