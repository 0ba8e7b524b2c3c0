"""Global weights and outer state divided among the replicas: each parameter has one owner."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.cost import balanced_owners
from meshwright.optim.clip import local_tensor
from meshwright.optim.outer.exchange import Flight
from meshwright.optim.outer.global_copy import GlobalCopy, OuterFactory
from meshwright.optim.outer.message import Bucket, Message
from meshwright.optim.outer.policy import OuterPolicy
from meshwright.optim.outer.replicas import Replicas
from meshwright.optim.outer.weights import InnerWeights


class SplitCopy(GlobalCopy):
    """A :class:`GlobalCopy` of which a rank keeps the part that it owns: about 1/N of its bytes with N replicas.

    Replicas send their weights to the owners (they have no global ones to subtract them from), owners average, step and
    send the new weights to all: the bytes of an all-reduce. Parameters are dealt out whole, the largest first, so any
    outer optimizer works and checkpoints keep true shapes; one very large parameter makes its owner the fullest.
    """

    def __init__(
        self, weights: InnerWeights, replicas: Replicas, make_outer: OuterFactory, policy: OuterPolicy
    ) -> None:
        # By the sizes of whole tensors: the ranks of a replica must agree on a tensor that they share.
        owners = balanced_owners([parameter.numel() for parameter in weights.parameters], replicas.size)
        self._owner = dict(zip(weights.parameters, owners, strict=True))
        super().__init__(weights, replicas, make_outer, policy)

    def held(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those of some parameters that this rank owns."""
        return [parameter for parameter in parameters if self._owner[parameter] == self._replicas.rank]

    def ordered(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Some parameters in the order of their owners: each one's are a piece of every bucket."""
        return sorted(parameters, key=lambda parameter: self._owner[parameter])

    @torch.no_grad()
    def write(self, parameters: Sequence[torch.Tensor], message: Message) -> None:
        """Fills a message with the weights themselves."""
        for parameter, view in zip(parameters, message.views, strict=True):
            view.copy_(self._weights.read(parameter))

    def send(self, parameters: Sequence[torch.Tensor], message: Message, *, takes_part: bool) -> Flight:
        """Starts sending weights to their owners."""
        return _ToOwners(message, self._owners_of(parameters), self._replicas, takes_part=takes_part)

    def _owners_of(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        return [self._owner[parameter] for parameter in parameters]

    def _step(self, pseudo_gradients: dict[torch.Tensor, torch.Tensor]) -> None:
        """What has arrived are averaged weights, of the owned parameters."""
        owned = {}
        for parameter in self.held(list(pseudo_gradients)):
            mean, copy = pseudo_gradients[parameter], local_tensor(self.of[parameter])
            begun = copy.to(self._weights.read(parameter).dtype).to(mean.device, mean.dtype)
            owned[parameter] = begun - mean
        super()._step(owned)

    def _norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        square = super()._norm(gradients).square().to(self._replicas.device)
        work = self._replicas.all_reduce(square)
        if work is not None:
            work.wait()
        return square.sqrt()

    @torch.no_grad()
    def values(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's parts of the global weights: every owner sends what it has. Collective."""
        message = self.message(parameters)
        for parameter, view in zip(parameters, message.views, strict=True):
            if parameter in self.of:
                view.copy_(local_tensor(self.of[parameter]))
        owners, works = self._owners_of(parameters), []
        for bucket in message.buckets:
            pieces = bucket.values.split(_piece_sizes(bucket, owners, self._replicas.size))
            works += [self._replicas.broadcast(piece, replica) for replica, piece in enumerate(pieces)]
        with self._replicas.watched():
            for work in works:
                if work is not None:
                    work.wait()
        return message.views


class _ToOwners(Flight):
    """Every replica's tensors to their owners, which form the means; ``views`` of others keep what was sent."""

    def __init__(self, message: Message, owners: list[int], replicas: Replicas, *, takes_part: bool) -> None:
        self.views, self._message, self._replicas = message.views, message, replicas
        self._sizes = [_piece_sizes(bucket, owners, replicas.size) for bucket in message.buckets]
        self._count = torch.full((), float(takes_part), device=replicas.device)
        self._works = [replicas.all_reduce(self._count)]
        self._received: list[torch.Tensor] = []
        for bucket, sizes in zip(message.buckets, self._sizes, strict=True):
            if not takes_part:
                bucket.flat.zero_()
            own = sizes[replicas.rank]
            received = bucket.values.new_empty(replicas.size * own)
            if replicas.size == 1:
                received = bucket.values
            else:
                self._works.append(replicas.exchange(received, bucket.values, [own] * replicas.size, sizes))
            self._received.append(received)

    def finish(self) -> int:
        """Forms the means of what this rank owns."""
        with self._replicas.watched():
            for work in self._works:
                if work is not None:
                    work.wait()
        rank, count = self._replicas.rank, self._count.clamp(min=1)
        for bucket, sizes, received in zip(self._message.buckets, self._sizes, self._received, strict=True):
            mean = received.view(self._replicas.size, -1).sum(0).div_(count.to(received.device))
            bucket.values.split(sizes)[rank].copy_(mean)
        return round(float(self._count))


def _piece_sizes(bucket: Bucket, owners: list[int], num_replicas: int) -> list[int]:
    """Elements of a bucket that each replica owns."""
    sizes = [0] * num_replicas
    for member, size in zip(bucket.members, bucket.sizes, strict=True):
        sizes[owners[member]] += size
    return sizes
