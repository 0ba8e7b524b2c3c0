"""How many bytes a pass over tensors without data holds, operator by operator, as one with data would."""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from meshwright.cost import Instant, Transient, outermost_instants
from meshwright.planner.saved import SavedTensors, storage_of

Pass = Literal["forward", "loss", "backward"]


class _Made(NamedTuple):
    reference: StorageWeakRef
    num_bytes: int
    operator: int  # its number


class _Gradient(NamedTuple):
    num_bytes: int
    made: int  # the operator that did
    complete: int  # the operator before
    place: int


class HeldBytes:
    """Follows the storages that operators make until nothing refers to them.

    Args:
        state: Parameters and buffers: no part of what is counted.
        inputs: Of the micro-batch: they last.
    """

    def __init__(self, state: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor]) -> None:
        self._others: dict[int, StorageWeakRef] = {}  # storages that no operator made
        self._live: dict[int, _Made] = {}
        self._at_the_end: dict[int, _Made] = {}  # of forward
        self._before_backward: dict[int, _Made] = {}
        self._held = 0
        self._moments: list[tuple[int, Pass, int]] = []  # of each operator: place, where in a pass, bytes
        self._gradients: list[_Gradient] = []
        for tensor in state:
            self._is_other(tensor)
            if tensor.requires_grad:
                tensor.register_post_accumulate_grad_hook(self._complete)
        given = {storage_of(tensor) for tensor in inputs}
        self._held += sum(size for _, size in given)
        for tensor in inputs:
            self._is_other(tensor)

    def note(self, result: Any, given: Any, place: int, during: Pass) -> None:
        """An operator has run.

        Args:
            result: What it returned.
            given: Its arguments.
            place: Where in the model; of backward: whose backward it is.
            during: Which part of a pass runs.
        """
        if self._moments and during != self._moments[-1][1]:
            self._at_the_end = self._at_the_end or dict(self._live)
        begins = during == "backward" and self._moments and self._moments[-1][1] != during
        arguments: set[int] | None = None
        for tensor in _tensors(result):
            key, size = storage_of(tensor)
            if key in self._live or key in self._others:
                continue
            if arguments is None:
                arguments = {storage_of(each)[0] for each in _tensors(given)}
            if key in arguments:
                self._is_other(tensor)
            else:
                self._live[key] = _Made(StorageWeakRef(tensor.untyped_storage()), size, len(self._moments))
                self._held += size
        expired = torch.UntypedStorage._expired  # type: ignore[attr-defined]  # as StorageWeakRef.expired, called often
        for key in [key for key, made in self._live.items() if expired(made.reference.cdata)]:
            self._held -= self._live.pop(key).num_bytes
        if begins:
            before = len(self._moments)
            self._before_backward = {key: made for key, made in self._live.items() if made.operator < before}
        self._moments.append((place, during, self._held))

    def _is_other(self, tensor: torch.Tensor) -> None:
        reference = StorageWeakRef(tensor.untyped_storage())
        self._others[reference.cdata] = reference

    def _complete(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        key, size = storage_of(parameter.grad)
        found = self._live.pop(key, None)
        if found is not None:
            self._held -= size
            self._is_other(parameter.grad)
            place = self._moments[-1][0]
            self._gradients.append(_Gradient(size, found.operator, len(self._moments), place))

    def add_kept(self, saved: SavedTensors) -> None:
        """Adds to what is saved what autograd's graph keeps in other ways, and lets go of in backward.

        Such are the inputs of what a model recomputes by itself, which a function of the graph holds.
        """
        for key, made in self._before_backward.items():
            if key not in saved.sizes and key not in self._live:
                saved.add(key, made.num_bytes, self._moments[made.operator][0], made.reference)

    def transients(self, saved: SavedTensors) -> tuple[Transient, ...]:
        """What every place takes for a moment; nothing where backward has not run.

        Args:
            saved: Of the same pass.
        """
        if not any(during == "backward" for _, during, _ in self._moments):
            return ()
        weights, complete = self._gradients_by_operator()
        last = max(place for place, _, _ in self._moments)
        returned, left, remains = self._returned(saved, last), *self._left_over(saved, last)
        first = self._up_to(saved)
        found: defaultdict[int, set[Instant]] = defaultdict(set)
        forward: set[Instant] = set()
        for (place, during, held), coming, done in zip(self._moments, weights, complete, strict=True):
            if during == "forward" and place == last:
                forward.add(Instant(held - coming - first(place) - sum(returned.values()), coming, done))
            elif during == "backward" or place == last:
                others = sum(left.values()) + sum(size for behind, size in remains.items() if behind > place)
                found[place].add(Instant(held - coming - first(place) - others, coming, done))
        totals: defaultdict[int, int] = defaultdict(int)
        for each in self._gradients:
            totals[each.place] += each.num_bytes
        return tuple(
            Transient(
                place,
                outermost_instants(found[place]),
                totals[place],
                outermost_instants(forward) if place == last else (),
                returned.get(place, 0),
                left.get(place, 0),
                remains.get(place, 0),
            )
            for place in sorted(found)
        )

    def _up_to(self, saved: SavedTensors) -> Callable[[int], int]:
        """What a place and those before it have saved."""
        kept = saved.kept_by_place()
        places = sorted(kept)
        sums = [0, *itertools.accumulate(kept[place] for place in places)]
        return lambda place: sums[bisect.bisect_right(places, place)]

    def _returned(self, saved: SavedTensors, last: int) -> dict[int, int]:
        """By the blocks' places: what forward made there and nobody saved, at the end of forward."""
        found: dict[int, int] = {}
        for key, made in self._at_the_end.items():
            place, _, _ = self._moments[made.operator]
            if key not in saved.sizes and -1 < place < last:
                found[place] = found.get(place, 0) + made.num_bytes
        return found

    def _left_over(self, saved: SavedTensors, last: int) -> tuple[dict[int, int], dict[int, int]]:
        """By the blocks' places: what was made there and is held yet, from forward on or from its backward on.

        References that form a circle wait for the garbage collector.
        """
        left: dict[int, int] = {}
        remains: dict[int, int] = {}
        for key, made in self._live.items():
            place, during, _ = self._moments[made.operator]
            if -1 < place < last and not made.reference.expired():
                found = left if during == "forward" and key not in saved.sizes else remains
                found[place] = found.get(place, 0) + made.num_bytes
        return left, remains

    def _gradients_by_operator(self) -> tuple[Sequence[int], Sequence[int]]:
        """After every operator: bytes of gradients that are not complete, and of its place's that are."""
        steps = [0] * (len(self._moments) + 1)
        completed: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for each in self._gradients:
            steps[each.made] += each.num_bytes
            steps[each.complete] -= each.num_bytes
            completed[each.complete].append((each.place, each.num_bytes))
        by_place: defaultdict[int, int] = defaultdict(int)
        done = []
        for index, (place, _, _) in enumerate(self._moments):
            for own, size in completed[index]:
                by_place[own] += size
            done.append(by_place[place])
        return list(itertools.accumulate(steps[:-1])), done


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
