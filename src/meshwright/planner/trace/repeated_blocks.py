"""Run a few of a model's blocks, and extend their recording to all of them.

[Note: repeated blocks] A model of 80 equal blocks is traced with four: the first, two whose neighbours are like them,
and the last. What the third does, all blocks between it and the last do, too: their tensors, calls, kernels and
collectives are copied, with the paths and places of the copies.

Blocks may be of several kinds: three dense ones before those with experts, every sixth with attention to all tokens,
an encoder's and a decoder's. What a block records depends on its kind and on those of its two neighbours, and what two
neighbours share on their kinds and on those of the blocks around them. So blocks are left out as long as every sequence
of four kinds that the model has still occurs, with its beginning and its end as kinds of their own: 62 blocks of
Gemma 3 become 11, DeepSeek-V3's 61 become 7.

Whether all of this holds is checked once for each model and division of it, by a run in which every sequence that
occurs more than once does so twice.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from meshwright.nn import class_name, find_blocks
from meshwright.runtime.torch_internals.modules import CHILDREN, children_of, forward_hooks_of, forward_pre_hooks_of

if TYPE_CHECKING:
    from meshwright.cost import Boundary, Placed, Transient
    from meshwright.planner.trace.live_tensors import Call, SavedTensors
    from meshwright.planner.trace.op_recording import Ops


FEWEST = 8  # blocks from which on this is worth while
_SCALARS = (bool, int, float, str, type(None))

Indices = tuple[int, ...]
"""Some of a model's blocks, by their numbers."""


class NotRepeatedError(Exception):
    """A recording does not repeat from block to block."""


@dataclass(frozen=True)
class Repeated:
    """The blocks of a model, of which a few stand for all.

    Args:
        blocks: All blocks, in the order in which they run.
        paths: Their paths.
        kinds: Equal numbers for blocks that are equal.
        lists: The lists that hold them, with the module that each belongs to.
        few: Blocks in which every sequence of four kinds occurs.
        more: Blocks in which those that occur more than once do so twice, the few among them.
    """

    blocks: tuple[nn.Module, ...]
    paths: tuple[str, ...]
    kinds: tuple[int, ...]
    lists: tuple[tuple[nn.Module, nn.ModuleList], ...]
    few: Indices
    more: Indices

    @property
    def all(self) -> Indices:
        """Return the numbers of all blocks."""
        return tuple(range(len(self.blocks)))

    def chosen(self, indices: Indices) -> tuple[nn.Module, ...]:
        """Return the blocks of these numbers."""
        return tuple(self.blocks[index] for index in indices)

    def divided_alike(self, dims: Mapping[nn.Parameter, int]) -> bool:
        """Return whether the same parameters of all blocks of a kind are divided, along the same dims."""
        found = {
            (kind, *map(dims.get, block.parameters())) for kind, block in zip(self.kinds, self.blocks, strict=True)
        }
        return len(found) == len({*self.kinds})

    @contextlib.contextmanager
    def cut(self, indices: Indices) -> Iterator[None]:
        """Shorten the model's lists for a while.

        Whoever iterates over them meets these blocks alone, under their own names. What a model or its configuration
        lists for each block is shortened, too: models look there what the next block needs.
        """
        kept = {*self.chosen(indices)}
        with contextlib.ExitStack() as stack:
            for owner, holder in self.lists:
                whole = children_of(holder)
                here = [number for number, block in enumerate(whole.values()) if block in kept]
                names = [name for name, block in whole.items() if block in kept]
                stack.callback(setattr, holder, CHILDREN, whole)
                for settings, name, listed in _of_each_block(owner, len(whole)):
                    stack.callback(settings.__setitem__, name, listed)
                    settings[name] = type(listed)(listed[number] for number in here)
                setattr(holder, CHILDREN, _Few(whole, names))
            yield


