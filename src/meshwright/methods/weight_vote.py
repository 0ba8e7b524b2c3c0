"""Compare the bits of replicated weights every few steps and repair the minority (`weight_vote`).

Every part of a weight has a key, equal on the ranks that must have the same bits. A :class:`Ballot` groups the ranks by
keys, once; every vote then gathers one sum of bits per weight and looks for groups that disagree. What one rank alone
has is compared with itself: :class:`Rest` sums its bits up after an update and again before the next one.
"""

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
from meshwright.runtime import (
    Difference,
    agreed,
    bit_sum,
    bit_sums,
    largest,
    outvoted,
    print_rank,
    rank,
    read_together,
    world_size,
)
from meshwright.runtime.agreement import gather_distinct
from meshwright.store.entries import stored_name, unwrapped
from meshwright.store.optimizer_state import masters_by_name

_NO_KEY = 0  # pads the keys of ranks with fewer weights than others


@dataclass(frozen=True)
class Outcome:
    """A part of a weight that is unequal on the ranks that have it."""

    key: int
    odd: tuple[int, ...]
    """Ranks outside of the majority; all ranks of the part where there is none."""
    majority: tuple[int, ...]


def key_of(name: str, weight: torch.Tensor, place: Iterable[object] = ()) -> int:
    """Return a number that two ranks share if, and only if, they must have the same bits of a weight.

    Args:
        name: Name of the weight.
        weight: The weight; a DTensor's mesh shows which part of it a rank has, anything else is whole.
        place: Whatever else distinguishes ranks, such as the index of a replica.
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
    """The weights of all ranks, grouped by the keys of those that must be equal. Its construction is collective.

    Args:
        keys: Keys of this rank's weights.
        device: Device whose links carry keys and votes.
    """

    def __init__(self, keys: list[int], device: torch.device) -> None:
        (self._most,) = largest([len(keys)])
        self._device = device
        every = self.gather(keys)
        flat = every.reshape(-1)
        self._order = np.argsort(flat, kind="stable")
        self._keys = flat[self._order]
        self._first = np.searchsorted(self._keys, self._keys)  # where the run of equal keys begins
        _, counts = np.unique(flat[flat != _NO_KEY], return_counts=True)
        self.num_compared = int((counts > 1).sum())
        """Number of parts of weights that several ranks have."""

    def vote(self, tensors: Iterable[torch.Tensor]) -> list[Outcome]:
        """Compare the bits of all ranks; collective: one all-gather of 8 bytes for every weight.

        Args:
            tensors: This rank's parts, in the order of the keys.

        Returns:
            The unequal parts, the same on every rank.
        """
        if not self.num_compared:
            return []
        sums = self.gather(bit_sums(tensors).tolist()).reshape(-1)[self._order]
        odd = (sums != sums[self._first]) & (self._keys != _NO_KEY)
        found = []
        for key in np.unique(self._keys[odd]).tolist():
            of_key = np.flatnonzero(self._keys == key)
            ranks = (self._order[of_key] // self._most).tolist()
            found.append(Outcome(key, *outvoted(dict(zip(ranks, sums[of_key].tolist(), strict=True)))))
        return found

    def gather(self, numbers: list[int]) -> np.ndarray:
        """Gather an integer for each part of every rank: (world, the most parts of a rank)."""
        return gather(numbers, self._most, self._device) if world_size() > 1 else np.array([numbers])


def gather(numbers: list[int], length: int, device: torch.device) -> np.ndarray:
    """Gather the integers of every rank, padded to one length: (world, length)."""
    own = torch.full((length,), _NO_KEY, dtype=torch.int64)
    own[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
    every = torch.empty(world_size(), length, dtype=torch.int64, device=device)
    dist.all_gather(list(every), own.to(device))
    return every.cpu().numpy()


def names_of(outcomes: Iterable[Outcome], names: Mapping[int, str]) -> dict[int, str]:
    """Return the names of unequal weights by key, also of those that this rank does not have; collective.

    Args:
        outcomes: The unequal parts, the same on every rank.
        names: Names of this rank's weights, by key.
    """
    found: dict[int, str] = {}
    own = {each.key: names[each.key] for each in outcomes if each.key in names}
    for _, theirs in gather_distinct(own, repr(own)):
        found |= theirs
    return found


class VotedWeights:
    """The weights that ranks vote on, each with its optimizer states and its average.

    They are the tensors that the optimizer updates: the fp32 master in place of a half-precision parameter, which every
    step overwrites.

    Args:
        model: The model, after all methods.
        optimizer: Its optimizer, with all wrappers.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._inner = InnerWeights(optimizer.inner if isinstance(optimizer, OuterOptimizer) else optimizer)
        named = {stored_name(name): parameter for name, parameter in unwrapped(model).named_parameters()}
        self._updated: dict[str, torch.Tensor] = named | masters_by_name(optimizer, named)
        self._parameters = named

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the model's parameters by name; their layout shows which part a rank has."""
        return self._parameters

    def tensors(self) -> list[torch.Tensor]:
        """Return this rank's parts, in the order of the parameters."""
        return [self._inner.source(tensor) for tensor in self._updated.values()]

    def copied(self, name: str) -> dict[str, Any]:
        """Return host copies of a weight of this rank, its states and its average."""
        return {key: tensor.cpu() for key, tensor in self._around(name).items()}

    @torch.no_grad()
    def take(self, name: str, copied: dict[str, Any]) -> None:
        """Overwrite a weight, its states and its average by another rank's; call :meth:`finish` after the last.

        States that only one of the two ranks has, because it owns them, stay as they are.
        """
        for key, tensor in self._around(name).items():
            given = copied.get(key)
            if given is not None and given.shape == tensor.shape and given.dtype == tensor.dtype:
                tensor.copy_(given)

    def finish(self) -> None:
        """Round masters into the model, and free what was gathered from the old weights."""
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


