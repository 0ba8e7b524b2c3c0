"""Find what compiled blocks save and move: their kernels between products are fused, and much is computed again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import networkx
import torch

from meshwright.planner.trace.aten_kernels import PICKING, storage_of, tensor_bytes

# --- What they save.

# [Note: saves of compiled blocks] ``torch.compile`` traces forward and backward together and cuts the graph in two.
# What is computed element by element, or summed over rows, is fused into kernels around it, and computed again in
# backward from what is there anyway; of what is not, so much is saved as has the fewest bytes (a minimum cut, as
# torch's own). In memory lies what products and attention read and write: they run in kernels of their own, and
# products read their inputs again for gradients of weights. Of a block of Llama these are its input, what norms return,
# queries, keys and values, attention's result, one residual sum or what it adds, gate, up and their product; not the
# norms in fp32, nor the activation. Of adapters it is the sum of a layer's result and theirs, and neither of the two.

Fate = Literal["gone", "kept"]
"""What becomes of a storage when its block is compiled: no longer saved, or saved in place of what is gone."""

_DRAWS = ("dropout", "bernoulli", "rand")  # a mask is not drawn twice
# Operators that run by themselves.
_ALONE = (
    "sort", "topk", "cumsum", "scatter", "index_put", "index_add", "histc", "bincount", "nonzero", "grouped_mm"
)  # fmt: skip
CAST = "aten._to_copy"
_SUMS = ("aten.sum", "aten.mean")


class Moved(NamedTuple):
    """What an operator moves where a compiler fuses it with others."""

    num_bytes: int  # that it is the first of its kernel to read, and what it writes to memory
    launches: float  # its share of the kernel


class _Call(NamedTuple):
    """An operator of either pass."""

    name: str
    place: int  # the block where it ran, or whose backward it is
    in_backward: bool
    reads: dict[int, dict[tuple[int, int], int]]  # storage -> offset and elements of each view of it -> bytes
    made: dict[int, int]  # storage -> bytes
    is_alone: bool
    sums_rows: bool  # over the tokens, as gradients of biases and of norms' weights are


@dataclass
class Fusion:
    """Follow which storages are made, and which are read, by kernels that a compiler fuses.

    Args:
        num_blocks: Blocks of the list whose places are followed: what is before them and behind them is not compiled
            with them.
    """

    weights: Collection[int] = ()  # storages
    num_blocks: int = 0
    calls: list[_Call] = field(default_factory=list)
    sources: dict[int, tuple[int, ...]] = field(default_factory=dict)  # storage -> what fused kernels made it from
    sizes: dict[int, int] = field(default_factory=dict)  # bytes
    in_memory: set[int] = field(default_factory=set)  # storages that other kernels read or write
    places: dict[int, int] = field(default_factory=dict)  # where each storage of ``sources`` was made
    casts: dict[tuple[Any, ...], int] = field(default_factory=dict)  # the first of equal casts
    repeated: dict[int, int] = field(default_factory=dict)  # other casts -> the first

    def note(
        self, name: str, given: Sequence[torch.Tensor], result: Sequence[torch.Tensor], place: int, **how: bool
    ) -> int:
        """Note an operator, and return its number among those of both passes.

        Args:
            name: Its name without overload.
            given: Its arguments.
            result: Its results.
            place: The block where it ran, or whose backward it is.
            how: ``in_backward``, and whether it ``multiplies`` or casts weights (``of_weights``): then no compiler
                fuses it with others.
        """
        made = {storage_of(tensor)[0]: tensor for tensor in result}
        alone = how["multiplies"] or how["of_weights"] or not name.startswith("aten.")
        if not how["in_backward"] and 0 <= place < self.num_blocks:
            self._note_sources(name, given, made, place, is_alone=how["multiplies"])
        sizes = {storage: tensor_bytes(tensor) for storage, tensor in made.items()}
        is_alone = alone or any(word in name for word in _ALONE)
        rows = name in _SUMS and given[0].shape[-1:] == result[0].shape[-1:] and given[0].dim() > 1
        if not how["runs"]:
            return -1
        self.calls.append(_Call(name, place, how["in_backward"], _views(name, given, sizes), sizes, is_alone, rows))
        return len(self.calls) - 1

    def _note_sources(
        self, name: str, given: Sequence[torch.Tensor], made: Mapping[int, torch.Tensor], place: int, *, is_alone: bool
    ) -> None:
        read = dict.fromkeys(storage for storage, _ in map(storage_of, given) if storage not in self.weights)
        written = [*made]
        self.sizes.update((storage, tensor_bytes(tensor)) for storage, tensor in made.items())
        new = [storage for storage in written if storage not in read]
        if is_alone or not name.startswith("aten.") or any(word in name for word in _ALONE):
            self.in_memory.update(read, written)
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
        """Return what becomes of the storages that blocks save; those that stay as they are are left out."""
        known = set(saved)
        gone = {storage for storage in known if storage in self.sources and storage not in self.in_memory}
        # Of equal casts one is saved, and not the first where that is a frozen layer's.
        others_first = sorted(known - gone, key=self.repeated.__contains__, reverse=True)
        one_of = {self.repeated.get(storage, storage): storage for storage in others_first}
        twins = known - gone - {*one_of.values()}
        by_place: dict[int, list[int]] = {}
        for storage in gone:
            by_place.setdefault(self.places[storage], []).append(storage)
        cut = {each for place, wanted in by_place.items() for each in self._cut(place, wanted, known - gone)}
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
        """Return what each operator moves if all are compiled; None for those that are fused with nothing.

        Args:
            saved: Storages saved for backward.
            fates: What becomes of them.
        """
        makers: dict[int, int] = {}
        for number, call in enumerate(self.calls):
            for storage in call.made:
                makers.setdefault(storage, number)
        in_memory = self._in_memory(makers, saved, fates)
        kernels = self._kernels(makers)
        sizes, known = Counter(kernels), _Known(self.calls, makers, in_memory, kernels)
        return [
            None if call.is_alone else Moved(known.bytes_of(number), 1 / sizes[kernels[number]])
            for number, call in enumerate(self.calls)
        ]

    def _in_memory(self, makers: Mapping[int, int], saved: Collection[int], fates: Mapping[int, Fate]) -> set[int]:
        """Return the storages that are written to memory, where every kernel that can be is fused."""
        found = self.in_memory | {s for s in saved if fates.get(s) != "gone"} | {s for s in fates if fates[s] == "kept"}
        read: set[int] = set()
        for call in self.calls:
            read.update(call.reads)
            found.update(call.made if call.is_alone or call.sums_rows else (), call.reads if call.is_alone else ())
            makes = ((storage, self.calls[makers[storage]]) for storage in call.reads if storage in makers)
            found.update(s for s, by in makes if by.in_backward == call.in_backward and by.place != call.place)
        return found | (makers.keys() - read)

    def _kernels(self, makers: Mapping[int, int]) -> list[tuple[int, ...]]:
        """Return the kernel of every operator: one for all of a block between the same products.

        A sum over rows is a kernel of its own.
        """
        found: list[tuple[int, ...]] = []
        depths: dict[tuple[int, bool], int] = {}  # how many products are behind each storage of a block
        for number, call in enumerate(self.calls):
            own = (s for s in call.reads if s in makers and self.calls[makers[s]].place == call.place)
            depth = max((depths.get((s, call.in_backward), 0) for s in own), default=0)
            apart = call.is_alone or call.sums_rows
            found.append((number,) if apart else (call.in_backward, call.place, depth))
            depths.update(((s, call.in_backward), depth + apart) for s in call.made)
        return found


class _Known:
    """Count the bytes of fused operators: what one of its kernel has read before is not read again."""

    def __init__(
        self, calls: Sequence[_Call], makers: Mapping[int, int], in_memory: Collection[int], kernels: Sequence[Any]
    ) -> None:
        self._calls, self._makers, self._in_memory, self._kernels = calls, makers, in_memory, kernels
        self._met: set[Any] = set()

    def bytes_of(self, number: int) -> int:
        """Return what an operator adds to what its kernel moves; asked in the order in which they run."""
        call, kernel = self._calls[number], self._kernels[number]
        written = {(kernel, s): size for s, size in call.made.items() if s in self._in_memory}
        return sum(self._new(dict(self._read(call, kernel, set())))) + sum(self._new(written))

    def _read(self, call: _Call, kernel: Any, passed: set[int]) -> Iterator[tuple[Any, int]]:
        for storage, views in call.reads.items():
            maker = self._makers.get(storage)
            if maker is not None and self._kernels[maker] == kernel:
                continue
            if maker is None or storage in self._in_memory:
                yield from (((kernel, storage, view), size) for view, size in views.items())
            elif maker not in passed:  # computed again, from what is in memory
                passed.add(maker)
                yield from self._read(self._calls[maker], kernel, passed)

    def _new(self, found: Mapping[Any, int]) -> Iterator[int]:
        for key, size in found.items():
            if key not in self._met:
                self._met.add(key)
                yield size


def _views(name: str, given: Sequence[torch.Tensor], made: Mapping[int, int]) -> dict[int, dict[tuple[int, int], int]]:
    found: dict[int, dict[tuple[int, int], int]] = {}
    for number, tensor in enumerate(given):
        picks = number == 0 and name.removeprefix("aten.") in PICKING
        size = sum(made.values()) if picks else tensor_bytes(tensor)
        found.setdefault(storage_of(tensor)[0], {})[tensor.storage_offset(), tensor.numel()] = size
    return found
