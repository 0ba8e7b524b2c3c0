"""Find the few of a model's blocks that stand for all of them.

[Note: repeated blocks] A model of 80 equal blocks is traced with four: the first, two whose neighbours are like them,
and the last. What the third does, all blocks between it and the last do, too: their tensors, calls, kernels and
collectives are copied, with the paths and places of the copies (``continued_blocks.py``).

Blocks may be of several kinds: three dense ones before those with experts, every sixth with attention to all tokens,
an encoder's and a decoder's. What a block records depends on its kind, on those of its two neighbours, and on which
kinds there are before and behind it; what two neighbours share depends on the four kinds around them. So blocks are
left out as long as each of these still occurs, with the beginning and the end as kinds of their own: 62 blocks of
Gemma 3 become 15, DeepSeek-V3's 61 become 7.

Whether all of this holds is checked once for each model and division of it, by a run in which what occurs more than
once does so twice.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from meshwright.nn import find_blocks
from meshwright.nn.module_structure import SCALARS, settings_of
from meshwright.runtime.torch_internals.modules import CHILDREN, children_of

FEWEST = 8  # blocks from which on this is worth while
_MOST = 2 / 3  # of the blocks

Indices = tuple[int, ...]
"""Some of a model's blocks, by their numbers."""


@dataclass(frozen=True)
class Repeated:
    """The blocks of a model, of which a few stand for all.

    Args:
        blocks: All blocks, in the order in which they run.
        paths: Their paths.
        kinds: Equal numbers for blocks that are equal.
        lists: The lists that hold them, with the module that each belongs to.
        few: Blocks in which every place and every pair occurs, see [Note: repeated blocks].
        more: Blocks in which those that occur more than once do so twice, the few among them.
    """

    blocks: tuple[nn.Module, ...]
    paths: tuple[str, ...]
    kinds: tuple[int, ...]
    lists: tuple[tuple[nn.Module, nn.Module], ...]
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
        if type(value) in (list, tuple) and len(value) == count and all(isinstance(each, SCALARS) for each in value)
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
    if len(few) > _MOST * len(blocks):
        return None
    return Repeated(blocks, tuple(names[block] for block in blocks), kinds, lists, few, more)


def _lists_of(model: nn.Module, blocks: Sequence[nn.Module]) -> tuple[tuple[nn.Module, nn.Module], ...] | None:
    """Return the lists that hold these blocks and nothing else, in order; None where there are no such."""
    wanted, found = {*blocks}, list[tuple[nn.Module, nn.Module]]()
    for owner in model.modules():
        for child in owner.children():
            if isinstance(child, nn.ModuleList | nn.Sequential) and not wanted.isdisjoint(child):
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
        every = [settings_of(block) for block in blocks]
        values = collections.defaultdict(list)
        for index, one in enumerate(every):
            for key, value in one.items():
                values[key].append(type(value) is int and value == index)
        counting = {key for key, each in values.items() if len(each) > 1 and all(each)}
        for one in every:
            kind = which, frozenset((key, value) for key, value in one.items() if key not in counting)
            found.append(numbers.setdefault(kind, len(numbers)))
    return tuple(found)


_END = -1  # the kind of what is before the first block and behind the last


def windows(kinds: Sequence[int], width: int) -> list[tuple[int, ...]]:
    """Return every sequence of so many kinds, both ends among them.

    Those of three have a block in their middle, those of four a pair of neighbours.
    """
    padded = (_END, *kinds, _END)
    return [padded[first : first + width] for first in range(len(padded) - width + 1)]


def in_places(kinds: Sequence[int]) -> list[tuple[object, ...]]:
    """Return for every block what decides what it records.

    Its kind and its neighbours' do. What all blocks of a kind share lies beside those before the first of them, and its
    gradient beside those before the last: so does where a block is beside the first and the last of each kind.
    """
    before, behind = _met(kinds), reversed(_met(kinds[::-1]))
    return list(zip(windows(kinds, 3), before, behind, strict=True))


def _met(kinds: Sequence[int]) -> list[tuple[bool, int]]:
    """Return for every block whether its kind, and how many kinds, have come before it."""
    found, met = [], set[int]()
    for kind in kinds:
        found.append((kind in met, len(met)))
        met.add(kind)
    return found


def _counted(kinds: Sequence[int]) -> collections.Counter[object]:
    return collections.Counter((*windows(kinds, 4), *in_places(kinds), *kinds))


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
