"""Many tensors in few flat buffers: what travels between replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which sums over replicas are formed: fp64 for fp64, fp32 for all else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass
class Bucket:
    """Some of a message's tensors in one buffer, and after them one number per extra slot."""

    members: list[int]
    """Their places in the message."""
    flat: torch.Tensor
    """Shape ``(elements + extras,)``."""
    sizes: list[int]
    """Elements of every member."""

    @property
    def values(self) -> torch.Tensor:
        """The elements without the extra slots."""
        return self.flat[: sum(self.sizes)]

    @property
    def extras(self) -> torch.Tensor:
        """The extra slots."""
        return self.flat[sum(self.sizes) :]


class Message:
    """Flat buffers with one view per tensor; fill the views, send the buckets, read the views.

    Args:
        like: Tensors whose shapes, devices and (widened) types the views have.
        bucket_bytes: A bucket is closed when it is at least so large. A tensor never crosses buckets, however large.
        extras: Slots per bucket besides: ``"one"``, or ``"each"`` for one per member and one more.
    """

    def __init__(self, like: Sequence[torch.Tensor], bucket_bytes: int, extras: str = "one") -> None:
        self.views: list[torch.Tensor] = [tensor.new_empty(0) for tensor in like]
        self.buckets: list[Bucket] = []
        for members in _cut(like, bucket_bytes):
            sizes = [like[index].numel() for index in members]
            slots = 1 + (len(members) if extras == "each" else 0)
            first = like[members[0]]
            flat = torch.zeros(sum(sizes) + slots, dtype=wide_type(first.dtype), device=first.device)
            self.buckets.append(Bucket(members, flat, sizes))
            for index, part in zip(members, flat[: sum(sizes)].split(sizes), strict=True):
                self.views[index] = part.view(like[index].shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(bucket.flat.nbytes for bucket in self.buckets)


def _cut(like: Sequence[torch.Tensor], bucket_bytes: int) -> list[list[int]]:
    """Buckets of one device and type each, in the order of their first tensors."""
    buckets: list[list[int]] = []
    open_buckets: dict[tuple[torch.device, torch.dtype], tuple[list[int], int]] = {}
    for index, tensor in enumerate(like):
        kind = (tensor.device, wide_type(tensor.dtype))
        bucket, size = open_buckets.get(kind, ([], 0))
        if not bucket:
            buckets.append(bucket)
        bucket.append(index)
        size += tensor.numel() * kind[1].itemsize
        open_buckets[kind] = (bucket, size) if size < bucket_bytes else ([], 0)
    return buckets
