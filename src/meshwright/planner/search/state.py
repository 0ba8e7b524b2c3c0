"""What parameters alone cost a candidate, each figure found out when it is first asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from meshwright.cost import Activations, Cluster, Step
from meshwright.cost.collectives import Network
from meshwright.cost.copying import copying
from meshwright.cost.kernels import Machine
from meshwright.cost.rank import one_s, updated_s

_VERY_MUCH = 2**60  # bytes


@dataclass(frozen=True, eq=False)
class State:
    """Bytes on a rank, and seconds of an update and of gathers and reductions.

    Args:
        bare: ``bare(micro_batches)`` is a step of bare parameters.
        wires: Links at their full bandwidth.
        machine: Kernels at their best.
        network: Collectives at their best.
        taken: What a step takes of a rank's limit.
    """

    bare: Callable[[int], Step]
    wires: Cluster
    machine: Machine
    network: Network
    taken: Callable[[Step], int]

    @functools.cached_property
    def once(self) -> Step:
        """With one micro-batch."""
        return self.bare(1)

    @functools.cached_property
    def twice(self) -> Step:
        """With more."""
        return self.bare(2)

    def held_bytes(self, micro_batches: int) -> int:
        """Parameters, gradients, the optimizer's state and what is gathered."""
        return self._held_once if micro_batches == 1 else self._held_twice

    def at_loss_bytes(self, micro_batches: int) -> int:
        """The same as the loss runs backward, beside all that forward saved: what only forward gathers is free then."""
        return self._at_loss_once if micro_batches == 1 else self._at_loss_twice

    @functools.cached_property
    def _at_loss_once(self) -> int:
        return self._at_loss(self.once)

    @functools.cached_property
    def _at_loss_twice(self) -> int:
        return self._at_loss(self.twice)

    def _at_loss(self, step: Step) -> int:
        # What saves so much behind the blocks holds most as the loss runs backward, whatever else the step does.
        much = Activations(_VERY_MUCH, outside_bytes=_VERY_MUCH)
        return self.taken(step.replace(activations=much)) - _VERY_MUCH

    @functools.cached_property
    def _held_once(self) -> int:
        return self.taken(self.once)

    @functools.cached_property
    def _held_twice(self) -> int:
        return self.taken(self.twice)

    @functools.cached_property
    def update_s(self) -> float:
        """The update."""
        return updated_s(self.once, self.machine, self.wires, copying(self.once, self.wires))

    @functools.cached_property
    def link_s(self) -> tuple[float, float]:
        """Gathers and reductions of one micro-batch, and of every further one."""
        first, both = self._link_s(self.once), self._link_s(self.twice)
        return first, max(both - first, 0.0)

    def _link_s(self, step: Step) -> float:
        hidden = (each for each in step.traffic if each.hidden and each.moment != "update" and each.kind != "send")
        return sum(one_s(step, each, self.network) for each in hidden)
