"""One step of one group of parameters, bucket by bucket."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from meshwright.optim.adam_rule import AdamRule
from meshwright.optim.adam_states import AdamStates
from meshwright.optim.buckets import Bucket, Piece
from meshwright.optim.clip import local_tensor
from meshwright.optim.delta import DeltaMoments
from meshwright.optim.links import Link, Ticket


@dataclass(frozen=True)
class Flight:
    """A bucket whose gradients are on their way."""

    pieces: Bucket
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
    _steps: dict[int, int] = field(default_factory=dict)  # per parameter the number of this step, by identity

    def advance_all(self) -> None:
        """Begins the step of every parameter; of those with empty shards too, whose step count is everybody's."""
        for parameter in self.parameters:
            self.advance(parameter)

    def advance(self, parameter: torch.Tensor) -> None:
        """Makes a parameter's states if need be and counts the step."""
        step = self.states.ready(parameter)["step"]
        step += 1
        self._steps[id(parameter)] = int(step)

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
        gradients = [piece.of(_gradient(piece)) for piece in bucket]
        return Flight(bucket, self.link.fetch(gradients, [self._state(piece, "exp_avg") for piece in bucket]))

    def finish(self, flight: Flight, scale: float) -> None:
        """Waits for the gradients of a bucket, computes its update, and sends the weights back."""
        pieces = flight.pieces
        exp_avgs = [self._state(piece, "exp_avg") for piece in pieces]
        gradients = self.link.receive(flight.ticket, exp_avgs)
        exp_avg_sqs = [self._state(piece, "exp_avg_sq") for piece in pieces]
        weights = [piece.of(local_tensor(piece.parameter)) for piece in pieces]
        masters = [self._state(piece, "master") if self._has_master(piece) else None for piece in pieces]
        computed = [weight if master is None else master for weight, master in zip(weights, masters, strict=True)]
        for step, places in self._by_step(pieces).items():
            chosen, given, means, squares = (
                [tensors[place] for place in places] for tensors in (computed, gradients, exp_avgs, exp_avg_sqs)
            )
            before = [weight.clone() for weight in chosen] if self.delta is not None else []
            self.rule.update(chosen, given, means, squares, step, scale)
            for place, old in zip(places, before, strict=False):
                delta = self.rule.delta(old, exp_avgs[place], exp_avg_sqs[place], step)
                assert self.delta is not None
                self.delta.add(pieces[place].parameter, delta)
        rounded = [(weight, master) for weight, master in zip(weights, masters, strict=True) if master is not None]
        self.link.send(flight.ticket, [weight for weight, _ in rounded], [master for _, master in rounded])

    def _by_step(self, pieces: Bucket) -> dict[int, list[int]]:
        """Places in the bucket by step count: parameters that were frozen for a while are behind the others."""
        places: dict[int, list[int]] = {}
        for place, piece in enumerate(pieces):
            places.setdefault(self._steps[id(piece.parameter)], []).append(place)
        return places

    def _state(self, piece: Piece, name: str) -> torch.Tensor:
        return piece.of(local_tensor(self.states.of(piece.parameter)[name]))

    def _has_master(self, piece: Piece) -> bool:
        return "master" in self.states.of(piece.parameter)


def _gradient(piece: Piece) -> torch.Tensor:
    assert piece.parameter.grad is not None
    gradient = local_tensor(piece.parameter.grad)
    # A range can only be cut out of contiguous memory.
    return gradient if piece.whole else gradient.contiguous()
