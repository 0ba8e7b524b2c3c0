"""Run backward in two parts without data, as pipeline schedules do that compute gradients of weights later.

[Note: backward in two parts] torch first computes the gradients of a stage's inputs, keeps the whole graph and the
gradient of every layer's result, and computes the gradients of weights from these when their turn comes. A pass
without data runs the blocks behind the first one's input through the same two functions. What a place holds is told
apart by who made it, so that stages of any blocks add up.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from meshwright.cost import Instant, SplitBackward, outermost_instants
from meshwright.planner.trace.aten_kernels import reference, storage_of, tensors_in
from meshwright.runtime.torch_internals.pytree import tree_map

if TYPE_CHECKING:
    from meshwright.planner.trace.live_tensors import LiveBytes, SavedTensors


class BackwardInParts:
    """Cut the graph of a pass before its first block, and run its backward in two parts.

    Args:
        blocks: Blocks in the order in which they run.
        between: Whether to stop between the parts, and tell what a stage that ends with a place lets go there.
    """

    def __init__(self, blocks: Sequence[nn.Module], *, between: bool = False) -> None:
        # Imported here since it takes long, and most runs have no pipeline; not during the pass, which would count what
        # modules make.
        from meshwright.runtime.torch_internals.pipelining import stage_backward_input, stage_backward_weight

        self._of_inputs, self._of_weights = stage_backward_input, stage_backward_weight
        self._blocks, self._stops = blocks, between
        self._left: dict[int, set[int]] = {}  # storages that are left between the parts if a stage ends with a place
        self._places = {block: place for place, block in enumerate(blocks)}
        self._leaves: list[torch.Tensor] = []  # what takes the place of the first block's inputs
        self._handed: dict[int, int] = {}  # storages of gradients of what blocks return -> places
        self._met: list[StorageWeakRef] = []  # to these: others made later would have their keys
        self._between: dict[int, tuple[int, int]] = {}  # what is held between the parts
        self._groups: list[tuple[int, int]] = []  # of weights: the first operator of each, and the bytes before it
        self._gradients: list[tuple[int, int]] = []  # of weights

    @contextlib.contextmanager
    def cutting(self) -> Iterator[None]:
        """Cut the graph of the forward pass inside the block."""
        hooks = [block.register_forward_hook(self._watch) for block in self._blocks]
        hooks.append(self._blocks[0].register_forward_pre_hook(self._cut, with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _cut(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._leaves:  # the block runs again
            return None

        def leaf(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.requires_grad:
                return value
            self._leaves.append(value.detach().requires_grad_())
            return self._leaves[-1]

        return tree_map(leaf, args), tree_map(leaf, kwargs)

    def _watch(self, module: nn.Module, args: Any, output: Any) -> None:
        place = self._places[module]
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._note(place, gradient))

    def _note(self, place: int, gradient: torch.Tensor) -> None:
        self._handed.setdefault(storage_of(gradient)[0], place)
        self._met.append(reference(gradient))

    def run(self, loss: torch.Tensor, state: Mapping[str, torch.Tensor], held: LiveBytes) -> None:
        """Run both parts, and note what is held in between.

        Args:
            loss: The loss, whose graph is dropped.
            state: Parameters and buffers of the pass.
            held: Follows the storages.
        """
        # torch's annotation says parameters; any leaves will do.
        weights = [cast(nn.Parameter, each) for each in state.values() if each.requires_grad]
        _, groups = self._of_inputs([loss], None, self._leaves, iter(weights))
        for leaf in self._leaves:
            if leaf.grad is not None:
                self._handed[storage_of(leaf.grad)[0]] = -1
                self._met.append(reference(leaf.grad))
        self._between, held.backward_part = held.alive(), "weights"
        if self._stops:
            self._let_go(groups, held)
            return
        for group in groups:
            self._groups.append((held.num_operators, held.settle()))
            self._of_weights(iter(weights), [group])
        self._groups.append((held.num_operators, held.settle()))
        gradients = {storage_of(each.grad)[0] for each in weights if each.grad is not None}
        self._gradients = [made for key, made in held.alive().items() if key in gradients]

    def _let_go(self, groups: list[dict[str, Any]], held: LiveBytes) -> None:
        """Drop the groups of weights from the last place on, as if no stage had held what leads to them alone."""
        behind = len(self._blocks)
        places = {id(each): place for block, place in self._places.items() for each in block.parameters()}

        def first(group: dict[str, Any]) -> int:
            return min(places.get(id(node.variable), behind) for node in group["params"])

        for place in reversed(range(behind)):
            groups[:] = [group for group in groups if first(group) <= place]
            self._left[place] = {*held.alive()}

    def tails(self, saved: SavedTensors) -> dict[int, int]:
        """Return by places the bytes saved there that are free between the parts where a stage ends with the place."""
        found = dict.fromkeys(self._left, 0)
        for key in self._between.keys() - saved.weights - saved.given.keys():
            place = min(saved.places.get(key, {-1}))
            if place in found and key not in self._left[place]:
                found[place] += saved.sizes[key]
        return found

    def found(self, held: LiveBytes, saved: SavedTensors) -> dict[str, Any]:
        """Return what the pass was run for, by the name in its record."""
        return {"tails": self.tails(saved)} if self._stops else {"parts": self.by_place(held, saved)}

    def by_place(self, held: LiveBytes, saved: SavedTensors) -> dict[int, SplitBackward]:
        """Return what every place from the first block on holds.

        Args:
            held: The storages of the pass.
            saved: What its forward saved.
        """
        kept, received = self._made_between(held)
        freed: defaultdict[int, int] = defaultdict(int)
        for key, places in saved.places.items():
            if key not in self._between and key not in saved.weights and key not in saved.given:
                freed[min(places)] += saved.sizes[key]
        inputs, cut = self._first_part(held, saved, kept, received)
        weights, change = self._second_part(held)
        return {
            place: SplitBackward(
                outermost_instants(inputs[place]),
                outermost_instants(cut[place]),
                kept[place],
                received[place],
                freed[place],
                outermost_instants(weights[place]) if place in weights else (Instant(0, 0, 0),),
                # Behind the last weights all blocks let go of what is left of them, and nothing follows.
                change[place] if place < len(self._blocks) else 0,
            )
            for place in sorted(inputs)
            if place >= 0
        }

    def _made_between(self, held: LiveBytes) -> tuple[dict[int, int], dict[int, int]]:
        """Return by places the bytes of gradients that are kept, and of those of their results, made behind them."""
        kept: defaultdict[int, int] = defaultdict(int)
        received: defaultdict[int, int] = defaultdict(int)
        for key, (operator, size) in self._between.items():
            moment = held.moments[operator]
            if moment.during == "backward" and key in self._handed:
                received[self._handed[key]] += size
            elif moment.during == "backward":
                kept[moment.place] += size
        return kept, received

    def _first_part(
        self, held: LiveBytes, saved: SavedTensors, kept: Mapping[int, int], received: Mapping[int, int]
    ) -> tuple[dict[int, set[Instant]], dict[int, set[Instant]]]:
        last = max(moment.place for moment in held.moments)
        unsaved = [made for key, made in self._between.items() if key not in saved.sizes]
        left = sum(size for operator, size in unsaved if held.moments[operator].during == "forward")
        before = left + sum(saved.kept_by_place().values())
        inputs: defaultdict[int, set[Instant]] = defaultdict(set)
        cut: defaultdict[int, set[Instant]] = defaultdict(set)
        for place, during, most, behind in held.moments[: self._groups[0][0]]:
            if during == "backward" or (during == "loss" and place == last):
                later = sum(size for each in (kept, received) for other, size in each.items() if other > place)
                inputs[place].add(Instant(most - before - later, 0, 0))
                cut[place].add(Instant(most - before - sum(behind.values()), 0, 0))
        return inputs, cut

    def _second_part(self, held: LiveBytes) -> tuple[dict[int, set[Instant]], dict[int, int]]:
        weights: defaultdict[int, set[Instant]] = defaultdict(set)
        change: defaultdict[int, int] = defaultdict(int)
        done: defaultdict[int, int] = defaultdict(int)  # bytes of gradients of each place's weights
        before = 0  # of the group before
        for (start, level), (end, level_behind) in itertools.pairwise(self._groups):
            if all(each.during != "weights" for each in held.moments[start:end]):
                continue
            place = next(each.place for each in held.moments[start:end] if each.during == "weights")
            made = [(operator, size) for operator, size in self._gradients if start <= operator < end]
            for operator in range(start, end):
                own = sum(size for at, size in made if at <= operator)
                beside = held.moments[operator].held - level - own + change[place]
                # torch drops the gradients of a group when it has those of the next.
                still = min(before, done[place])
                weights[place].add(Instant(beside, own + still, done[place] - still))
            new = sum(size for _, size in made)
            change[place] += level_behind - level - new
            done[place] += new
            before = new
        return weights, change
