"""Means over replicas of messages that travel while training goes on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist

from meshwright.optim.outer.message import Message
from meshwright.optim.outer.replicas import Replicas


class Flight(ABC):
    """A message under way. Every replica starts, advances and finishes its flights in the same order."""

    views: list[torch.Tensor]
    """Sent: this replica's tensors. After :meth:`finish`: their means over the replicas that took part."""

    def advance(self) -> None:  # noqa: B027 - most flights have one leg
        """Begins the second leg, where there is one."""

    @abstractmethod
    def finish(self) -> int:
        """Waits; returns how many replicas took part (0: ``views`` are zeros)."""


class Landed(Flight):
    """A flight whose result is known: a checkpoint's."""

    def __init__(self, views: list[torch.Tensor], count: int) -> None:
        self.views, self._count = views, count

    def finish(self) -> int:
        """Returns the count."""
        return self._count


class AllReduce(Flight):
    """One all-reduce per bucket in full precision.

    Args:
        message: Filled.
        replicas: Who takes part in the collective.
        takes_part: Whether this replica's tensors count.
    """

    def __init__(self, message: Message, replicas: Replicas, *, takes_part: bool = True) -> None:
        self.views, self._message, self._replicas = message.views, message, replicas
        self._works: list[dist.Work | None] = []
        for bucket in message.buckets:
            if not takes_part:
                bucket.flat.zero_()  # what is not finite must not travel
            bucket.extras[-1] = float(takes_part)
            self._works.append(replicas.all_reduce(bucket.flat))

    def finish(self) -> int:
        """Divides the sums."""
        counts = []
        with self._replicas.watched():
            for bucket, work in zip(self._message.buckets, self._works, strict=True):
                if work is not None:
                    work.wait()
                counts.append(bucket.extras[-1].clone())
                bucket.values.div_(bucket.extras[-1].clamp(min=1))
        # Every bucket tells the same: looked at once, after all divisions are under way.
        return round(float(counts[0])) if counts else 0


@torch.no_grad()
def average_in_place(tensors: Sequence[torch.Tensor], replicas: Replicas, bucket_bytes: int) -> None:
    """Replaces plain tensors by their means over all replicas."""
    if replicas.size == 1 or not tensors:
        return
    message = Message(tensors, bucket_bytes)
    for view, tensor in zip(message.views, tensors, strict=True):
        view.copy_(tensor)
    AllReduce(message, replicas).finish()
    for view, tensor in zip(message.views, tensors, strict=True):
        tensor.copy_(view)


@torch.no_grad()
def average_gradients(
    gradients: Sequence[torch.Tensor | None], like: Sequence[torch.Tensor], replicas: Replicas, bucket_bytes: int
) -> list[torch.Tensor | None]:
    """Means of gradients over replicas; one that some replicas lack counts there as zero.

    Args:
        gradients: This replica's, as plain tensors; None where it has none.
        like: Tensors of their shapes.
        replicas: Who averages.
        bucket_bytes: See Message.

    Returns:
        The means; None where no replica has a gradient.
    """
    message = Message(like, bucket_bytes, extras="each")
    for view, gradient in zip(message.views, gradients, strict=True):
        if gradient is not None:
            view.copy_(gradient)
    for bucket in message.buckets:
        present = [float(gradients[index] is not None) for index in bucket.members]
        bucket.extras[:-1] = torch.tensor(present, device=bucket.flat.device)
    AllReduce(message, replicas).finish()
    means: list[torch.Tensor | None] = list(message.views)
    for bucket in message.buckets:
        for index, slot in zip(bucket.members, bucket.extras, strict=False):
            if gradients[index] is None and not slot:  # only a replica without one asks
                means[index] = None
    return means
