"""Whether all ranks that share a parameter have its gradient: counted in the all-reduce that happens anyway."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch

from meshwright.errors import ModelError
from meshwright.optim.sharded.chunk import Chunk
from meshwright.optim.sharded.layout import Axis, Layout


class Presence:
    """How many of the ranks that share each of some parameters have its gradient: all of them, or none, is right.

    Args:
        axes: The axes that split these parameters.
        layouts: Theirs.
        present: Whether this rank has the gradient of each.
    """

    def __init__(self, axes: tuple[Axis, ...], layouts: list[Layout], present: list[bool]) -> None:
        self.axes = axes
        self._layouts = layouts
        device = axes[0].device_type
        all_alike = len(set(present)) == 1  # then the vector is made on the device, without a copy
        self.counts = (
            torch.full((len(present),), float(present[0]), device=device)
            if all_alike
            else torch.tensor(present, dtype=torch.float32).to(device)
        )
        """Shape ``(number of parameters,)``: this rank's votes, then everybody's."""
        self._copied: torch.cuda.Event | None = None

    @property
    def is_on_host(self) -> bool:
        """Whether looking at the counts waits for nothing."""
        return self.axes[0].device_type == "cpu"

    def arrive(self, counts: torch.Tensor) -> None:
        """Takes the sums over all ranks; on their way to the host meanwhile."""
        self.counts = counts.to("cpu", non_blocking=True)
        if not self.is_on_host:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(counts.device))

    def check(self) -> None:
        """Looks at the counts; on a device they have long arrived by the next step.

        Raises:
            ModelError: On every rank that shares the parameter.
        """
        if self._copied is not None:
            self._copied.synchronize()
        ranks = math.prod(axis.size for axis in self.axes)
        for layout, count in zip(self._layouts, self.counts.tolist(), strict=True):
            if count not in (0, ranks):
                raise ModelError(
                    "A sharded parameter has a gradient on some ranks only",
                    expected=f"a gradient on all {ranks} ranks that share it, or on none",
                    got=f"one on {count:.0f}, for a parameter of shape {layout.shape}",
                    fix="run the same forward and backward on every rank; one without data uses its loss times zero",
                )


def votes(chunks: Sequence[Chunk]) -> list[Presence]:
    """This rank's votes on every parameter that axes split, in the order of the parameters.

    The order matters: a rank that lacks a gradient batches its parameters otherwise than its peers.
    """
    seen = {member.position: (member.slot.layout, chunk.has_gradients) for chunk in chunks for member in chunk.members}
    by_axes: dict[tuple[Axis, ...], list[tuple[Layout, bool]]] = defaultdict(list)
    for _, (layout, present) in sorted(seen.items(), key=lambda item: item[0]):
        by_axes[layout.splitting(None)].append((layout, present))
    return [
        Presence(axes, [layout for layout, _ in members], [present for _, present in members])
        for axes, members in by_axes.items()
    ]
