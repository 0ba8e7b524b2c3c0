"""From a run of a few equal blocks to what a run of all of them would have recorded."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from torch import nn

from meshwright.cost import Boundary
from meshwright.nn import class_name
from meshwright.planner.profile.recorder import Ops
from meshwright.planner.profile.repeated import RUN, Repeated
from meshwright.planner.saved import SavedTensors


class NotRepeatedError(Exception):
    """What was recorded does not repeat from block to block."""


def continued(saved: SavedTensors, kept: Sequence[nn.Module], every: Sequence[nn.Module]) -> SavedTensors:
    """What a run of all blocks would have saved, from that of four of them.

    Args:
        saved: Of the run.
        kept: The blocks that ran.
        every: Those that would have run: the first three and the last are the same.

    Raises:
        NotRepeatedError: When a tensor is shared by blocks in a way that has no obvious continuation.
    """
    return _Continued(saved, kept, every).saved


class _Continued:
    def __init__(self, saved: SavedTensors, kept: Sequence[nn.Module], every: Sequence[nn.Module]) -> None:
        self._number = {module: number for number, block in enumerate(kept) for module in block.modules()}
        template = [list(block.modules()) for block in kept[1:3]]
        # For a shift: modules of the second block, and of the third, to those of blocks so many further on.
        self._shifted = [
            {
                module: twin
                for offset, modules in enumerate(template)
                for module, twin in zip(modules, every[1 + offset + shift].modules(), strict=True)
            }
            for shift in range(len(every) - len(kept) + 1)
        ]
        self._old, self._next_key = saved, -1
        self.saved = dataclasses.replace(
            saved,
            sizes=dict(saved.sizes),
            savers=dict(saved.savers),
            places=dict(saved.places),
            run_at=dict(saved.run_at),
            inputs={m: {} if m in self._number else dict(taken) for m, taken in saved.inputs.items()},
            log=self._log(saved),
        )
        self._takers: dict[int, list[nn.Module]] = {}
        for module in (module for module in saved.inputs if module in self._number):
            for storage in saved.inputs[module]:
                self._takers.setdefault(storage, []).append(module)
        for storage in {**saved.savers, **self._takers}:
            self._continue(storage)

    def _log(self, saved: SavedTensors) -> list[tuple[nn.Module, ...]]:
        """The third block's saves, and after them those of its copies."""
        own = [index for index, stack in enumerate(saved.log) if self._place(stack) == 2]
        if not own:
            return list(saved.log)
        first, end = own[0], own[-1] + 1
        copies = [self._move(stack, shift) for shift in range(1, len(self._shifted)) for stack in saved.log[first:end]]
        return [*saved.log[:end], *copies, *saved.log[end:]]

    def _place(self, stack: tuple[nn.Module, ...]) -> int | None:
        return next((self._number[module] for module in stack if module in self._number), None)

    def _move(self, stack: tuple[nn.Module, ...], shift: int) -> tuple[nn.Module, ...]:
        return tuple(self._shifted[shift].get(module, module) for module in stack)

    def _continue(self, storage: int) -> None:
        stacks, takers = self._old.savers.get(storage, []), self._takers.get(storage, [])
        places = {self._place(stack) for stack in stacks} | {self._number[module] for module in takers}
        inside = {place for place in places if place is not None}
        if storage in self._old.weights or not inside or inside in ({0}, {1}, {3}, {0, 1}):
            self._put(storage, storage, stacks, takers, 0)
        elif len(inside) == RUN:
            self._share(storage, stacks, takers)
        elif None in places:
            raise NotRepeatedError(f"what lies outside shares a tensor with blocks {sorted(inside)}")
        elif inside in ({2}, {1, 2}):
            for shift in range(len(self._shifted)):
                self._put(storage, storage if shift == 0 else self._key(storage), stacks, takers, shift)
        elif inside == {2, 3}:
            self._put(storage, storage, stacks, takers, len(self._shifted) - 1)
        else:
            raise NotRepeatedError(f"blocks {sorted(inside)} share a tensor")

    def _key(self, storage: int) -> int:
        key, self._next_key = self._next_key, self._next_key - 1
        if storage in self._old.sizes:
            self.saved.sizes[key] = self._old.sizes[storage]
        return key

    def _put(
        self, old: int, key: int, stacks: list[tuple[nn.Module, ...]], takers: list[nn.Module], shift: int
    ) -> None:
        if stacks:
            self.saved.savers[key] = [self._move(stack, shift) for stack in stacks]
            self.saved.places[key] = self._old.places[old]
        for module in takers:
            size = self._old.inputs[module][old]
            self._taken(self._shifted[shift].get(module, module))[key] = size

    def _share(self, storage: int, stacks: list[tuple[nn.Module, ...]], takers: list[nn.Module]) -> None:
        """A tensor of all blocks: copies of the third save and take it as well."""
        self._put(storage, storage, stacks, takers, 0)
        for shift in range(1, len(self._shifted)):
            own = [self._move(stack, shift) for stack in stacks if self._place(stack) == 2]
            if own:
                self.saved.savers[storage] = [*self.saved.savers[storage], *own]
            for module in takers:
                if self._number[module] == 2:
                    self._taken(self._shifted[shift][module])[storage] = self._old.inputs[module][storage]

    def _taken(self, module: nn.Module) -> dict[int, int]:
        self.saved.run_at.setdefault(module, {-1})
        return self.saved.inputs.setdefault(module, {})


def continued_ops(ops: Ops, kept: Sequence[nn.Module], every: Sequence[nn.Module]) -> Ops:
    """The same for ops: further blocks have those of the third.

    Raises:
        NotRepeatedError: When one of the blocks did not run.
    """
    if any(block not in ops.inside for block in kept):
        raise NotRepeatedError("the model does not run every block of its list")
    return ops._replace(inside={**ops.inside, **dict.fromkeys(every[RUN - 1 : -1], ops.inside[kept[2]])})


def continued_boundaries(
    boundaries: Sequence[Boundary], repeated: Repeated, every: Sequence[nn.Module]
) -> tuple[Boundary, ...]:
    """The same for what is sent: by the path where there is one, else as often as by each of the blocks that ran.

    Raises:
        NotRepeatedError: When what has no path is not sent equally often by all blocks.
    """
    third, found = repeated.paths[2], list(boundaries)
    copies = [repeated.paths[repeated.blocks.index(block)] for block in every[RUN - 1 : -1]]
    name = class_name(type(every[0]))
    without_path = collections.Counter(each for each in boundaries if not each.path and name in each.inside)
    for each, count in without_path.items():
        if count % RUN:
            raise NotRepeatedError(f"blocks send {each.kind} {count} times in {RUN} of them")
        found += [each] * (count // RUN * len(copies))
    for each in boundaries:
        if each.path == third or each.path.startswith(third + "."):
            found += [dataclasses.replace(each, path=path + each.path.removeprefix(third)) for path in copies]
    return tuple(found)
