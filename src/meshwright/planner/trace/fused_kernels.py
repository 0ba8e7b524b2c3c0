"""Find what compiled blocks save, and what their kernels move: a compiler fuses what runs between products."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import networkx
import torch

from meshwright.planner.trace.aten_kernels import PICKING, storage_of, tensor_bytes

# [Note: saves of compiled blocks] ``torch.compile`` traces forward and backward together and cuts the graph in two.
# What is computed element by element, or summed over rows, is fused into kernels around it, and computed again in
# backward from what is there anyway; of what is not, so much is saved as has the fewest bytes (a minimum cut, as
# torch's own). In memory lies what products and attention read and write: they run in kernels of their own, and
# products read their inputs again for gradients of weights. Of a block of Llama these are its input, what norms return,
# queries, keys and values, attention's result, one residual sum or what it adds, gate, up and their product; not the
# norms in fp32, nor the activation. Of adapters it is the sum of a layer's result and theirs, and neither of the two.

# [Note: kernels of compiled blocks] What runs between two products is taken as one kernel: it reads once what lies in
# memory, and writes what others read. What is no longer saved is computed again in backward, from what is. A sum over
# rows, as gradients of biases and of norms' weights, runs by itself, and reads what its summands are made of; so do
# casts of weights, which products read in half precision. Of blocks of four families, in bf16 and under autocast,
# this is within 6 % of what inductor counts of its own graphs (``tests/planner/trace/test_fused_kernels.py``).

Fate = Literal["gone", "kept"]
"""What becomes of a storage when its block is compiled: no longer saved, or saved in place of what is gone."""
CAST = "aten._to_copy"

_DRAWS = ("dropout", "bernoulli", "rand")  # a mask is not drawn twice
# Operators that run by themselves.
_ALONE = (
    "sort", "topk", "cumsum", "scatter", "index_put", "index_add", "histc", "bincount", "nonzero", "grouped_mm"
)  # fmt: skip
_SUMS = ("aten.sum", "aten.mean")

Moved = tuple[int, float]
"""Bytes that an operator adds to what its kernel moves, and its share of the launch."""
_Views = dict[tuple[int, int], int]  # of a storage: offset and elements of each -> bytes


class _Call(NamedTuple):
    """An operator of either pass."""

    place: int  # the block where it ran, or whose backward it is
    in_backward: bool
    reads: dict[int, _Views]  # by storages
    made: dict[int, int]  # storage -> bytes
    is_alone: bool
    sums_rows: bool


@dataclass
class Fusion:
    """Follow which storages are made, and which are read, by kernels that a compiler fuses.

    Args:
        weights: Storages of parameters and buffers; the set may grow.
        num_blocks: Blocks of the list that are places. What is before them and behind them saves what it saves.
    """

    weights: Collection[int] = ()
    num_blocks: int = 0
    calls: list[_Call] = field(default_factory=list)
    sources: dict[int, tuple[int, ...]] = field(default_factory=dict)  # storage -> what fused kernels made it from
    sizes: dict[int, int] = field(default_factory=dict)  # bytes
    in_memory: set[int] = field(default_factory=set)  # storages that other kernels read or write
    places: dict[int, int] = field(default_factory=dict)  # where each storage of ``sources`` was made
    casts: dict[tuple[Any, ...], int] = field(default_factory=dict)  # the first of equal casts
    repeated: dict[int, int] = field(default_factory=dict)  # other casts -> the first

    def note(
        self,
        name: str,
        given: Sequence[torch.Tensor],
        result: Sequence[torch.Tensor],
        place: int,
        *,
        in_backward: bool = False,
        multiplies: bool = False,
        of_weights: bool = False,
        runs: bool = True,
    ) -> int:
        """Note an operator, and return its number among those of both passes; -1 if it launches nothing.

        Args:
            name: Its name without overload.
            given: Its arguments.
            result: Its results.
            place: The block where it ran, or whose backward it is.
            in_backward: Whether it is backward's.
            multiplies: Whether it multiplies matrices, so that no compiler fuses it with others.
            of_weights: Whether it casts weights, or their gradients.
            runs: Whether it launches a kernel.
        """
        made = {storage_of(tensor)[0]: tensor for tensor in result}
        is_alone = multiplies or not name.startswith("aten.") or any(word in name for word in _ALONE)
        if not in_backward and 0 <= place < self.num_blocks:
            self._note_sources(name, given, made, place, is_alone=is_alone)
        if not runs:
            return -1
        sizes = {storage: tensor_bytes(tensor) for storage, tensor in made.items()}
        sums_rows = name in _SUMS and given[0].dim() > 1 and given[0].shape[-1:] == result[0].shape[-1:]
        reads = _views(name, given, sizes)
        self.calls.append(_Call(place, in_backward, reads, sizes, is_alone or of_weights, sums_rows))
        return len(self.calls) - 1

    def _note_sources(
        self, name: str, given: Sequence[torch.Tensor], made: Mapping[int, torch.Tensor], place: int, *, is_alone: bool
    ) -> None:
        read = dict.fromkeys(storage for storage, _ in map(storage_of, given) if storage not in self.weights)
        self.sizes.update((storage, tensor_bytes(tensor)) for storage, tensor in made.items())
        new = [storage for storage in made if storage not in read]
        if is_alone:
            self.in_memory.update(read, made)
            return
        if any(word in name for word in _DRAWS):
            masks, new = new[1:], new[:1]
            self.in_memory.update(masks)
            read |= dict.fromkeys(masks)
        for storage in new:
            self.sources[storage], self.places[storage] = (*read,), place
            tensor = made[storage]
            if tensor.is_floating_point() and tensor.itemsize == 1:
                self.in_memory.add(storage)  # by products, also where a trace multiplies in a wider type
            elif name == CAST and len(read) == 1:
                # Under autocast each layer casts what it is given; the compiler finds that they do the same.
                of = [self.repeated.get(each, each) for each in read]
                first = self.casts.setdefault((*of, tensor.dtype, tensor.numel(), place), storage)
                if first != storage:
                    self.repeated[storage] = first

    def fates(self, saved: Iterable[int]) -> dict[int, Fate]:
        """Return what becomes of the storages that blocks save, in their order; those that stay so are left out."""
        known = dict.fromkeys(saved)  # in order: which of equal casts stays must be the same in every block
        gone = {storage for storage in known if storage in self.sources and storage not in self.in_memory}
        # Of equal casts one is saved, and not the first where that is a frozen layer's.
        staying = [storage for storage in known if storage not in gone]
        others_first = sorted(staying, key=self.repeated.__contains__, reverse=True)
        one_of = {self.repeated.get(storage, storage): storage for storage in others_first}
        twins = {*staying} - {*one_of.values()}
        by_place: dict[int, list[int]] = {}
        for storage in gone:
            by_place.setdefault(self.places[storage], []).append(storage)
        cut = {each for place, wanted in by_place.items() for each in self._cut(place, wanted, {*staying})}
        found: dict[int, Fate] = dict.fromkeys((gone | twins) - cut, "gone")
        return found | dict.fromkeys(cut - gone, "kept")

    def _cut(self, place: int, wanted: Sequence[int], there: Collection[int]) -> Iterator[int]:
        """Yield the fewest bytes of one block's storages, beside those that are there, that suffice to compute some."""
        graph, left, met = networkx.DiGraph(), list(wanted), set(wanted)
        graph.add_node("start")
        while left:
            storage = left.pop()
            graph.add_edge(storage, (storage,), capacity=0 if storage in there else self.sizes.get(storage, 0))
            is_made = storage not in self.in_memory and self.places.get(storage) == place
            sources = self.sources[storage] if is_made else ()
            graph.add_edges_from(((source,), storage) for source in sources)
            graph.add_edges_from([] if is_made else [("start", storage)])  # what is made of nothing costs nothing
            left += {*sources} - met
            met.update(sources)
        graph.add_edges_from(((storage,), "end") for storage in wanted)
        _, (reached, _) = networkx.minimum_cut(graph, "start", "end")
        return (each for each in met if each in reached and (each,) not in reached and each not in there)

    def moved(self, saved: Collection[int], fates: Mapping[int, Fate]) -> list[Moved | None]:
        """Return what each operator moves where blocks are compiled; None for those that are fused with nothing.

        Args:
            saved: Storages saved for backward.
            fates: What becomes of them.
        """
        in_memory = {storage for storage in saved if fates.get(storage) != "gone"}
        in_memory |= {storage for storage, fate in fates.items() if fate == "kept"}
        kernels = _Kernels(self.calls, (self.in_memory | in_memory) - self.repeated.keys(), self.repeated.keys())
        return [None if call.is_alone else kernels.moved(number) for number, call in enumerate(self.calls)]


