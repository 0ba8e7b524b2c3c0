"""Extend the recording of a few blocks to what a run of all of them would have recorded.

See [Note: repeated blocks].
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from meshwright.nn import class_name
from meshwright.planner.trace.repeated_blocks import Indices, Repeated, in_places, windows

if TYPE_CHECKING:
    from meshwright.cost import Boundary, Placed, Transient
    from meshwright.planner.trace.live_tensors import Call, SavedTensors
    from meshwright.planner.trace.op_recording import Ops

T = TypeVar("T")
_Copy = Mapping[int, int]  # positions of blocks that ran -> of those that they stand for


class NotRepeatedError(Exception):
    """A recording does not repeat from block to block."""


class Copies:
    """Map blocks that ran to those that they stand for, and places of the run to those of the whole model.

    Args:
        repeated: The blocks.
        ran: Numbers of those that ran.
        wanted: Numbers of those that would have run, the former among them.
        places: Blocks that ran as places, with those of other lists.
        every: Blocks that would have run, as places.
    """

    def __init__(
        self,
        repeated: Repeated,
        ran: Indices,
        wanted: Indices,
        places: Sequence[nn.Module],
        every: Sequence[nn.Module],
    ) -> None:
        self.ran, self.wanted = repeated.chosen(ran), repeated.chosen(wanted)
        self.at_home = {position: wanted.index(index) for position, index in enumerate(ran)}
        kinds = [[repeated.kinds[index] for index in some] for some in (ran, wanted)]
        self.kinds, self.around = kinds[0], in_places(kinds[0])
        # Of every block that would have run, the position of the one that stands for it.
        self.sources = self._sources(in_places(kinds[0]), in_places(kinds[1]))
        self.of_block = self._inverted(self.sources, len(ran))
        counts = collections.Counter(in_places(kinds[1]))
        # Blocks of which there would have been no other such.
        self.alone = {here for here, each in enumerate(self.around) if counts[each] == 1}
        pairs = self._sources(windows(kinds[0], 4), windows(kinds[1], 4), length=2)
        self.of_pair = self._inverted(pairs, len(ran) - 1)
        number = {block: position for position, block in enumerate(self.ran)}
        self._position = {place: number.get(block) for place, block in enumerate(places)}
        self._index = {block: place for place, block in enumerate(every)}
        self._of_others = {-1: -1, len(places): len(every)}
        self._of_others |= {place: self._index[block] for place, block in enumerate(places) if block not in number}

    def _sources(self, ran: Sequence[object], wanted: Sequence[object], length: int = 1) -> list[int]:
        """Return for every block, or pair, where the run had such: in the same blocks, else where it had it last."""
        last = {each: here for here, each in enumerate(ran)}
        home = {there: here for here, there in self.at_home.items()}
        found = []
        for there, each in enumerate(wanted):
            here = home.get(there)
            stays = here is not None and all(home.get(there + more) == here + more for more in range(length))
            found.append(here if stays and here is not None and ran[here] == each else last[each])
        return found

    @staticmethod
    def _inverted(sources: Sequence[int], count: int) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(count)]
        for there, here in enumerate(sources):
            found[here].append(there)
        return found

    @functools.cached_property
    def homes(self) -> _Copy:
        """Return for every block that ran the first that it stands for."""
        return {here: next(iter(self.of_block[here]), self.at_home[here]) for here in range(len(self.ran))}

    def place(self, place: int, copy: _Copy) -> int:
        """Return a place in the whole model."""
        here = self._position.get(place)
        if here is None:
            return self._of_others[place]
        return self._index[self.wanted[copy.get(here, self.homes[here])]]

    def position_of(self, place: int) -> int | None:
        """Return which of the blocks that ran a place is; None for what is none of them."""
        return self._position.get(place)

    def placed(self, amounts: Placed) -> Placed:
        """Return amounts of single places, copied for all blocks."""
        return self._each([(place, size) for (place,), size in amounts], lambda place, size: ((place,), size))

    def transients(self, found: Sequence[Transient]) -> tuple[Transient, ...]:
        """Return the temporary tensors of every place, copied for all blocks."""
        return self._each([(each.place, each) for each in found], lambda place, each: each._replace(place=place))

    def _each(self, found: Sequence[tuple[int, Any]], at: Callable[[int, Any], T]) -> tuple[T, ...]:
        every = {}
        for place, each in found:
            here = self.position_of(place)
            for copy in [{}] if here is None else [{here: there} for there in self.of_block[here]]:
                every[self.place(place, copy)] = each
        return tuple(at(place, every[place]) for place in sorted(every))


def continued(saved: SavedTensors, copies: Copies) -> SavedTensors:
    """Extend what a run of a few blocks saved to a run of all blocks.

    Raises:
        NotRepeatedError: When a tensor is shared by blocks in a way that has no obvious continuation.
    """
    return _Continued(saved, copies).saved


class _Continued:
    def __init__(self, saved: SavedTensors, copies: Copies) -> None:
        self._copies, self._old, self._next_key = copies, saved, -1
        self._twins: dict[tuple[int, int], dict[nn.Module, nn.Module]] = {}
        self._moved: dict[tuple[object, ...], tuple[nn.Module, ...]] = {}
        self._number = {module: here for here, block in enumerate(copies.ran) for module in block.modules()}
        self._turns = _Turns(saved.work, self._number, copies)
        self.saved = dataclasses.replace(
            saved,
            sizes=dict(saved.sizes),
            savers={},
            places={},
            runs=collections.Counter(self._of_modules(saved.runs, lambda count, copy: count)),
            run_at=self._of_modules(saved.run_at, self._at),
            inputs={m: dict(taken) for m, taken in saved.inputs.items() if m not in self._number},
            fates=dict(saved.fates),
            results={},
            work=self._work(saved.work),
        )
        self._takers: dict[int, list[nn.Module]] = {}
        for module in (module for module in saved.inputs if module in self._number):
            for there in copies.of_block[self._number[module]]:
                self.saved.inputs[self._twin(module, there)] = {}
            for storage in saved.inputs[module]:
                self._takers.setdefault(storage, []).append(module)
        for storage in {**saved.savers, **self._takers, **saved.results}:
            self._continue(storage)

    def _of_modules(self, found: Mapping[nn.Module, Any], at: Callable[[Any, _Copy], T]) -> dict[nn.Module, T]:
        """Return what is known of every module, and of the twins of those in blocks."""
        every = {module: at(value, {}) for module, value in found.items() if module not in self._number}
        for module, value in found.items():
            if (here := self._number.get(module)) is not None:
                for there in self._copies.of_block[here]:
                    every[self._twin(module, there)] = at(value, {here: there})
        return every

    def _at(self, places: set[int], copy: _Copy) -> set[int]:
        return {self._copies.place(place, copy) for place in places}

    def _twin(self, module: nn.Module, there: int) -> nn.Module:
        """Return the module of another block that is like this one."""
        here = self._number[module]
        if (here, there) not in self._twins:
            ours, others = self._copies.ran[here].modules(), self._copies.wanted[there].modules()
            self._twins[here, there] = dict(zip(ours, others, strict=True))
        return self._twins[here, there][module]

    def _move(self, stack: tuple[nn.Module, ...], copy: _Copy) -> tuple[nn.Module, ...]:
        key = stack, *copy.items()
        if key not in self._moved:
            homes = self._copies.homes
            self._moved[key] = tuple(
                module
                if (here := self._number.get(module)) is None
                else self._twin(module, copy.get(here, homes[here]))
                for module in stack
            )
        return self._moved[key]

    def _later(self, call: Call, copy: _Copy) -> Call:
        """Return the same call in other blocks."""
        stack, place = self._move(call.stack, copy), self._copies.place(call.place, copy)
        return dataclasses.replace(call, stack=stack, place=place, turns=self._turns.of(call, copy))

    def _block_of(self, stack: tuple[nn.Module, ...]) -> int | None:
        return _first_of(stack, self._number)

    def _work(self, calls: list[Call]) -> list[Call]:
        """Return the calls of every block that would have run, with those between them."""
        owners = [self._block_of(call.stack) for call in calls]
        spans, behind = [], 0
        for here in range(len(self._copies.ran)):
            own = [index for index, owner in enumerate(owners) if owner == here] or [behind, behind - 1]
            if own[0] < behind:
                raise NotRepeatedError("blocks do not run one after the other")
            spans.append((own[0], own[-1] + 1))
            behind = own[-1] + 1
        found = [self._later(call, {}) for call in calls[: spans[0][0]]]
        homes = {there: here for here, there in self._copies.at_home.items()}
        for there, here in enumerate(self._copies.sources):
            found += [self._later(call, {here: there}) for call in calls[slice(*spans[here])]]
            if (home := homes.get(there)) is not None:
                end = spans[home + 1][0] if home + 1 < len(spans) else len(calls)
                found += [self._later(call, {}) for call in calls[spans[home][1] : end]]
        return found

    def _continue(self, storage: int) -> None:
        stacks, takers = self._old.savers.get(storage, []), self._takers.get(storage, [])
        made = self._old.results[storage].calls if storage in self._old.results else []
        owners = {self._block_of(stack) for stack in (*stacks, *(call.stack for call in made))}
        inside = {here for here in owners if here is not None} | {self._number[module] for module in takers}
        copies = self._copies_of(storage, inside)
        if copies is None:
            self._share(storage, stacks, takers)
            return
        if None in owners and len(copies) != 1:
            raise NotRepeatedError(f"what lies outside shares a tensor with blocks {sorted(inside)}")
        for number, copy in enumerate(copies):
            self._put(storage, storage if number == 0 else self._key(storage), stacks, takers, copy)
        if not copies:  # neighbours that are none in the whole model
            self.saved.sizes.pop(storage, None)
            self.saved.fates.pop(storage, None)

    def _copies_of(self, storage: int, inside: set[int]) -> list[_Copy] | None:
        """Return for which blocks a tensor of some blocks stands; None: for one tensor of all blocks of these kinds."""
        of_block, first = self._copies.of_block, min(inside, default=0)
        if storage in self._old.weights or not inside:
            return [{}]
        if len(inside) == 1:
            return [{first: there} for there in of_block[first]]
        if inside == {first, first + 1}:
            return [{first: there, first + 1: there + 1} for there in self._copies.of_pair[first]]
        if inside <= self._copies.alone:
            return [{here: of_block[here][0] for here in inside}]
        if any(self._is_whole(inside, sorts) for sorts in (self._copies.kinds, self._copies.around)):
            return None
        raise NotRepeatedError(f"blocks {sorted(inside)} share a tensor")

    @staticmethod
    def _is_whole(inside: set[int], sorts: Sequence[object]) -> bool:
        """Return whether blocks are all those of some sorts."""
        wanted = {sorts[here] for here in inside}
        return inside == {here for here, sort in enumerate(sorts) if sort in wanted}

    def _key(self, storage: int) -> int:
        key, self._next_key = self._next_key, self._next_key - 1
        if storage in self._old.sizes:
            self.saved.sizes[key] = self._old.sizes[storage]
        return key

    def _put(
        self, old: int, key: int, stacks: list[tuple[nn.Module, ...]], takers: list[nn.Module], copy: _Copy
    ) -> None:
        if stacks:
            self.saved.savers[key] = [self._move(stack, copy) for stack in stacks]
            self.saved.places[key] = self._at(self._old.places[old], copy)
        if old in self._old.fates:
            self.saved.fates[key] = self._old.fates[old]
        if old in self._old.results:
            made = self._old.results[old]
            self.saved.results[key] = dataclasses.replace(
                made,
                calls=[self._later(call, copy) for call in made.calls],
                places=self._at(made.places, copy),
                returned_by=self._at(made.returned_by, copy),
            )
        for module in takers:
            here = self._number[module]
            for there in [copy[here]] if here in copy else self._copies.of_block[here]:
                self.saved.inputs[self._twin(module, there)][key] = self._old.inputs[module][old]

    def _share(self, storage: int, stacks: list[tuple[nn.Module, ...]], takers: list[nn.Module]) -> None:
        """Continue a tensor of all blocks of some kinds: all that these stand for save and take it, too."""
        if stacks:
            self.saved.savers[storage] = self._of_all(stacks, lambda stack: stack, self._move)
            self.saved.places[storage] = self._places_of_all(self._old.places[storage])
        if storage in self._old.results:
            made = self._old.results[storage]
            self.saved.results[storage] = dataclasses.replace(
                made,
                calls=self._of_all(made.calls, lambda call: call.stack, self._later),
                places=self._places_of_all(made.places),
                returned_by=self._places_of_all(made.returned_by),
            )
        for module in takers:
            for there in self._copies.of_block[self._number[module]]:
                self.saved.inputs[self._twin(module, there)][storage] = self._old.inputs[module][storage]

    def _of_all(
        self, found: Sequence[T], stack_of: Callable[[T], tuple[nn.Module, ...]], move: Callable[[T, _Copy], T]
    ) -> list[T]:
        owners = [self._block_of(stack_of(each)) for each in found]
        outside = [move(each, {}) for each, owner in zip(found, owners, strict=True) if owner is None]
        return outside + [
            move(each, {here: there})
            for there, here in enumerate(self._copies.sources)
            for each, owner in zip(found, owners, strict=True)
            if owner == here
        ]

    def _places_of_all(self, places: set[int]) -> set[int]:
        of_block, found = self._copies.of_block, set[int]()
        for place in places:
            here = self._copies.position_of(place)
            for copy in [{}] if here is None else [{here: there} for there in of_block[here]]:
                found.add(self._copies.place(place, copy))
        return found


def _first_of(stack: Sequence[nn.Module], number: Mapping[nn.Module, int]) -> int | None:
    """Return the number of the first module that has one."""
    return next((number[module] for module in stack if module in number), None)


class _Turns:
    """Whose turn it is: the parity of products that have run before, in each module around the blocks.

    Args:
        calls: Calls of the run.
        number: Positions of the blocks that ran, by their modules.
        copies: Which blocks they stand for.
    """

    def __init__(self, calls: Sequence[Call], number: Mapping[nn.Module, int], copies: Copies) -> None:
        self._number, self._copies = number, copies
        own = [collections.Counter[nn.Module]() for _ in copies.ran]
        for call in calls:
            here = _first_of(call.stack, number)
            if call.turns and here is not None:
                own[here].update(module for module in call.stack if module not in number)
        self._before_here = self._sums(own)
        self._before_there = self._sums([own[here] for here in copies.sources])
        self._is_odd = any(count % 2 for each in own for count in each.values())

    @staticmethod
    def _sums(own: Sequence[collections.Counter[nn.Module]]) -> list[collections.Counter[nn.Module]]:
        return list(itertools.accumulate(own, operator.add, initial=collections.Counter[nn.Module]()))

    def of(self, call: Call, copy: _Copy) -> tuple[int, ...]:
        """Return the turns of a product in each module of its stack, where more blocks have run before it."""
        if not self._is_odd or not call.turns:
            return call.turns
        now, then = self._counts(call, copy)
        return tuple(
            turn if module in self._number else (turn + then[module] - now[module]) % 2
            for module, turn in zip(call.stack, call.turns, strict=True)
        )

    def _counts(self, call: Call, copy: _Copy) -> tuple[collections.Counter[nn.Module], collections.Counter[nn.Module]]:
        """Return what blocks have multiplied before a call, in the run and where it would have been."""
        copies = self._copies
        here = _first_of(call.stack, self._number)
        if here is not None:
            return self._before_here[here], self._before_there[copy.get(here, copies.homes[here])]
        here = copies.position_of(call.place)
        if here is not None:  # behind this block
            return self._before_here[here + 1], self._before_there[copies.at_home[here] + 1]
        end = -1 if call.place > 0 else 0
        return self._before_here[end], self._before_there[end]


def continued_ops(ops: Ops, copies: Copies) -> Ops:
    """Extend the recorded ops to all blocks: each has those of the one that stands for it.

    Raises:
        NotRepeatedError: When one of the blocks did not run.
    """
    if any(block not in ops.inside for block in copies.ran):
        raise NotRepeatedError("the model does not run every block of its list")
    sources = dict(zip(copies.wanted, (copies.ran[here] for here in copies.sources), strict=True))
    return ops._replace(
        inside={**ops.inside, **{block: ops.inside[source] for block, source in sources.items()}},
        runs={**ops.runs, **{block: ops.runs[source] for block, source in sources.items()}},
    )


def continued_boundaries(boundaries: Sequence[Boundary], repeated: Repeated, copies: Copies) -> tuple[Boundary, ...]:
    """Extend the recorded collectives to all blocks.

    Collectives with a path are copied by it; others are sent as often by each block of their class.

    Raises:
        NotRepeatedError: When what has no path is not sent equally often by all blocks.
    """
    paths = dict(zip(repeated.blocks, repeated.paths, strict=True))
    names = {class_name(type(block)) for block in copies.ran}
    found = [
        each
        for each in boundaries
        if not any(_is_below(each.path, paths[block]) for block in copies.ran)
        and (each.path or names.isdisjoint(each.inside))
    ]
    for each, count in collections.Counter(each for each in boundaries if not each.path).items():
        ran, wanted = (
            sum(class_name(type(block)) in each.inside for block in blocks) for blocks in (copies.ran, copies.wanted)
        )
        if ran and count % ran:
            raise NotRepeatedError(f"blocks send {each.kind} {count} times in {ran} of them")
        found += [each] * (count // ran * wanted) if ran else []
    for there, here in enumerate(copies.sources):
        own, other = paths[copies.ran[here]], paths[copies.wanted[there]]
        for each in boundaries:
            if _is_below(each.path, own):
                found.append(dataclasses.replace(each, path=other + each.path.removeprefix(own)))
    return tuple(found)


def _is_below(path: str, block: str) -> bool:
    return path == block or path.startswith(block + ".")
