"""Follow what blocks return and the gradients of it, which reentrant recomputation holds while a block runs backward.

torch's reentrant checkpoint is a function of the graph: its backward is given the gradient of a block's output, runs
the block again to its end, and holds both until the gradients inside the block are complete. Elsewhere the gradient is
free once the last operator of the block has used it, and recomputation does not come to the output.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from meshwright.planner.trace.aten_kernels import tensors_in

if TYPE_CHECKING:
    import torch

    from meshwright.planner.trace.live_tensors import LiveBytes


class _Held(NamedTuple):
    reference: StorageWeakRef  # keeps the address from being used for another
    num_bytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Held:
        storage = tensor.untyped_storage()
        return cls(StorageWeakRef(storage), storage.nbytes())


class _End(NamedTuple):
    """A result of a block, and the gradient that has come for it."""

    place: int
    begin: int  # the next operator
    output: _Held
    gradient: _Held


class BlockEnds:
    """What the blocks of a pass without data return, and the gradients of it.

    Args:
        blocks: Blocks in the order in which they run; they are the places.
        held: Follows the storages.
    """

    def __init__(self, blocks: Sequence[nn.Module], held: LiveBytes) -> None:
        self._places, self._held = {block: place for place, block in enumerate(blocks)}, held
        self._ends: list[_End] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the forward pass inside the block, and its backward afterwards."""
        # Before hooks that change the result, such as gathers of tokens: recomputation does not run them.
        hooks = [block.register_forward_hook(self._watch, prepend=True) for block in self._places]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _watch(self, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(self._note, self._places[module], _Held.of(tensor)))

    def _note(self, place: int, output: _Held, gradient: torch.Tensor) -> None:
        self._ends.append(_End(place, self._held.num_operators, output, _Held.of(gradient)))

    def let_go(self) -> list[tuple[int, int]]:
        """Return after every operator what nothing holds any more of its block's results, and of their gradients."""
        moments, found = self._held.moments, [[0, 0] for _ in self._held.moments]
        for number, end in enumerate(self._ends):
            # To the next run of the block, whose gradient is another.
            later = (other.begin for other in self._ends[number:] if other.place == end.place)
            behind = next((begin for begin in later if begin > end.begin), len(found))
            for which, each in enumerate((end.output, end.gradient)):
                for index in range(max(end.begin, self._held.freed_at(each.reference.cdata)), behind):
                    if moments[index].during == "backward" and moments[index].place == end.place:
                        found[index][which] += each.num_bytes
        return [(results, gradients) for results, gradients in found]
