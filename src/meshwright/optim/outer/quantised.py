"""Pseudo-gradients in 8 or 4 bits: the mean over replicas in two legs, summed in fp32.

Every replica owns an equal piece of each bucket. First all send every owner their piece of the pseudo-gradient (one
all-to-all), and owners form the mean in fp32; then the mean, quantised once more, goes to all (one all-gather). All
decode the same bytes, so replicas stay equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from meshwright.optim.outer.exchange import Flight
from meshwright.optim.outer.message import Bucket, Message
from meshwright.optim.outer.policy import Quantise
from meshwright.optim.outer.replicas import Replicas

BLOCK = 64
"""Elements that share a scale, the block's largest absolute value: 0.5 bits per element in fp32."""
_LEVELS: dict[Quantise, int] = {"int8": 127, "int4": 7}
_SCALE_BYTES = 4


def encode(rows: torch.Tensor, kind: Quantise) -> torch.Tensor:
    """Quantises fp32 rows to the nearest of evenly spaced levels, block by block.

    Args:
        rows: Shape ``(num_rows, elements)``, elements a multiple of ``BLOCK``.
        kind: 8 or 4 bits.

    Returns:
        Bytes ``(num_rows, message_bytes(elements, kind))``: the scales, then the codes (two of 4 bits to a byte).
    """
    levels, blocks = _LEVELS[kind], rows.view(rows.shape[0], -1, BLOCK)
    scales = blocks.abs().amax(-1, keepdim=True) / levels
    codes = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)).round_().clamp_(-levels, levels)
    codes = codes.to(torch.int8).view(rows.shape[0], -1)
    if kind == "int4":
        shifted = (codes + 8).to(torch.uint8)
        codes = shifted[:, ::2] | (shifted[:, 1::2] << 4)
    return torch.cat([scales.view(rows.shape[0], -1).view(torch.uint8), codes.view(torch.uint8)], dim=1)


def decode(rows: torch.Tensor, kind: Quantise) -> torch.Tensor:
    """The fp32 rows that :func:`encode` turned into bytes."""
    per_block = _SCALE_BYTES + (BLOCK if kind == "int8" else BLOCK // 2)
    num_scale_bytes = rows.shape[1] // per_block * _SCALE_BYTES
    scales = rows[:, :num_scale_bytes].contiguous().view(torch.float32)
    codes = rows[:, num_scale_bytes:]
    if kind == "int4":
        pairs = torch.stack([codes & 15, codes >> 4], dim=-1).view(codes.shape[0], -1)
        values = pairs.to(torch.float32) - 8
    else:
        values = codes.contiguous().view(torch.int8).float()
    return (values.view(rows.shape[0], -1, BLOCK) * scales.unsqueeze(-1)).view(rows.shape[0], -1)


def message_bytes(elements: int, kind: Quantise) -> int:
    """Bytes of so many encoded elements, a multiple of ``BLOCK``."""
    return elements // BLOCK * (_SCALE_BYTES + (BLOCK if kind == "int8" else BLOCK // 2))


class QuantisedMean(Flight):
    """The mean of a message over replicas in few bits.

    Args:
        message: Filled; its values are replaced by the means.
        replicas: Who takes part in the collectives.
        kind: 8 or 4 bits.
        takes_part: Whether this replica's tensors count.
    """

    def __init__(self, message: Message, replicas: Replicas, kind: Quantise, *, takes_part: bool = True) -> None:
        self.views = message.views
        self._replicas, self._takes_part = replicas, takes_part
        self._legs = [_Legs(bucket, replicas, kind, takes_part=takes_part) for bucket in message.buckets]

    def advance(self) -> None:
        """Owners form their means and send them on."""
        with self._replicas.watched():
            for legs in self._legs:
                legs.second()

    def finish(self) -> int:
        """Takes the means over; does what :meth:`advance` does where nobody has called it."""
        self.advance()
        with self._replicas.watched():
            counts = [legs.end() for legs in self._legs]
        return round(float(counts[0])) if counts else 0


class _Legs:
    """One bucket on its two legs. A piece is preceded by one fp32 number: whether its sender takes part."""

    def __init__(self, bucket: Bucket, replicas: Replicas, kind: Quantise, *, takes_part: bool) -> None:
        self._bucket, self._replicas, self._kind = bucket, replicas, kind
        self._num_elements = bucket.values.numel()
        piece = -(-self._num_elements // (replicas.size * BLOCK)) * BLOCK  # padded to whole blocks
        rows = bucket.flat.new_zeros(replicas.size * piece, dtype=torch.float32)
        if takes_part:
            rows[: self._num_elements] = bucket.values
        sent = self._headed(encode(rows.view(replicas.size, piece), kind), torch.full((), float(takes_part)))
        self._received = torch.empty_like(sent)
        self._work: dist.Work | None = self._start(lambda: replicas.exchange(self._received, sent), sent)
        self._on_second = False

    def _start(self, send: Callable[[], dist.Work], sent: torch.Tensor) -> dist.Work | None:
        if self._replicas.size == 1:
            self._received = sent
            return None
        self._sent = sent  # alive until it has left
        return send()

    @staticmethod
    def _headed(rows: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        head = count.to(rows.device, torch.float32).reshape(1).view(torch.uint8).expand(rows.shape[0], -1)
        return torch.cat([head, rows], dim=1)

    def second(self) -> None:
        if self._on_second:
            return
        self._on_second = True
        if self._work is not None:
            self._work.wait()
        counts = self._received[:, :_SCALE_BYTES].contiguous().view(torch.float32)
        count = counts.sum()
        mean = decode(self._received[:, _SCALE_BYTES:], self._kind).sum(0, keepdim=True) / count.clamp(min=1)
        sent = self._headed(encode(mean, self._kind), count)
        self._received = sent.new_empty(self._replicas.size, sent.shape[1])
        self._work = self._start(lambda: self._replicas.all_gather(self._received, sent), sent)

    def end(self) -> torch.Tensor:
        if self._work is not None:
            self._work.wait()
        values = decode(self._received[:, _SCALE_BYTES:], self._kind).view(-1)
        self._bucket.values.copy_(values[: self._num_elements])
        return self._received[0, :_SCALE_BYTES].contiguous().view(torch.float32)[0]
