"""Averages over replicas: of messages, in full precision or in 8 or 4 bits, and of inner optimizers' states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from meshwright.comm.compression import decode, encode
from meshwright.cost import Encoding
from meshwright.errors import ConfigError
from meshwright.optim.dtensors import local_tensor
from meshwright.optim.guarded_step import GuardedOptimizer
from meshwright.optim.mixed_precision import MASTER
from meshwright.optim.outer.replica_group import Bucket, Message, Replicas
from meshwright.optim.outer.sync_policy import Quantise


class Flight(ABC):
    """A message whose average is being computed. Every replica starts, advances and finishes flights in one order."""

    views: list[torch.Tensor]
    """This replica's tensors; after :meth:`finish`, their means over the replicas that took part."""

    def advance(self) -> None:  # noqa: B027 - most flights have one leg
        """Begin the second leg, where there is one."""

    @abstractmethod
    def finish(self) -> int:
        """Wait, and return how many replicas took part (0: ``views`` are zeros)."""


class Landed(Flight):
    """A finished flight, loaded from a checkpoint."""

    def __init__(self, views: list[torch.Tensor], count: int) -> None:
        self.views, self._count = views, count

    def finish(self) -> int:
        """Return the number of replicas that took part."""
        return self._count


class AllReduce(Flight):
    """One all-reduce per bucket in full precision.

    Args:
        message: Filled.
        replicas: The replicas that average.
        takes_part: Whether this replica's tensors count.
    """

    def __init__(self, message: Message, replicas: Replicas, *, takes_part: bool = True) -> None:
        self.views, self._message, self._replicas = message.views, message, replicas
        self._works: list[dist.Work | None] = []
        for bucket in message.buckets:
            if not takes_part:
                bucket.flat.zero_()  # values that are not finite must not travel
            bucket.extras[-1:].fill_(float(takes_part))
            self._works.append(replicas.all_reduce(bucket.flat))

    def finish(self) -> int:
        """Divide the sums."""
        counts = []
        with self._replicas.watched():
            for bucket, work in zip(self._message.buckets, self._works, strict=True):
                if work is not None:
                    work.wait()
                counts.append(bucket.extras[-1].clone())
                bucket.values.div_(bucket.extras[-1].clamp(min=1))
        # Equal in every bucket. Read on the host last, when all divisions are queued.
        return round(float(counts[0])) if counts else 0


@torch.no_grad()
def average_in_place(tensors: Sequence[torch.Tensor], replicas: Replicas, bucket_bytes: int) -> None:
    """Replace plain tensors by their means over all replicas."""
    if replicas.size == 1 or not tensors:
        return
    message = Message.of(tensors, bucket_bytes)
    AllReduce(message, replicas).finish()
    message.copy_to(tensors)


@torch.no_grad()
def average_gradients(
    gradients: Sequence[torch.Tensor | None], like: Sequence[torch.Tensor], replicas: Replicas, bucket_bytes: int
) -> list[torch.Tensor | None]:
    """Average gradients over replicas; a missing gradient counts as zero where other replicas have one.

    Args:
        gradients: This replica's gradients, as plain tensors; None where it has none.
        like: Tensors of their shapes.
        replicas: The replicas that average.
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
            if gradients[index] is None and not slot:  # reads the device only where a gradient is missing
                means[index] = None
    return means


# --- Quantised averages: the mean of messages in 8 or 4 bits, summed in fp32
#
# Every replica owns an equal piece of each bucket. On the first leg all send every owner its piece (one all-to-all),
# and owners form the mean in fp32; on the second the mean, quantised once more, goes to all (one all-gather). All
# decode the same bytes, so replicas stay equal bit for bit.

BLOCK = 64
"""Elements that share a scale, the block's largest absolute value: 0.5 bits per element in fp32."""
_HEAD_BYTES = 4


class QuantisedMean(Flight):
    """Average of a message over replicas in few bits.

    Args:
        message: Filled; its values are replaced by the means.
        replicas: The replicas that average.
        kind: 8 or 4 bits.
        takes_part: Whether this replica's tensors count.
    """

    def __init__(self, message: Message, replicas: Replicas, kind: Quantise, *, takes_part: bool = True) -> None:
        self.views = message.views
        self._replicas, self._takes_part = replicas, takes_part
        self._legs = [_Legs(bucket, replicas, kind, takes_part=takes_part) for bucket in message.buckets]

    def advance(self) -> None:
        """Form the means of the own pieces and send them to all."""
        with self._replicas.watched():
            for legs in self._legs:
                legs.second()

    def finish(self) -> int:
        """Decode the means, after :meth:`advance` if nobody has called it."""
        self.advance()
        with self._replicas.watched():
            counts = [legs.end() for legs in self._legs]
        return round(float(counts[0])) if counts else 0


