"""Seconds of what is offloaded: copies between memories, and the update in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.cost.cluster import Cluster
from meshwright.cost.copies import copies
from meshwright.cost.homes import homes_of
from meshwright.cost.memory import shape_on
from meshwright.cost.step import Copy, Step


@dataclass(frozen=True)
class Copying:
    """Seconds of a step's copies, were they alone.

    Args:
        forward_s: Beside forward, in the direction that carries more: links work in both at once.
        backward_s: Beside backward.
        update_s: At the update, which waits for them.
        hides: Whether they run beside computing: on a CPU they take its cores.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    update_s: float = 0.0
    hides: bool = True

    def left_s(self, forward_s: float, backward_s: float) -> float:
        """What does not hide behind so many seconds of forward and of backward."""
        if not self.hides:
            return self.forward_s + self.backward_s
        return max(0.0, self.forward_s - forward_s) + max(0.0, self.backward_s - backward_s)


NO_COPIES = Copying()


def copying(step: Step, cluster: Cluster) -> Copying:
    """The copies of a step on a cluster."""
    if step.hosted is None and not (step.activations is not None and step.activations.hosted_bytes):
        return NO_COPIES
    every = copies(step)
    forward, backward, update = (
        _seconds([copy for copy in every if copy.moment == moment], step, cluster)
        for moment in ("forward", "backward", "update")
    )
    return Copying(forward, backward, update, hides=not step.on_cpu)


def hosted_share(step: Step) -> float:
    """Of the elements that train, those whose update runs in host memory."""
    if step.hosted is None:
        return 0.0
    here = there = 0
    for home, (_, parameter) in zip(homes_of(step), step.every_parameter(), strict=True):
        if parameter.trainable:
            numel = 1
            for size in shape_on(step, parameter, step.optimizer.axis):
                numel *= size
            here += home.on_device * numel
            there += (home.count - home.on_device) * numel
    return there / (here + there) if here + there else 0.0


def _seconds(every: Sequence[Copy], step: Step, cluster: Cluster) -> float:
    """The slowest of the ways: each direction of the link to the host, the host's memory under both, and the disk."""
    ways: dict[tuple[str, ...], float] = {}
    for copy in every:
        way: tuple[str, ...]
        if "disk" in (copy.source, copy.target):
            way, seconds = ("disk",), cluster.disk.latency_s + copy.bytes_per_step / cluster.disk.bytes_per_s
        elif step.on_cpu:  # within one memory: read and written
            way, seconds = ("host",), 2 * copy.bytes_per_step / cluster.device.bandwidth_bytes_per_s
        else:
            way, link = (copy.source, copy.target), cluster.host_share
            seconds = link.latency_s + copy.bytes_per_step / link.bytes_per_s
            ways["host",] = ways.get(("host",), 0.0) + copy.bytes_per_step / cluster.host_memory.bytes_per_s
        ways[way] = ways.get(way, 0.0) + seconds
    return max(ways.values(), default=0.0)