class _Kernels:
    """Fused kernels; see [Note: kernels of compiled blocks].

    Args:
        calls: Operators of both passes, in order.
        in_memory: Storages of forward that are written to memory.
        never_made: Storages of which another has the same.
    """

    def __init__(self, calls: Sequence[_Call], in_memory: set[int], never_made: Collection[int]) -> None:
        self._calls = calls
        self._makers: dict[int, int] = {}
        for number, call in enumerate(calls):
            for storage in call.made:
                self._makers.setdefault(storage, number)
        self._in_memory = in_memory | self._read_elsewhere() - set(never_made)
        self._kernel = self._by_products()
        self._sizes = Counter(self._kernel)
        self._met: set[tuple[Any, ...]] = set()  # what each kernel has read and written

    def _read_elsewhere(self) -> set[int]:
        """Return the storages that products, sums or other blocks read or make, and those that nothing reads."""
        found, read = set[int](), set[int]()
        for call in self._calls:
            read.update(call.reads)
            found.update(call.made if call.is_alone or call.sums_rows else (), call.reads if call.is_alone else ())
            made = ((each, self._calls[self._makers[each]]) for each in call.reads if each in self._makers)
            found.update(each for each, by in made if by.in_backward == call.in_backward and by.place != call.place)
        return found | (self._makers.keys() - read)

    def _by_products(self) -> list[tuple[int, ...]]:
        """Return the kernel of every operator: one for all of a block between the same products."""
        found: list[tuple[int, ...]] = []
        behind: dict[tuple[int, bool], int] = {}  # storage of a pass -> how many kernels it waits for
        for number, call in enumerate(self._calls):
            own = (s for s in call.reads if s in self._makers and self._calls[self._makers[s]].place == call.place)
            depth = max((behind.get((storage, call.in_backward), 0) for storage in own), default=0)
            apart = call.is_alone or call.sums_rows
            found.append((number,) if apart else (call.in_backward, call.place, depth))
            behind.update(((storage, call.in_backward), depth + apart) for storage in call.made)
        return found

    def moved(self, number: int) -> Moved:
        """Return what an operator adds to its kernel; asked in the order in which they run."""
        call, kernel = self._calls[number], self._kernel[number]
        found = dict(self._read(call, kernel, set()))
        found |= {(storage,): size for storage, size in call.made.items() if storage in self._in_memory}
        new = {key: size for key, size in found.items() if (kernel, *key) not in self._met}
        self._met.update((kernel, *key) for key in new)
        return sum(new.values()), 1 / self._sizes[kernel]

    def _read(self, call: _Call, kernel: tuple[int, ...], passed: set[int]) -> Iterator[tuple[tuple[Any, ...], int]]:
        for storage, views in call.reads.items():
            maker = self._makers.get(storage)
            if maker is not None and self._kernel[maker] == kernel:
                continue
            if maker is None or storage in self._in_memory:
                yield from (((storage, view), size) for view, size in views.items())
            elif maker not in passed:  # computed again, from what is in memory
                passed.add(maker)
                yield from self._read(self._calls[maker], kernel, passed)


def _views(name: str, given: Sequence[torch.Tensor], made: Mapping[int, int]) -> dict[int, _Views]:
    found: dict[int, _Views] = {}
    for number, tensor in enumerate(given):
        picks = number == 0 and name.removeprefix("aten.") in PICKING
        size = sum(made.values()) if picks else tensor_bytes(tensor)
        found.setdefault(storage_of(tensor)[0], {})[int(tensor.storage_offset()), tensor.numel()] = size
    return found