class Rest:
    """Find weights whose bits change between two updates while nobody writes to them.

    Only the device computes: what it finds is read at votes. Whoever writes to a tensor, such as a checkpoint that is
    loaded, raises torch's count of its versions, and then there is nothing to compare until the next update. Writes
    through ``.data`` are not counted, and are found as a flip is.

    Args:
        weights: What is updated.
    """

    def __init__(self, weights: VotedWeights) -> None:
        self._weights = weights
        self._states: list[tuple[int, int]] = []
        self._sums: list[torch.Tensor] = []
        self._changed_at: list[torch.Tensor] = []

    def begin(self) -> None:
        """Sum up the bits, behind an update."""
        tensors = self._weights.tensors()
        self._states = [(each.data_ptr(), each._version) for each in tensors]
        self._sums = [bit_sum(each) for each in tensors]
        if len(self._changed_at) != len(tensors):
            self._changed_at = [torch.zeros_like(each) for each in self._sums]

    def end(self, step: int) -> None:
        """Compare the bits, before the update of a step."""
        if not self._sums:
            return
        for place, tensor in enumerate(self._weights.tensors()):
            if (tensor.data_ptr(), tensor._version) != self._states[place]:
                continue
            first, changed = self._changed_at[place], bit_sum(tensor) != self._sums[place]
            first.add_(((first == 0) & changed) * step)  # no number of the host becomes a tensor of the device

    def found(self) -> list[int]:
        """Return the step before whose update each weight had first changed, 0 where none did, and begin anew."""
        found: list[int] = read_together(self._changed_at).tolist()
        for each in self._changed_at:
            each.zero_()
        return found


VoteAction = Literal["warn", "stop", "heal"]


@dataclass(frozen=True)
class VotePolicy:
    """The interval of votes, and the action when one is not unanimous."""

    every: int = 100
    action: VoteAction = "stop"
    at_rest: bool = False


