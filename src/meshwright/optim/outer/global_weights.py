"""Global weights, on which all replicas agree, and their optimizer: in every replica, or divided among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.cost import balanced_owners
from meshwright.errors import ConfigError
from meshwright.optim.dtensors import Stages, local_tensor, multiply_, step_by_layouts, total_norm_of, wrapped_like
from meshwright.optim.outer.replica_averaging import AllReduce, Flight, QuantisedMean
from meshwright.optim.outer.replica_group import Bucket, Message, Replicas, wide_type
from meshwright.optim.outer.sync_policy import OuterPolicy
from meshwright.optim.weight_average import InnerWeights

OuterFactory = Callable[[list[nn.Parameter]], Optimizer]


class GlobalCopy:
    """Global weights in fp32 (fp64 beside fp64), sharded like the parameters, equal in every replica.

    Args:
        weights: The weights of the inner optimizer.
        replicas: The replicas to synchronise with.
        make_outer: Builds the outer optimizer over the global weights.
        policy: Details of the synchronisation.
        stages: The pipeline, where the parameters are one rank's part.
    """

    def __init__(
        self,
        weights: InnerWeights,
        replicas: Replicas,
        make_outer: OuterFactory,
        policy: OuterPolicy,
        stages: Stages | None = None,
    ) -> None:
        self._weights, self._replicas, self._policy, self._stages = weights, replicas, policy, stages
        self.of: dict[torch.Tensor, nn.Parameter] = {p: self._copy(p) for p in self.owned(weights.parameters)}
        """The global weights that this rank stores, by parameter."""
        self.outer = _built(make_outer, list(self.of.values()))

    def owned(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the parameters whose global weights this rank stores."""
        return list(parameters)

    def ordered(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return parameters in the order in which they are sent."""
        return list(parameters)

    def _copy(self, parameter: torch.Tensor) -> nn.Parameter:
        value = self._weights.read(parameter)
        device = torch.device("cpu") if self._policy.offload else value.device
        on_host = device.type == "cpu" and value.device.type == "cuda"
        copy = torch.empty(value.shape, dtype=wide_type(value.dtype), device=device, pin_memory=on_host).copy_(value)
        return nn.Parameter(wrapped_like(parameter, copy))

    @torch.no_grad()
    def fill(self) -> None:
        """Copy the replicas' weights, which are equal now, into the global ones."""
        for parameter, copy in self.of.items():
            local_tensor(copy).copy_(self._weights.read(parameter))

    def message(self, parameters: Sequence[torch.Tensor]) -> Message:
        """Make an empty message for the pseudo-gradients of parameters."""
        return Message([self._weights.read(parameter) for parameter in parameters], self._policy.bucket_bytes)

    @torch.no_grad()
    def write(self, parameters: Sequence[torch.Tensor], message: Message) -> None:
        """Fill a message with this replica's pseudo-gradients, global - local.

        Where the replica has half-precision weights only, the global ones are rounded first, as they were at the
        beginning of the block: the rounding error is no progress of the replica.
        """
        for parameter, view in zip(parameters, message.views, strict=True):
            local, copy = self._weights.read(parameter), local_tensor(self.of[parameter])
            view.copy_(copy.to(local.dtype).to(view.device, view.dtype)).sub_(local)

    def send(self, parameters: Sequence[torch.Tensor], message: Message, *, takes_part: bool) -> Flight:
        """Start to average a filled message."""
        if self._policy.quantise is not None:
            return QuantisedMean(message, self._replicas, self._policy.quantise, takes_part=takes_part)
        return AllReduce(message, self._replicas, takes_part=takes_part)

    @torch.no_grad()
    def step(self, parameters: Sequence[torch.Tensor], flight: Flight) -> int:
        """Wait for the averaged pseudo-gradients and take an outer step, or none when no replica took part.

        Returns:
            How many replicas took part.
        """
        count = flight.finish()
        if count:
            means = zip(parameters, flight.views, strict=True)
            self._step({parameter: mean for parameter, mean in means if parameter not in self._weights.resting})
        return count

    def _step(self, pseudo_gradients: dict[torch.Tensor, torch.Tensor]) -> None:
        gradients: dict[torch.Tensor, torch.Tensor] = {}
        for parameter, mean in pseudo_gradients.items():
            copy = self.of[parameter]
            copy.grad = gradients[parameter] = wrapped_like(copy, mean.to(local_tensor(copy).device))
        if self._policy.clip_pseudo_grad is not None:
            self._clip(gradients, self._policy.clip_pseudo_grad)
        self.outer.step()
        for parameter in gradients:
            self.of[parameter].grad = None

    def _clip(self, gradients: dict[torch.Tensor, torch.Tensor], max_norm: float) -> None:
        factor = torch.clamp(max_norm / (self._norm(gradients) + 1e-6), max=1.0)
        multiply_([local_tensor(gradient) for gradient in gradients.values()], factor)

    def _norm(self, gradients: dict[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self.norm(gradients)

    def norm(self, found: dict[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return the norm of tensors laid out like parameters, by these; of all stages of a pipeline."""
        return total_norm_of(found.items(), stages=self._stages)

    def values(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return this rank's parts of the global weights, equal in every replica."""
        return [local_tensor(self.of[parameter]).detach() for parameter in parameters]


def _built(make_outer: OuterFactory, copies: list[nn.Parameter]) -> Optimizer:
    # torch's optimizers refuse an empty list, which a rank without global weights would pass.
    outer = make_outer(copies or [nn.Parameter(torch.zeros(()))])
    if not isinstance(outer, Optimizer):
        raise ConfigError(
            "The outer optimizer is no optimizer",
            expected="a function that builds a torch.optim.Optimizer from a list of parameters",
            got=type(outer).__name__,
            fix="pass, for example, lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)",
        )
    if not copies:
        outer.param_groups[0]["params"].clear()
    step_by_layouts(outer)
    return outer


# --- Global weights and outer state divided among the replicas: each parameter has one owner


class SplitCopy(GlobalCopy):
    """A :class:`GlobalCopy` divided among the replicas: a rank stores what it owns, about 1/N with N replicas.

    Replicas send weights to the owners (they have no global ones to subtract them from); owners average, step and send
    the new weights to all. That takes the bytes of an all-reduce. Parameters are assigned whole, the largest first, so
    that any outer optimizer works and checkpoints have true shapes; one very large parameter fills its owner most.
    """

    def __init__(
        self,
        weights: InnerWeights,
        replicas: Replicas,
        make_outer: OuterFactory,
        policy: OuterPolicy,
        stages: Stages | None = None,
    ) -> None:
        # By the sizes of whole tensors: the ranks of a replica must agree on a tensor that they share.
        owners = balanced_owners([parameter.numel() for parameter in weights.parameters], replicas.size)
        self._owner = dict(zip(weights.parameters, owners, strict=True))
        super().__init__(weights, replicas, make_outer, policy, stages)

    def owned(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the parameters that this rank owns."""
        return [parameter for parameter in parameters if self._owner[parameter] == self._replicas.rank]

    def ordered(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return parameters in the order of their owners: each owner's are one piece of every bucket."""
        return sorted(parameters, key=lambda parameter: self._owner[parameter])

    @torch.no_grad()
    def write(self, parameters: Sequence[torch.Tensor], message: Message) -> None:
        """Fill a message with the weights themselves."""
        for parameter, view in zip(parameters, message.views, strict=True):
            view.copy_(self._weights.read(parameter))

    def send(self, parameters: Sequence[torch.Tensor], message: Message, *, takes_part: bool) -> Flight:
        """Start to send weights to their owners."""
        return _ToOwners(message, self._owners_of(parameters), self._replicas, takes_part=takes_part)

    def _owners_of(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        return [self._owner[parameter] for parameter in parameters]

    def _step(self, pseudo_gradients: dict[torch.Tensor, torch.Tensor]) -> None:
        # Averaged weights have arrived, for owned parameters: pseudo-gradients are formed here.
        owned = {}
        for parameter in self.owned(list(pseudo_gradients)):
            mean, copy = pseudo_gradients[parameter], local_tensor(self.of[parameter])
            begun = copy.to(self._weights.read(parameter).dtype).to(mean.device, mean.dtype)
            owned[parameter] = begun - mean
        super()._step(owned)

    def _norm(self, gradients: dict[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        square = super()._norm(gradients).square().to(self._replicas.device)
        work = self._replicas.all_reduce(square)
        if work is not None:
            work.wait()
        return square.sqrt()

    @torch.no_grad()
    def values(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return this rank's parts of the global weights, which owners send to all; collective."""
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
    """A message to the owners of its tensors, who form the means; ``views`` of others keep what was sent."""

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
        """Form the means of the tensors that this rank owns."""
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
    """Return the number of a bucket's elements that each replica owns."""
    sizes = [0] * num_replicas
    for member, size in zip(bucket.members, bucket.sizes, strict=True):
        sizes[owners[member]] += size
    return sizes
