"""Tell what the code of a compiled block saves for backward, from the operators of one that is not compiled.

[Note: saves of compiled blocks] ``torch.compile`` traces forward and backward together and cuts the graph in two. What
is computed element by element, or summed over rows, is fused into the kernels around it, and computed again in backward
from what is there anyway. In memory lies what products and attention read and write: they run in kernels of their own,
and products read their inputs again for the gradients of weights, so the compiler does not compute these twice. Of a
block of Llama these are its input, what the norms return, queries, keys and values, attention's result, the result of
the first of two residual sums or what it adds, gate, up and their product; not the norms in fp32, nor the activation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

Fate = Literal["gone", "kept"]
"""What becomes of a storage when its block is compiled: no longer saved, or saved in place of what is gone."""

_DRAWS = ("dropout", "bernoulli", "rand")  # a mask is not drawn twice
# Operators that run by themselves; and the hyperbolic tangent inside GPT-2's activation, which torch 2.13 keeps.
_ALONE = (
    "sort", "topk", "cumsum", "scatter", "index_put", "index_add", "histc", "bincount", "nonzero", "grouped_mm", "tanh"
)  # fmt: skip


@dataclass
class Fusion:
    """Follow which storages of each block are made by kernels that a compiler fuses."""

    sources: dict[int, tuple[int, ...]] = field(default_factory=dict)  # storage -> what fused kernels made it from
    in_memory: set[int] = field(default_factory=set)  # storages that other kernels read or write
    places: dict[int, int] = field(default_factory=dict)  # where each storage of ``sources`` was made

    def note(self, name: str, taken: Iterable[int], made: Iterable[int], place: int, *, is_alone: bool) -> None:
        """Note an operator of forward.

        Args:
            name: Its name without overload.
            taken: Storages of its arguments, weights left out.
            made: Storages of its results.
            place: The block where it ran.
            is_alone: Whether it multiplies matrices, so that no compiler fuses it with others.
        """
        read, written = dict.fromkeys(taken), [*dict.fromkeys(made)]
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

    def fates(self, saved: Iterable[int]) -> dict[int, Fate]:
        """Return what becomes of the storages that blocks save; those that stay as they are are left out."""
        known = set(saved)
        gone = {storage for storage in known if storage in self.sources and storage not in self.in_memory}
        found: dict[int, Fate] = dict.fromkeys(gone, "gone")
        for storage in gone:
            for origin in self._origins(storage):
                if origin not in known:
                    found[origin] = "kept"
        return found

    def _origins(self, storage: int) -> set[int]:
        """Return the nearest storages in memory from which fused kernels of the same block compute this one."""
        place, found, met, left = self.places[storage], set[int](), set[int](), [storage]
        while left:
            for source in self.sources[left.pop()]:
                if source in met:
                    continue
                met.add(source)
                if source in self.in_memory or self.places.get(source) != place:
                    found.add(source)
                else:
                    left.append(source)
        return found