class Voter:
    """Holds a vote every few steps of the optimizer, and acts on it.

    Its construction and every vote are collective: all ranks step equally often. Replicas of an outer optimizer are
    compared when they have just synchronised to equal weights; where they never are equal, only the ranks inside each
    replica are compared.

    Args:
        model: The model, after all methods.
        optimizer: Its optimizer, with all wrappers.
        policy: How often, and what follows.
        device: Device whose links carry the votes.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, policy: VotePolicy, device: torch.device) -> None:
        self.policy = policy
        self._outer = optimizer if isinstance(optimizer, OuterOptimizer) else None
        self._weights = VotedWeights(model, optimizer)
        self._rest = Rest(self._weights) if policy.at_rest else None
        parameters = self._weights.parameters()
        self._names = {key_of(name, parameter): name for name, parameter in parameters.items()}
        self._ballot = Ballot(list(self._names), device)
        if self._outer is not None:
            own = {key_of(n, p, [self._outer.replicas.rank]): n for n, p in parameters.items()}
            self._names_inside, self._ballot_inside = own, Ballot(list(own), device)
        self.num_steps = 0
        """Number of steps of the optimizer."""
        self.num_votes = 0
        """Number of votes so far."""
        self.equal_at: int | None = None
        """Value of ``num_steps`` when all were last found equal."""

    @property
    def num_compared(self) -> int:
        """Number of parts of weights that several ranks have."""
        return self._ballot.num_compared

    def count_step(self) -> None:
        """Count a step, and vote when it is due.

        Raises:
            ReplicaError: On every rank; see :meth:`hold`.
        """
        self.num_steps += 1
        if self._rest is not None:
            self._rest.begin()
        if self._outer is None:
            due = self.num_steps % self.policy.every == 0
        else:
            waits = self._syncs_to_equal and not self._outer.synchronizer.replicas_are_equal
            due = self.num_steps >= self.policy.every * (self.num_votes + 1) and not waits
        if due:
            self.hold()

    def before_step(self) -> None:
        """Compare weights at rest with what they were after the step before."""
        if self._rest is not None:
            self._rest.end(self.num_steps + 1)

    @property
    def _syncs_to_equal(self) -> bool:
        """Return whether all replicas are made equal at times."""
        assert self._outer is not None
        policy = self._outer.policy
        return policy.fragments == 1 and policy.delay == 0 and policy.merge_alpha == 0

    def hold(self) -> list[Difference]:
        """Vote now; collective.

        Returns:
            The unequal weights, the same on every rank; the policy ``heal`` has repaired them.

        Raises:
            ReplicaError: On every rank, with ``stop``, and where ``heal`` finds no majority.
        """
        if self._rest is not None:
            self._hold_rest(self._rest.found())
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

    def _hold_rest(self, changed_at: list[int]) -> None:
        """Tell every rank which weights have changed at rest; collective."""
        every = self._ballot.gather(changed_at)
        if not every.any():
            return
        own = list(self._names.values())
        named = [name for name, step in zip(own, changed_at, strict=False) if step]
        told = gather_distinct(", ".join(named[:4]), f"{rank()} {named}")
        names = {at: text for ranks, text in told for at in ranks}
        found = [(int(of_rank[of_rank > 0].min()), at) for at, of_rank in enumerate(every) if of_rank.any()]
        text = "; ".join(f"{names[at]} on rank {at} before the update of step {step}" for step, at in sorted(found)[:4])
        if self.policy.action != "warn":
            raise agreed(
                ReplicaError(
                    "Weights have changed between two steps, and nobody has written to them",
                    expected="after a step the bits that the next one finds",
                    got=text,
                    fix="test the memory and the device of those ranks, and resume from a checkpoint before that step",
                )
            )
        print_rank(f"meshwright: weights have changed at rest: {text}", file=sys.stderr, flush=True)

    def _act(self, found: list[Difference], outcomes: list[Outcome], names: dict[int, str]) -> None:
        divided = [each for each in found if not each.majority]
        if self.policy.action == "stop" or (self.policy.action == "heal" and divided):
            raise agreed(self._error(found, divided))
        text = "; ".join(map(str, found[:4])) + (f"; … ({len(found)} in all)" if len(found) > 4 else "")
        if self.policy.action == "heal":
            self._heal(outcomes, names)
            text += "; the majority's are taken over"
        where = f"after step {self.num_steps} weights differ between ranks that are to hold the same"
        print_rank(f"meshwright: {where}: {text}", file=sys.stderr, flush=True)

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
        """Send the weight, its states and its average from the first rank of the majority to each outvoted rank."""
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


_SUM_BYTES = 8  # of the sum of bits that a rank sends for each weight


class WeightVote(Method):
    """Finds silent corruption, such as a flipped bit in one replica's weights or states.

    Of the ranks that have one weight, or one shard of it, the majority is taken to be right, and the other ranks are
    named with the parameter. ``stop`` raises a :class:`~meshwright.errors.ReplicaError` on every rank, ``warn`` prints
    a warning, ``heal`` copies the weight, its optimizer states and its average from one of the majority. If two ranks
    differ, both are named, and neither can be healed. A part that only one rank has, such as a shard of ``fsdp`` over
    all ranks, cannot be compared with others; a notice says so where there are no other parts. ``at_rest`` compares
    every part with itself from one update to the next: what changes while nobody writes is told at the next vote, with
    the step.

    Config: None, the number of steps, the action, or keys.
    """

    method_name: ClassVar[str] = "weight_vote"
    short_forms: ClassVar[Mapping[type, str]] = {int: "every", str: "action"}
    phase: ClassVar[Phase] = Phase.WATCH
    summary: ClassVar[str] = "ranks that hold the same weights compare their bits, and name who differs"
    effect: ClassVar[str] = (
        "time: weights are read once in every so many steps. Communication: 8 bytes for each weight of every rank then"
    )

    every: PositiveInt = VotePolicy.every
    """Number of optimizer steps from one vote to the next; under ``outer``, at least as many."""
    action: VoteAction = VotePolicy.action
    at_rest: bool = VotePolicy.at_rest
    """Also compare the bits of every weight after an update with those before the next one; ``heal`` stops then."""

    def check(self, job: Job) -> None:
        """Refuse a job without an optimizer."""
        job.require_optimizer(self.method_name, "whose steps it could count")

    def apply(self, job: Job) -> None:
        """Count the optimizer's steps, when it is built."""

        def voting(optimizer: Optimizer) -> Optimizer:
            job.voter = voter = Voter(
                job.model, optimizer, VotePolicy(self.every, self.action, self.at_rest), job.device
            )
            if not voter.num_compared and not self.at_rest:
                job.notices.append("weight_vote has nothing to compare: every part of the weights is on one rank alone")
                return optimizer
            # Inside the guards: others may wrap the optimizer in new ones, and skipped steps change no weights.
            stepped = optimizer.inner if isinstance(optimizer, GuardedOptimizer) else optimizer
            call_around(stepped, before=[voter.before_step] * self.at_rest, after=[voter.count_step])
            return optimizer

        job.optimizer.wrappers.append(voting)

    def cost(self, step: Step) -> Step:
        """Add one all-gather of a number for each weight, and one for what has changed at rest."""
        world = math.prod(size for _, size in step.axes)
        axis = next((name for name, size in step.axes if size > 1), None)
        if axis is None:
            return step
        count = sum(count for count, _ in step.every_parameter())
        num_bytes = _SUM_BYTES * world * count * (2 if self.at_rest else 1)
        return step.send(Traffic("all_gather", axis, num_bytes, "update", every=self.every, hidden=False))
