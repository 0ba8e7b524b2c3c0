"""Compare the bits of replicated weights every few steps and repair the minority (`weight_vote`)."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.distributed as dist
from pydantic import PositiveInt
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshwright.cost import Step, Traffic
from meshwright.errors import ReplicaError
from meshwright.methods.base import Method, Phase
from meshwright.methods.job import Job
from meshwright.optim import GuardedOptimizer, OuterOptimizer, average_of, inner_optimizer, local_tensor
from meshwright.optim.guarded_step import call_around
from meshwright.optim.weight_average import InnerWeights
from meshwright.runtime import Difference, agreed, bit_sums, gather_objects, outvoted, print_rank, rank, world_size
from meshwright.store.entries import stored_name, unwrapped
from meshwright.store.optimizer_state import masters_by_name

_NOBODY = 0  # where a rank holds fewer weights than others


@dataclass(frozen=True)
class Outcome:
    """One part of a weight that ranks hold unequally."""

    key: int
    odd: tuple[int, ...]
    """Ranks outside of the majority; all that hold it where there is none."""
    majority: tuple[int, ...]


def key_of(name: str, weight: torch.Tensor, place: Iterable[object] = ()) -> int:
    """A number that two ranks share if, and only if, they are to hold the same bits.

    Args:
        name: Of the weight.
        weight: A DTensor tells by its mesh which part a rank holds; anything else is whole.
        place: What else tells ranks apart, such as the replica.
    """
    parts = list(place)
    if isinstance(weight, DTensor):
        mesh, coordinate = weight.device_mesh, weight.device_mesh.get_coordinate()
        assert coordinate is not None, "a rank outside of the mesh has no such parameter"
        names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
        split = zip(names, weight.placements, coordinate, strict=True)
        parts += [(axis, at) for axis, placement, at in split if not placement.is_replicate()]
    digest = hashlib.sha256(repr((name, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True) or 1


class Ballot:
    """The weights of all ranks, of which those of one key ought to be equal.

    Args:
        keys: Of this rank's weights. Making a ballot is collective.
        device: Whose links carry it, and the votes.
    """

    def __init__(self, keys: list[int], device: torch.device) -> None:
        self._most = max(gather_objects(len(keys)))
        self._own, self._device = keys, device
        every = gather(keys, self._most, device) if world_size() > 1 else np.array([keys])
        flat = every.reshape(-1)
        self._order = np.argsort(flat, kind="stable")
        in_order = flat[self._order]
        self._keys = in_order
        self._first = np.searchsorted(in_order, in_order)  # where the run of each one's key begins
        _, counts = np.unique(flat[flat != _NOBODY], return_counts=True)
        self.num_compared = int((counts > 1).sum())
        """Parts of weights that several ranks hold."""

    def vote(self, tensors: Iterable[torch.Tensor]) -> list[Outcome]:
        """Compare what the ranks hold; collective: one all-gather of 8 bytes for every weight.

        Args:
            tensors: This rank's parts, in the order of the keys.

        Returns:
            What is unequal, the same on every rank.
        """
        if not self.num_compared:
            return []
        sums = gather(bit_sums(tensors).tolist(), self._most, self._device).reshape(-1)[self._order]
        odd = (sums != sums[self._first]) & (self._keys != _NOBODY)
        found = []
        for key in np.unique(self._keys[odd]).tolist():
            of_key = np.flatnonzero(self._keys == key)
            ranks = (self._order[of_key] // self._most).tolist()
            found.append(Outcome(key, *outvoted(dict(zip(ranks, sums[of_key].tolist(), strict=True)))))
        return found


def gather(numbers: list[int], length: int, device: torch.device) -> np.ndarray:
    """Integers of every rank, filled up to one length: (world, length)."""
    own = torch.full((length,), _NOBODY, dtype=torch.int64)
    own[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
    every = torch.empty(world_size(), length, dtype=torch.int64, device=device)
    dist.all_gather(list(every), own.to(device))
    return every.cpu().numpy()


def names_of(outcomes: Iterable[Outcome], names: Mapping[int, str]) -> dict[int, str]:
    """Return the names of what is unequal, also of weights that this rank has not; collective.

    Args:
        outcomes: Equal on every rank.
        names: This rank's, by key.
    """
    found: dict[int, str] = {}
    for own in gather_objects({each.key: names[each.key] for each in outcomes if each.key in names}):
        found |= own
    return found


# --- The weights that replicas vote on, and everything that hangs on one of them.


class VotedWeights:
    """What the optimizer updates, or else the parameter, by name.

    A parameter in half precision beside fp32 masters is left out for its master, which every step writes over it.

    Args:
        model: As all methods have left it.
        optimizer: Its optimizer, with everything around it.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._inner = InnerWeights(optimizer.inner if isinstance(optimizer, OuterOptimizer) else optimizer)
        named = {stored_name(name): parameter for name, parameter in unwrapped(model).named_parameters()}
        self._updated: dict[str, torch.Tensor] = named | masters_by_name(optimizer, named)
        self._parameters = named

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the model's, which tell by their layout which part a rank holds."""
        return self._parameters

    def tensors(self) -> list[torch.Tensor]:
        """This rank's parts, where they are kept, in the order of the parameters."""
        return [self._inner.source(tensor) for tensor in self._updated.values()]

    def copied(self, name: str) -> dict[str, Any]:
        """A weight of this rank and everything that hangs on it, on the host."""
        return {key: tensor.cpu() for key, tensor in self._around(name).items()}

    @torch.no_grad()
    def take(self, name: str, copied: dict[str, Any]) -> None:
        """Replace them by those of another rank; call :meth:`finish` after the last.

        A state that only one of the two ranks has, because it belongs to an owner, stays as it is.
        """
        for key, tensor in self._around(name).items():
            given = copied.get(key)
            if given is not None and given.shape == tensor.shape and given.dtype == tensor.dtype:
                tensor.copy_(given)

    def finish(self) -> None:
        """Round masters into the model, and forget what was gathered from the weights before."""
        self._inner.finish()
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _around(self, name: str) -> dict[str, torch.Tensor]:
        updated, average = self._updated[name], average_of(self._optimizer)
        found = {"parameter": local_tensor(self._parameters[name]).detach(), "weight": self._inner.source(updated)}
        for key, value in inner_optimizer(self._optimizer).state.get(updated, {}).items():
            if isinstance(value, torch.Tensor):
                found[f"state.{key}"] = local_tensor(value)
        if average is not None and updated in average.of:
            found["average"] = local_tensor(average.of[updated])
        return found