class _Legs:
    """The two legs of one bucket. A piece is preceded by one fp32 number: whether its sender takes part."""

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
        self._sent = sent  # must stay alive until it has left
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


# --- The inner optimizer's states when its weights are replaced: reset, averaged, or copied from replica 0


class InnerState:
    """States of the inner optimizer, and the ways to change them when replicas synchronise.

    Args:
        inner: Any torch optimizer.
        replicas: The replicas that synchronise.
        bucket_bytes: See Message.
    """

    def __init__(self, inner: Optimizer, replicas: Replicas, bucket_bytes: int) -> None:
        self._inner = inner.inner if isinstance(inner, GuardedOptimizer) else inner
        self._replicas, self._bucket_bytes = replicas, bucket_bytes

    def check_average(self) -> None:
        """Refuse optimizers whose states cannot be averaged.

        Raises:
            ConfigError: For quantised moments, and for moments in a subspace that each replica chooses.
        """
        if not getattr(self._inner, "states_can_be_averaged", True):
            raise ConfigError(
                f"The states of {type(self._inner).__name__} cannot be averaged over replicas",
                expected="states that are plain numbers in one basis",
                got="quantised states, or moments in a subspace that every replica chooses for itself",
                fix="use inner_state='keep', as DiLoCo does, or 'reset'",
            )

    def reset(self, parameters: Sequence[torch.Tensor]) -> None:
        """Reset states of parameters to those before the first step; learning rates and fp32 copies stay."""
        for parameter in parameters:
            state = self._inner.state.pop(parameter, None)
            if not state or MASTER not in state:
                continue
            fresh: dict[str, Any] = self._inner.empty_state(parameter)  # type: ignore[attr-defined]
            step = {"step": type(state["step"])(0)} if not isinstance(state["step"], torch.Tensor) else {}
            self._inner.state[parameter] = {**step, **fresh, MASTER: state[MASTER]}

    def average(self, parameters: Sequence[torch.Tensor]) -> None:
        """Average floating-point and complex states, without step counts, of parameters with states everywhere."""
        tensors = []
        for parameter, keys in self._common(parameters):
            for key in keys:
                value = local_tensor(self._inner.state[parameter][key])
                is_number = value.is_floating_point() or value.is_complex()
                if value.dim() > 0 and not is_number:
                    self.check_average()
                    raise _not_averageable(type(self._inner).__name__, key, value)
                if is_number and value.dim() > 0 and key != MASTER:
                    tensors.append(value)
        average_in_place(tensors, self._replicas, self._bucket_bytes)

    @torch.no_grad()
    def copy_from_first(self, parameters: Sequence[torch.Tensor]) -> None:
        """Copy replica 0's states to all, for parameters with states in every replica."""
        with self._replicas.watched():
            for parameter, keys in self._common(parameters):
                for key in keys:
                    value = local_tensor(self._inner.state[parameter][key])
                    sent = value.to(self._replicas.device).contiguous()
                    work = self._replicas.broadcast(sent, 0)
                    if work is not None:
                        work.wait()
                    value.copy_(sent)

    def _common(self, parameters: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, list[str]]]:
        """Return parameters whose tensor states have the same names and shapes in every replica, with those names."""
        own = [_forms(self._inner.state.get(parameter) or {}) for parameter in parameters]
        every = self._replicas.gather_distinct(own)
        alike = [all(other[place] == forms for _, other in every) for place, forms in enumerate(own)]
        return [
            (parameter, [name for name, *_ in forms])
            for parameter, forms, same in zip(parameters, own, alike, strict=True)
            if same and forms
        ]


def _forms(state: dict[str, Any]) -> list[tuple[str, tuple[int, ...], str]]:
    tensors = {key: local_tensor(value) for key, value in state.items() if isinstance(value, torch.Tensor)}
    return [(key, tuple(value.shape), str(value.dtype)) for key, value in tensors.items()]


def _not_averageable(name: str, key: str, value: torch.Tensor) -> ConfigError:
    return ConfigError(
        f"The state {key!r} of {name} cannot be averaged over replicas",
        expected="floating-point states",
        got=f"{value.dtype} of shape {tuple(value.shape)}",
        fix="use inner_state='keep' or 'reset'",
    )
