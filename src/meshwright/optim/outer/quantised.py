"""Pseudo-gradients in 8 or 4 bits: the mean over replicas in two legs, summed in fp32.

Every replica owns an equal piece of each bucket. First all send every owner their piece of the pseudo-gradient (one
all-to-all), and owners form the mean in fp32; then the mean, quantised once more, goes to all (one all-gather). All
decode the same bytes, so replicas stay equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from meshwright.cost import Encoding
from meshwright.distributed.quantise import decode, encode
from meshwright.optim.outer.exchange import Flight
from meshwright.optim.outer.message import Bucket, Message
from meshwright.optim.outer.policy import Quantise
from meshwright.optim.outer.replicas import Replicas

BLOCK = 64
"""Elements that share a scale, the block's largest absolute value: 0.5 bits per element in fp32."""
_HEAD_BYTES = 4


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
        self._bucket, self._replicas, self._encoding = bucket, replicas, Encoding(kind, BLOCK)
        self._num_elements = bucket.values.numel()
        self._piece = piece = -(-self._num_elements // (replicas.size * BLOCK)) * BLOCK  # padded to whole blocks
        rows = bucket.flat.new_zeros(replicas.size * piece, dtype=torch.float32)
        if takes_part:
            rows[: self._num_elements] = bucket.values
        sent = self._headed(
            encode([rows.view(replicas.size, piece)], self._encoding), torch.full((), float(takes_part))
        )
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
        counts = self._received[:, :_HEAD_BYTES].contiguous().view(torch.float32)
        count = counts.sum()
        mean = self._decoded().sum(0, keepdim=True) / count.clamp(min=1)
        sent = self._headed(encode([mean], self._encoding), count)
        self._received = sent.new_empty(self._replicas.size, sent.shape[1])
        self._work = self._start(lambda: self._replicas.all_gather(self._received, sent), sent)

    def _decoded(self) -> torch.Tensor:
        return decode(self._received[:, _HEAD_BYTES:], [self._piece], self._encoding)[0]

    def end(self) -> torch.Tensor:
        if self._work is not None:
            self._work.wait()
        self._bucket.values.copy_(self._decoded().reshape(-1)[: self._num_elements])
        return self._received[0, :_HEAD_BYTES].contiguous().view(torch.float32)[0]
