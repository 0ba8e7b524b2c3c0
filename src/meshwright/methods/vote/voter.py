"""A vote every so many steps, and what follows from it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from meshwright.errors import ReplicaError
from meshwright.methods.vote.ballot import Ballot, Outcome, key_of, names_of
from meshwright.methods.vote.weights import VotedWeights
from meshwright.optim import OuterOptimizer
from meshwright.runtime import Difference, agreed, print_rank, rank

VoteAction = Literal["warn", "stop", "heal"]


@dataclass(frozen=True)
class VotePolicy:
    """When replicas vote, and what happens to those that are outvoted."""

    every: int = 100
    action: VoteAction = "stop"


class Voter:
    """Compares the weights of ranks that are to hold the same after every so many steps of the optimizer.

    Making one is collective, and so is every vote: all ranks step equally often. Replicas of an outer optimizer are
    compared when they have just synchronised to equal weights; those that never hold equal ones are compared inside.

    Args:
        model: As all methods have left it.
        optimizer: Its optimizer, with everything around it.
        policy: When, and what then.
        device: Whose links carry the votes.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, policy: VotePolicy, device: torch.device) -> None:
        self.policy = policy
        self._outer = optimizer if isinstance(optimizer, OuterOptimizer) else None
        self._weights = VotedWeights(model, optimizer)
        parameters = self._weights.parameters()
        self._names = {key_of(name, parameter): name for name, parameter in parameters.items()}
        self._ballot = Ballot(list(self._names), device)
        if self._outer is not None:
            own = {key_of(n, p, [self._outer.replicas.rank]): n for n, p in parameters.items()}
            self._names_inside, self._ballot_inside = own, Ballot(list(own), device)
        self.num_steps = 0
        """Of the optimizer."""
        self.num_votes = 0
        """Taken so far."""
        self.equal_at: int | None = None
        """The step after which all were last found equal, counted as ``num_steps``."""

    @property
    def num_compared(self) -> int:
        """Parts of weights that several ranks hold."""
        return self._ballot.num_compared

    def count_step(self) -> None:
        """Counts a step, and votes where it is time.

        Raises:
            ReplicaError: On every rank; see :meth:`hold`.
        """
        self.num_steps += 1
        if self._outer is None:
            due = self.num_steps % self.policy.every == 0
        else:
            waits = self._syncs_to_equal and not self._outer.synchronizer.replicas_are_equal
            due = self.num_steps >= self.policy.every * (self.num_votes + 1) and not waits
        if due:
            self.hold()

    @property
    def _syncs_to_equal(self) -> bool:
        """Whether there are moments at which all replicas hold the same."""
        assert self._outer is not None
        policy = self._outer.policy
        return policy.fragments == 1 and policy.delay == 0 and policy.merge_alpha == 0

    def hold(self) -> list[Difference]:
        """Votes now; collective.

        Returns:
            What was unequal, the same on every rank; it is mended where the policy says so.

        Raises:
            ReplicaError: On every rank, with ``stop``, and where ``heal`` finds no majority.
        """
        ballot, names = self._ballot, self._names
        if self._outer is not None and not self._outer.synchronizer.replicas_are_equal:
            ballot, names = self._ballot_inside, self._names_inside
        outcomes = ballot.vote(self._weights.tensors())
        self.num_votes += 1
        if not outcomes:
            self.equal_at = self.num_steps
            return []
        known = names_of(outcomes, names)
        outcomes.sort(key=lambda each: (known[each.key], each.key))
        found = [Difference(known[each.key], each.odd, each.majority) for each in outcomes]
        self._act(found, outcomes, names)
        return found

    def _act(self, found: list[Difference], outcomes: list[Outcome], names: dict[int, str]) -> None:
        divided = [each for each in found if not each.majority]
        if self.policy.action == "stop" or (self.policy.action == "heal" and divided):
            raise agreed(self._error(found, divided))
        said = "; ".join(map(str, found[:4])) + (f"; … ({len(found)} in all)" if len(found) > 4 else "")
        if self.policy.action == "heal":
            self._heal(outcomes, names)
            said += "; the majority's are taken over"
        where = f"after step {self.num_steps} weights differ between ranks that are to hold the same"
        print_rank(f"meshwright: {where}: {said}", file=sys.stderr, flush=True)

    def _error(self, found: list[Difference], divided: list[Difference]) -> ReplicaError:
        first = (divided if self.policy.action == "heal" else found)[0]
        since = "since training began" if self.equal_at is None else f"after step {self.equal_at} they were equal"
        others = f", and {len(found) - 1} other weights" if len(found) > 1 else ""
        return ReplicaError(
            "Weights differ between ranks that are to hold the same",
            expected=f"equal bits; {since} (steps of this process)",
            got=f"{first}{others}",
            fix="test the memory and the device of those ranks, and resume from a checkpoint from before they differed",
        )

    def _heal(self, outcomes: list[Outcome], names: dict[int, str]) -> None:
        """Each outvoted rank gets everything that hangs on the weight from the first of the majority."""
        for each in outcomes:
            source = each.majority[0]
            for odd in each.odd:
                if rank() == source:
                    dist.send_object_list([self._weights.copied(names[each.key])], dst=odd)
                elif rank() == odd:
                    received: list[dict[str, torch.Tensor]] = [{}]
                    dist.recv_object_list(received, src=source)
                    self._weights.take(names[each.key], received[0])
        self._weights.finish()