# --- A vote every so many steps, and what follows from it.

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
        """Count a step, and vote where it is time.

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
        """Return whether there are moments at which all replicas hold the same."""
        assert self._outer is not None
        policy = self._outer.policy
        return policy.fragments == 1 and policy.delay == 0 and policy.merge_alpha == 0

    def hold(self) -> list[Difference]:
        """Vote now; collective.

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


# --- ``weight_vote``: ranks that hold the same weights compare their bits every so many steps.

_NUMBER_BYTES = 8


class WeightVote(Method):
    """Finds silent corruption: a flipped bit in one replica's weights or states, which no error tells of.

    Most held by the ranks of one weight, or of one shard of it, is right, and the ranks that hold something else are
    named with the parameter. ``stop`` raises a :class:`~meshwright.errors.ReplicaError` on every rank, ``warn`` says
    so, ``heal`` gives the outvoted ranks the weight, its optimizer states and its average from one of the majority.
    Two ranks that differ are named both, and cannot heal. What one rank alone holds, such as a shard of ``fsdp`` over
    all ranks, has nothing to be compared with; where that is all there is, the user is told.

    Config: None, the number of steps, the action, or keys.
    """

    method_name: ClassVar[str] = "weight_vote"
    phase: ClassVar[Phase] = Phase.WATCH
    summary: ClassVar[str] = "ranks that hold the same weights compare their bits, and name who differs"
    effect: ClassVar[str] = (
        "time: weights are read once in every so many steps. Communication: 8 bytes for each weight of every rank then"
    )

    every: PositiveInt = VotePolicy.every
    """Steps of the optimizer from one vote to the next; under ``outer``, at least as many."""
    action: VoteAction = VotePolicy.action

    @classmethod
    def from_short(cls, raw: Any) -> Mapping[str, Any]:
        """Read the number of steps, or the action."""
        if isinstance(raw, int) and not isinstance(raw, bool):
            return {"every": raw}
        return {"action": raw} if isinstance(raw, str) else super().from_short(raw)

    def check(self, job: Job) -> None:
        """Refuse a job in which nothing moves the weights."""
        job.require_optimizer(self.method_name, "whose steps it could count")

    def apply(self, job: Job) -> None:
        """Follow the optimizer's steps."""

        def voting(optimizer: Optimizer) -> Optimizer:
            job.voter = voter = Voter(job.model, optimizer, VotePolicy(self.every, self.action), job.device)
            if not voter.num_compared:
                job.notices.append("weight_vote has nothing to compare: every part of the weights is on one rank alone")
                return optimizer
            # Inside the guards, which others may put anew; a skipped step changes nothing that could be voted on.
            stepped = optimizer.inner if isinstance(optimizer, GuardedOptimizer) else optimizer
            call_around(stepped, after=[voter.count_step])
            return optimizer

        job.optimizer.wrappers.append(voting)

    def cost(self, step: Step) -> Step:
        """One all-gather of a number for each weight."""
        world = math.prod(size for _, size in step.axes)
        axis = next((name for name, size in step.axes if size > 1), None)
        if axis is None:
            return step
        num_bytes = _NUMBER_BYTES * world * sum(count for count, _ in step.every_parameter())
        return step.send(Traffic("all_gather", axis, num_bytes, "update", every=self.every, hidden=False))
