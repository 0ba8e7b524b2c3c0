"""Run a few of a model's many equal blocks, and extend their recording to all of them.

[Note: repeated blocks] A model of 80 equal blocks is traced with four: the first, two whose neighbours are like them,
and the last. What the second and third do, all blocks between them and the last do, too: their tensors, calls, kernels
and collectives are copied, with the paths and places of the copies. Whether that holds is checked once for each model
and division of it, by a run of one block more.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
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
RUN = 4  # the first, two whose neighbours are like them, and the last
_SCALARS = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Repeated:
    """A list of equal blocks.

    Args:
        path: Path of the list.
        holder: The list.
        blocks: All of its blocks.
        paths: Paths of the blocks.
    """

    path: str
    holder: nn.ModuleList
    blocks: tuple[nn.Module, ...]
    paths: tuple[str, ...]

    def kept(self, count: int = RUN) -> tuple[nn.Module, ...]:
        """Return the first ``count - 1`` blocks and the last."""
        return (*self.blocks[: count - 1], self.blocks[-1])

    def divided_alike(self, dims: Mapping[nn.Parameter, int]) -> bool:
        """Return whether the same parameters of every block are divided, along the same dims."""
        return len({tuple(dims.get(parameter) for parameter in block.parameters()) for block in self.blocks}) == 1

    @contextlib.contextmanager
    def cut(self, count: int = RUN) -> Iterator[None]:
        """Shorten the model's list for a while.

        Whoever iterates over it meets a few blocks alone, under their own names.
        """
        whole = children_of(self.holder)
        names = [*list(whole)[: count - 1], list(whole)[-1]]
        setattr(self.holder, CHILDREN, _Few(whole, names))
        try:
            yield
        finally:
            setattr(self.holder, CHILDREN, whole)


class _Few(dict[str, Any]):
    """A dict that iterates over some entries and looks up all of them: hooks may be put on any block."""

    def __init__(self, whole: dict[str, Any], names: Sequence[str]) -> None:
        super().__init__({name: whole[name] for name in names})
        self._whole = whole

    def __contains__(self, name: object) -> bool:
        return name in self._whole

    def __missing__(self, name: str) -> Any:
        return self._whole[name]


def find_repeated(model: nn.Module) -> Repeated | None:
    """Return the only list of many equal blocks in a model; None where there is none, or more than one."""
    blocks = set(dict(find_blocks(model)).values())
    found = []
    for path, module in model.named_modules():
        listed = tuple(module.children()) if isinstance(module, nn.ModuleList) else ()
        if len(listed) >= FEWEST and blocks.issuperset(listed) and len(set(listed)) == len(module):
            paths = tuple(f"{path}.{name}" for name, _ in module.named_children())
            found.append(Repeated(path, module, listed, paths))  # type: ignore[arg-type]
    return found[0] if len(found) == 1 and _are_equal(found[0].blocks) else None


def _are_equal(blocks: Sequence[nn.Module]) -> bool:
    """Return whether blocks are equal in classes, shapes and settings; a number that counts them may differ."""
    if len({(*(id(p) for p in block.parameters()),) for block in blocks}) < len(blocks):
        return False  # they share their weights
    first = _described(blocks[0])
    for index, block in enumerate(blocks):
        one = _described(block)
        if one.keys() != first.keys():
            return False
        if any(one[key] != value and not (value == 0 and one[key] == index) for key, value in first.items()):
            return False
    return True


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


# --- From a run of a few equal blocks to what a run of all of them would have recorded.

T = TypeVar("T")
_THIRD = 2  # index of the block whose copies all further blocks are


class Places:
    """Map places of a short run to those of the whole model.

    Args:
        ran: Blocks that ran, with those of other lists.
        every: Blocks that would have run.
        repeated: The list that was cut.
        blocks: Blocks of the list that would have run.
    """

    def __init__(
        self, ran: Sequence[nn.Module], every: Sequence[nn.Module], repeated: Repeated, blocks: Sequence[nn.Module]
    ) -> None:
        index = {block: number for number, block in enumerate(every)}
        self._of = {-1: -1, len(ran): len(every), **{number: index[block] for number, block in enumerate(ran)}}
        self._shifted = {ran.index(block) for block in repeated.kept()[1 : _THIRD + 1]} if ran else set[int]()
        self.third = ran.index(repeated.kept()[_THIRD]) if ran else None
        self._copies = len(blocks) - RUN

    def of(self, place: int, shift: int = 0) -> int:
        """Return a place in the whole model; with a shift, that of a copy of the third block further on."""
        return self._of[place] + (shift if place in self._shifted else 0)

    def placed(self, amounts: Placed) -> Placed:
        """Return amounts of single places, copied for all blocks."""
        return self._each([(place, size) for (place,), size in amounts], lambda place, size: ((place,), size))

    def transients(self, found: Sequence[Transient]) -> tuple[Transient, ...]:
        """Return the temporary tensors of every place, copied for all blocks."""
        return self._each([(each.place, each) for each in found], lambda place, each: each._replace(place=place))

    def _each(self, found: Sequence[tuple[int, Any]], at: Callable[[int, Any], T]) -> tuple[T, ...]:
        every = {}
        for place, each in found:
            for shift in range(self._copies + 1 if place == self.third else 1):
                every[self.of(place, shift)] = each
        return tuple(at(place, every[place]) for place in sorted(every))


class NotRepeatedError(Exception):
    """A recording does not repeat from block to block."""


def continued(
    saved: SavedTensors, kept: Sequence[nn.Module], every: Sequence[nn.Module], places: Places
) -> SavedTensors:
    """Extend what a run of four blocks saved to a run of all blocks.

    Args:
        saved: Record of the run.
        kept: Blocks that ran.
        every: Blocks that would have run; the first three and the last are those that ran.
        places: Maps places of the run to those of the model.

    Raises:
        NotRepeatedError: When a tensor is shared by blocks in a way that has no obvious continuation.
    """
    return _Continued(saved, kept, every, places).saved


class _Continued:
    def __init__(
        self, saved: SavedTensors, kept: Sequence[nn.Module], every: Sequence[nn.Module], places: Places
    ) -> None:
        self._places = places
        self._number = {module: number for number, block in enumerate(kept) for module in block.modules()}
        template = [list(block.modules()) for block in kept[1:3]]
        # For each shift: modules of the second and third block -> modules of the blocks so many further on.
        self._shifted = [
            {
                module: twin
                for offset, modules in enumerate(template)
                for module, twin in zip(modules, every[1 + offset + shift].modules(), strict=True)
            }
            for shift in range(len(every) - len(kept) + 1)
        ]
        self._old, self._next_key = saved, -1
        first, end = self._third([call.stack for call in saved.work])
        products = [call for call in saved.work[first:end] if call.turns]
        self._has_odd_products = len(products) % 2 == 1  # in each block
        self._around = {module for call in products for module in call.stack if module not in self._number}
        self.saved = dataclasses.replace(
            saved,
            sizes=dict(saved.sizes),
            savers=dict(saved.savers),
            runs=self._runs(saved),
            places={storage: self._at(found) for storage, found in saved.places.items()},
            run_at={module: self._at(found) for module, found in saved.run_at.items()},
            inputs={m: {} if m in self._number else dict(taken) for m, taken in saved.inputs.items()},
            fates=dict(saved.fates),
            results={
                storage: dataclasses.replace(made, places=self._at(made.places), returned_by=self._at(made.returned_by))
                for storage, made in saved.results.items()
            },
            work=self._work(saved),
        )
        self._takers: dict[int, list[nn.Module]] = {}
        for module in (module for module in saved.inputs if module in self._number):
            for storage in saved.inputs[module]:
                self._takers.setdefault(storage, []).append(module)
        for storage in {**saved.savers, **self._takers, **saved.results}:
            self._continue(storage)

    def _at(self, places: set[int], shift: int = 0) -> set[int]:
        return {self._places.of(place, shift) for place in places}

    def _runs(self, saved: SavedTensors) -> collections.Counter[nn.Module]:
        """Return how often every module has run; those of further blocks as often as the second and third block's."""
        further = {twin: saved.runs[module] for each in self._shifted[1:] for module, twin in each.items()}
        return collections.Counter({**further, **saved.runs})

    def _work(self, saved: SavedTensors) -> list[Call]:
        """Return the calls, with copies of the third block's behind them."""
        calls, copies = saved.work, range(1, len(self._shifted))
        first, end = self._third([call.stack for call in calls])
        copied = [self._later(call, shift) for shift in copies for call in calls[first:end]]
        before, behind = ([self._later(call, 0) for call in part] for part in (calls[:end], calls[end:]))
        return [*before, *copied, *behind]

    def _later(self, call: Call, shift: int) -> Call:
        """Return the same call in a block further on."""
        stack, place = self._move(call.stack, shift), self._places.of(call.place, shift)
        return dataclasses.replace(call, stack=stack, place=place, turns=self._turns(call, shift))

    def _turns(self, call: Call, shift: int) -> tuple[int, ...]:
        """Return the turns of a product where further blocks have run before it, in the modules around these."""
        if not self._has_odd_products or not call.turns:
            return call.turns
        number, third = self._place(call.stack), self._places.third
        is_behind = number == RUN - 1 if number is not None else third is not None and call.place > third
        further = shift or (len(self._shifted) - 1 if is_behind else 0)
        return tuple(
            (turn + further) % 2 if module in self._around else turn
            for module, turn in zip(call.stack, call.turns, strict=True)
        )

    def _third(self, stacks: Sequence[tuple[nn.Module, ...]]) -> tuple[int, int]:
        """Return from where to where the third block acts; an empty range at the end where it does nothing."""
        own = [index for index, stack in enumerate(stacks) if self._place(stack) == 2]
        return (own[0], own[-1] + 1) if own else (len(stacks), len(stacks))

    def _place(self, stack: tuple[nn.Module, ...]) -> int | None:
        return next((self._number[module] for module in stack if module in self._number), None)

    def _move(self, stack: tuple[nn.Module, ...], shift: int) -> tuple[nn.Module, ...]:
        return tuple(self._shifted[shift].get(module, module) for module in stack)

    def _continue(self, storage: int) -> None:
        stacks, takers = self._old.savers.get(storage, []), self._takers.get(storage, [])
        made = self._old.results[storage].calls if storage in self._old.results else []
        places = {self._place(stack) for stack in (*stacks, *(call.stack for call in made))}
        places |= {self._number[module] for module in takers}
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
            self.saved.places[key] = self._at(self._old.places[old], shift)
        if old in self._old.fates:
            self.saved.fates[key] = self._old.fates[old]
        if old in self._old.results:
            made = self._old.results[old]
            calls = [self._later(call, shift) for call in made.calls]
            self.saved.results[key] = dataclasses.replace(
                made,
                calls=calls,
                places=self._at(made.places, shift),
                returned_by=self._at(made.returned_by, shift),
            )
        for module in takers:
            size = self._old.inputs[module][old]
            self._taken(module, shift)[key] = size

    def _share(self, storage: int, stacks: list[tuple[nn.Module, ...]], takers: list[nn.Module]) -> None:
        """Continue a tensor of all blocks: copies of the third block save and take it, too."""
        self._put(storage, storage, stacks, takers, 0)
        third = self._places.third
        for shift in range(1, len(self._shifted)):
            if third is not None and third in self._old.places.get(storage, ()):
                self.saved.places[storage] |= {self._places.of(third, shift)}
            own = [self._move(stack, shift) for stack in stacks if self._place(stack) == 2]
            if own:
                self.saved.savers[storage] = [*self.saved.savers[storage], *own]
            self._share_results(storage, shift)
            for module in takers:
                if self._number[module] == 2:
                    self._taken(module, shift)[storage] = self._old.inputs[module][storage]

    def _share_results(self, storage: int, shift: int) -> None:
        made = self.saved.results.get(storage)
        again = [] if made is None else self._old.results[storage].calls
        own = [self._later(call, shift) for call in again if self._place(call.stack) == 2]
        if made is not None and own:
            self.saved.results[storage] = dataclasses.replace(made, calls=[*made.calls, *own])

    def _taken(self, module: nn.Module, shift: int) -> dict[int, int]:
        twin = self._shifted[shift].get(module, module)
        self.saved.run_at.setdefault(twin, self._at(self._old.run_at[module], shift))
        return self.saved.inputs.setdefault(twin, {})


def continued_ops(ops: Ops, kept: Sequence[nn.Module], every: Sequence[nn.Module]) -> Ops:
    """Extend the recorded ops to all blocks: further blocks have those of the third.

    Raises:
        NotRepeatedError: When one of the blocks did not run.
    """
    if any(block not in ops.inside for block in kept):
        raise NotRepeatedError("the model does not run every block of its list")
    further = every[RUN - 1 : -1]
    return ops._replace(
        inside={**ops.inside, **dict.fromkeys(further, ops.inside[kept[2]])},
        runs={**ops.runs, **dict.fromkeys(further, ops.runs[kept[2]])},
    )


def continued_boundaries(
    boundaries: Sequence[Boundary], repeated: Repeated, every: Sequence[nn.Module]
) -> tuple[Boundary, ...]:
    """Extend the recorded collectives to all blocks.

    Collectives with a path are copied by it; others are sent as often by a copy as by each block that ran.

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
