"""Follow what blocks return and the gradients of it, which reentrant recomputation holds while a block runs backward.

torch's reentrant checkpoint is a function of the graph: its backward is given the gradient of a block's output, runs
the block again to its end, and holds both until the gradients inside the block are complete. Elsewhere the gradient is
free once the last operator of the block has used it, and recomputation does not come to the output.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from meshwright.planner.trace.aten_kernels import tensors_in

if TYPE_CHECKING:
    import torch

    from meshwright.planner.trace.live_tensors import LiveBytes, SavedTensors


class BlockEnds:
    """What the blocks of a pass without data return, and the gradients of it.

    Args:
        blocks: Blocks in the order in which they run; they are the places.
        held: Follows the storages.
    """

    def __init__(self, blocks: Sequence[nn.Module], held: LiveBytes) -> None:
        self._places, self._held = {block: place for place, block in enumerate(blocks)}, held
        self._returned: defaultdict[int, dict[int, int]] = defaultdict(dict)  # place -> storage -> bytes
        # The next operator, the place, and the gradient's storage and bytes.
        self._arrived: list[tuple[int, int, StorageWeakRef, int]] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the forward pass inside the block, and its backward afterwards."""
        hooks = [block.register_forward_hook(self._watch) for block in self._places]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _watch(self, module: nn.Module, args: Any, output: Any) -> None:
        from meshwright.planner.trace.live_tensors import storage_of

        place = self._places[module]

        def note(gradient: torch.Tensor) -> None:
            _, size = storage_of(gradient)
            reference = StorageWeakRef(gradient.untyped_storage())
            self._arrived.append((self._held.num_operators, place, reference, size))

        for tensor in tensors_in(output):
            if tensor.requires_grad:
                key, size = storage_of(tensor)
                self._returned[place][key] = size
                tensor.register_hook(note)

    def returned(self, saved: SavedTensors) -> Mapping[int, int]:
        """Return by places the bytes of what a block returns and does not save itself."""
        return {
            place: sum(size for key, size in found.items() if place not in saved.places.get(key, ()))
            for place, found in self._returned.items()
        }

    def let_go(self) -> Sequence[int]:
        """Return after every operator the bytes of its block's gradients that nothing holds any more."""
        moments, found = self._held.moments, [0] * self._held.num_operators
        for number, (begin, place, gradient, size) in enumerate(self._arrived):
            later = (other for other, at, *_ in self._arrived[number:] if at == place and other > begin)
            free = self._held.freed_at(gradient.cdata)
            # To the next run of the block, whose gradient is another.
            for index in range(max(begin, free), next(later, len(found))):
                if moments[index].during == "backward" and moments[index].place == place:
                    found[index] += size
        return found