def _of_each_block(owner: nn.Module, count: int) -> list[tuple[dict[str, Any], str, Any]]:
    """Return what a module and its configuration list for as many blocks."""
    config = getattr(owner, "config", None)
    places = [vars(owner), *([vars(config)] if hasattr(config, "__dict__") else [])]
    return [
        (settings, name, value)
        for settings in places
        for name, value in settings.items()
        if type(value) in (list, tuple) and len(value) == count and all(isinstance(each, _SCALARS) for each in value)
    ]


class _Few(dict[str, Any]):
    """A dict that iterates over some entries and looks up all of them: hooks may be put on any block."""

    def __init__(self, whole: dict[str, Any], names: Sequence[str]) -> None:
        super().__init__({name: whole[name] for name in names})
        self._whole = whole

    def __contains__(self, name: object) -> bool:
        return name in self._whole

    def __missing__(self, name: str) -> Any:
        return self._whole[name]


# --- Which blocks are enough.


def find_repeated(model: nn.Module) -> Repeated | None:
    """Return a model's blocks and the few that stand for them; None where that would save little."""
    found = dict(find_blocks(model))
    blocks, names = tuple(found.values()), {block: path for path, block in found.items()}
    lists = _lists_of(model, blocks)
    weights = [id(parameter) for block in blocks for parameter in {*block.parameters()}]
    if len(blocks) < FEWEST or lists is None or len({*weights}) < len(weights):
        return None
    kinds = _kinds([(*children_of(holder).values(),) for _, holder in lists])
    more = _reduced(kinds, tuple(range(len(blocks))), 2)
    few = _reduced(kinds, more, 1)
    if 2 * len(few) > len(blocks):
        return None
    return Repeated(blocks, tuple(names[block] for block in blocks), kinds, lists, few, more)


def _lists_of(model: nn.Module, blocks: Sequence[nn.Module]) -> tuple[tuple[nn.Module, nn.ModuleList], ...] | None:
    """Return the lists that hold these blocks and nothing else, in order; None where there are no such."""
    wanted, found = {*blocks}, list[tuple[nn.Module, nn.ModuleList]]()
    for owner in model.modules():
        for child in owner.children():
            if isinstance(child, nn.ModuleList) and not wanted.isdisjoint(child):
                found.append((owner, child))
    held = [block for _, holder in found for block in children_of(holder).values()]
    return tuple(found) if held == list(blocks) else None


def _kinds(lists: Sequence[Sequence[nn.Module]]) -> tuple[int, ...]:
    """Give equal numbers to blocks of one list with equal classes, shapes and settings.

    A number that counts the blocks may differ.
    """
    numbers: dict[object, int] = {}
    found = []
    for which, blocks in enumerate(lists):
        every = [_described(block) for block in blocks]
        values = collections.defaultdict(list)
        for index, one in enumerate(every):
            for key, value in one.items():
                values[key].append(type(value) is int and value == index)
        counting = {key for key, each in values.items() if len(each) > 1 and all(each)}
        for one in every:
            kind = which, frozenset((key, value) for key, value in one.items() if key not in counting)
            found.append(numbers.setdefault(kind, len(numbers)))
    return tuple(found)


