"""Replicas that begin alike: what differs is found, and taken over from the first replica."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.optim.outer.message import Message
from meshwright.optim.outer.replicas import Replicas
from meshwright.runtime import bit_sums, gather_objects, print_rank


def made_equal(tensors: Sequence[torch.Tensor], replicas: Replicas, bucket_bytes: int) -> None:
    """Gives all replicas the values of the first where any differ, and says so once; collective over the world.

    Args:
        tensors: This rank's parts, as plain tensors.
        replicas: Which ranks hold the same parts.
        bucket_bytes: See Message.
    """
    every = replicas.gather_objects(bit_sums(tensors).tolist())
    differ = any(other != every[0] for other in every)
    if not any(gather_objects(differ)):
        return
    take_first(tensors, replicas, bucket_bytes)
    print_rank("meshwright: the replicas began with different weights; all have those of the first now", flush=True)


@torch.no_grad()
def take_first(tensors: Sequence[torch.Tensor], replicas: Replicas, bucket_bytes: int) -> None:
    """Replaces plain tensors by the first replica's."""
    message = Message(tensors, bucket_bytes)
    for view, tensor in zip(message.views, tensors, strict=True):
        view.copy_(tensor)
    works = [replicas.broadcast(bucket.flat, 0) for bucket in message.buckets]
    with replicas.watched():
        for work in works:
            if work is not None:
                work.wait()
    for view, tensor in zip(message.views, tensors, strict=True):
        tensor.copy_(view)
