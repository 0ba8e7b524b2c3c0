"""One step of one group of parameters, bucket by bucket."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from meshwright.optim.adam.buckets import Bucket, Piece
from meshwright.optim.adam.delta import DeltaMoments
from meshwright.optim.adam.links import Link, Ticket
from meshwright.optim.adam.rule import AdamRule
from meshwright.optim.adam.states import AdamStates, Shards
from meshwright.optim.clip import local_tensor


@dataclass(frozen=True)
class Flight:
    """A bucket whose gradients are on their way."""

    pieces: Bucket
    exp_avgs: list[torch.Tensor]
    ticket: Ticket


@dataclass(frozen=True)
class BucketUpdate:
    """The update of parameters of one group, type and device."""

    parameters: list[torch.Tensor]
    buckets: list[Bucket]
    rule: AdamRule
    link: Link
    states: AdamStates
    delta: DeltaMoments | None
    _begun: dict[int, tuple[Shards, int]] = field(default_factory=dict)
    """By identity of the parameter: its tensors, and the number of this step."""

    def advance_all(self) -> None:
        """Begins the step of every parameter; of those with empty shards too, whose step count is everybody's."""
        for parameter in self.parameters:
            self.advance(parameter)

    def advance(self, parameter: torch.Tensor) -> None:
        """Makes a parameter's states if need be and counts the step."""
        shards = self.states.ready(parameter)
        step = int(shards.step) + 1
        shards.step.fill_(step)
        self._begun[id(parameter)] = shards, step

    def run(self, scale: float) -> None:
        """Updates all buckets: the gradients of the next one travel while one is computed."""
        before: Flight | None = None
        for bucket in self.buckets:
            flight = self.start(bucket)
            if before is not None:
                self.finish(before, scale)
            before = flight
        if before is not None:
            self.finish(before, scale)
        self.link.join()

    def start(self, bucket: Bucket) -> Flight:
        """Sends the gradients of a bucket on their way."""
        exp_avgs = [piece.of(self._begun[id(piece.parameter)][0].exp_avg) for piece in bucket]
        return Flight(bucket, exp_avgs, self.link.fetch([_gradient(piece) for piece in bucket], exp_avgs))

    def finish(self, flight: Flight, scale: float) -> None:
        """Waits for the gradients of a bucket, computes its update, and sends the weights back."""
        pieces, exp_avgs = flight.pieces, flight.exp_avgs
        shards = [self._begun[id(piece.parameter)][0] for piece in pieces]
        gradients = self.link.receive(flight.ticket, exp_avgs)
        exp_avg_sqs = [piece.of(shard.exp_avg_sq) for piece, shard in zip(pieces, shards, strict=True)]
        computed, weights, masters = [], [], []
        for piece, shard in zip(pieces, shards, strict=True):
            if shard.master is None:
                computed.append(piece.of(shard.weight))
            else:
                weights.append(piece.of(shard.weight))
                masters.append(piece.of(shard.master))
                computed.append(masters[-1])
        self._compute(pieces, (computed, gradients, exp_avgs, exp_avg_sqs), scale)
        self.link.send(flight.ticket, weights, masters)

    def _compute(self, pieces: Bucket, tensors: tuple[list[torch.Tensor], ...], scale: float) -> None:
        for step, places in self._by_step(pieces).items():
            chosen, gradients, exp_avgs, exp_avg_sqs = (
                column if len(places) == len(pieces) else [column[place] for place in places] for column in tensors
            )
            before = [weight.clone() for weight in chosen] if self.delta is not None else []
            self.rule.update(chosen, gradients, exp_avgs, exp_avg_sqs, step, scale)
            if self.delta is not None:
                for place, old, mean, square in zip(places, before, exp_avgs, exp_avg_sqs, strict=True):
                    self.delta.add(pieces[place].parameter, self.rule.delta(old, mean, square, step))

    def _by_step(self, pieces: Bucket) -> dict[int, list[int]]:
        """Places in the bucket by step count: parameters that were frozen for a while are behind the others."""
        places: dict[int, list[int]] = {}
        for place, piece in enumerate(pieces):
            places.setdefault(self._begun[id(piece.parameter)][1], []).append(place)
        return places


def _gradient(piece: Piece) -> torch.Tensor:
    assert piece.parameter.grad is not None
    gradient = local_tensor(piece.parameter.grad)
    # A range can only be cut out of contiguous memory.
    return gradient if piece.whole else piece.of(gradient.contiguous())