def _described(block: nn.Module) -> dict[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {}
    for path, module in block.named_modules():
        found[path, ""] = type(module), len(forward_hooks_of(module)), len(forward_pre_hooks_of(module))
        for name, value in vars(module).items():
            if isinstance(value, _SCALARS) or (
                isinstance(value, tuple) and all(isinstance(v, _SCALARS) for v in value)
            ):
                found[path, name] = value
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                found[path, name] = tuple(tensor.shape), tensor.dtype, tensor.requires_grad
    return found


_End = -1  # the kind of what is before the first block and behind the last


def _windows(kinds: Sequence[int], width: int) -> list[tuple[int, ...]]:
    """Return every sequence of so many kinds, both ends among them.

    Those of three have a block in their middle, those of four a pair of neighbours.
    """
    padded = (_End, *kinds, _End)
    return [padded[first : first + width] for first in range(len(padded) - width + 1)]


def _in_places(kinds: Sequence[int]) -> list[tuple[object, ...]]:
    """Return for every block what decides what it records.

    Its kind and its neighbours' do, and whether it is the first of its kind, which saves what all of them share.
    """
    return [(window, kinds.index(window[1]) == here) for here, window in enumerate(_windows(kinds, 3))]


def _counted(kinds: Sequence[int]) -> collections.Counter[object]:
    return collections.Counter((*_windows(kinds, 4), *_in_places(kinds), *kinds))


def _reduced(kinds: Sequence[int], indices: Indices, fewest: int) -> Indices:
    """Leave out blocks as long as every sequence of kinds occurs so often, or as often as it does.

    Every kind occurs once more: what all blocks of a kind share is told from what each has for itself.
    """
    now = [kinds[index] for index in indices]
    needed = {each: min(count, fewest + (not isinstance(each, tuple))) for each, count in _counted(now).items()}
    while (span := _longest_spare(now, needed)) is not None:
        first, end = span
        indices, now = indices[:first] + indices[end:], now[:first] + now[end:]
    return indices


def _longest_spare(kinds: Sequence[int], needed: Mapping[object, int]) -> tuple[int, int] | None:
    """Return from where to where most blocks can be left out; None: no block can.

    The same three kinds are before both ends, so that no sequence of four arises that was not there.
    """
    for length in range(len(kinds) - 4, 0, -1):
        for first in range(3, len(kinds) - length):
            end = first + length
            if kinds[first - 3 : first] == kinds[end - 3 : end]:
                found = _counted([*kinds[:first], *kinds[end:]])
                if all(found[each] >= count for each, count in needed.items()):
                    return first, end
    return None


# --- From a run of a few blocks to what a run of all of them would have recorded.

T = TypeVar("T")
_Copy = Mapping[int, int]  # positions of blocks that ran -> of those that they stand for


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
        self.kinds, self.around = kinds[0], _in_places(kinds[0])
        self.sources = self._sources(_in_places(kinds[0]), _in_places(kinds[1]))
        """For every block that would have run, the position of the one that stands for it."""
        self.of_block = self._inverted(self.sources, len(ran))
        counts = collections.Counter(_in_places(kinds[1]))
        self.alone = {here for here, each in enumerate(self.around) if counts[each] == 1}
        """Blocks of which there would have been no other such."""
        pairs = self._sources(_windows(kinds[0], 4), _windows(kinds[1], 4), length=2)
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
            stays = here is not None and [home.get(there + next_) for next_ in range(length)] == [
                *range(here, here + length)
            ]
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

    @functools.cached_property
    def _twins(self) -> dict[tuple[int, int], dict[nn.Module, nn.Module]]:
        return {}

    def _twin(self, module: nn.Module, there: int) -> nn.Module:
        """Return the module of another block that is like this one."""
        here = self._number[module]
        if (here, there) not in self._twins:
            ours, others = self._copies.ran[here].modules(), self._copies.wanted[there].modules()
            self._twins[here, there] = dict(zip(ours, others, strict=True))
        return self._twins[here, there][module]

    def _move(self, stack: tuple[nn.Module, ...], copy: _Copy) -> tuple[nn.Module, ...]:
        homes = self._copies.homes
        return tuple(
            self._twin(module, copy.get(here, homes[here]))
            if (here := self._number.get(module)) is not None
            else module
            for module in stack
        )

    def _later(self, call: Call, copy: _Copy) -> Call:
        """Return the same call in other blocks."""
        stack, place = self._move(call.stack, copy), self._copies.place(call.place, copy)
        return dataclasses.replace(call, stack=stack, place=place, turns=self._turns.of(call, copy))

    def _block_of(self, stack: tuple[nn.Module, ...]) -> int | None:
        return next((self._number[module] for module in stack if module in self._number), None)

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
            here = next((number[module] for module in call.stack if module in number), None)
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
        here = next((self._number[module] for module in call.stack if module in self._number), None)
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
