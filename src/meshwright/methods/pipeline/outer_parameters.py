"""Find which parameters outside the blocks each block depends on, and place them on the ranks of a pipeline.

One forward pass over fake tensors finds the dependencies. The autograd graph is cut before every block but the first:
its hidden state is replaced by a detached copy. So the graph behind a block's output reaches the parameters that this
block uses, not those of earlier blocks.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from meshwright.errors import ModelError
from meshwright.methods.pipeline.stage_cut import Cut, Outside
from meshwright.nn import FakeTensors, is_on_meta, run_with
from meshwright.runtime.torch_internals.pytree import tree_flatten, tree_leaves, tree_unflatten


@dataclass
class Dataflow:
    """Data flow between the blocks of a model and the parameters outside them, by name."""

    uses: list[frozenset[str]] = field(default_factory=list)  # per block: the outside parameters it depends on
    tail: frozenset[str] = frozenset()  # those used after the last block
    late: frozenset[str] = frozenset()  # those whose modules run after the last block only, or never
    boundary_bytes: int = 0  # hidden state between two blocks


class _Run:
    """Hooks that cut the autograd graph between blocks and follow each part back to parameters."""

    def __init__(self, model: nn.Module, blocks: list[nn.Module], names: dict[int, str]) -> None:
        self._model, self._blocks, self._names = model, blocks, names
        self._early: set[nn.Module] = set()  # modules that began to run before the last block had finished
        self._outputs: list[Any] = []  # outputs of the block that ran last
        self.flow = Dataflow()

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        """Register the hooks inside."""
        hooks = []
        for index, block in enumerate(self._blocks):
            hooks.append(block.register_forward_pre_hook(self._before(index), with_kwargs=True))
            hooks.append(block.register_forward_hook(self._after))
        hooks += [module.register_forward_pre_hook(self._note) for module in self._model.modules()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def parameters_of(self, tensors: Iterable[Any]) -> frozenset[str]:
        """Return the names of the parameters that tensors depend on."""
        nodes = [t.grad_fn or _accumulator(t) for t in tensors if isinstance(t, torch.Tensor) and t.requires_grad]
        seen, found = set(nodes), set()
        while nodes:
            node = nodes.pop()
            name = self._names.get(id(getattr(node, "variable", None)))
            if name is not None:
                found.add(name)
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    nodes.append(following)
        return frozenset(found)

    def _note(self, module: nn.Module, args: Any) -> None:
        if len(self.flow.uses) < len(self._blocks):
            self._early.add(module)

    def _before(self, index: int) -> Callable[..., Any]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if index != len(self.flow.uses):
                raise ModelError(
                    "pipeline_parallel: the model does not run its blocks one after the other",
                    expected="a forward that calls every block once, in the order of the list",
                    got=f"block {index} where block {len(self.flow.uses)} comes next",
                    fix="name another list with blocks=…",
                )
            return self._cut(args, kwargs) if index else None

        return enter

    def _cut(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        carried = carried_positions(self._outputs, leaves)
        fresh = {position: leaves[position].detach() for position in set(carried.values())}
        self.flow.boundary_bytes = sum(_bytes(leaf) for leaf in fresh.values())
        for tensor in fresh.values():
            tensor.requires_grad_(tensor.is_floating_point())
        return tree_unflatten([fresh.get(position, leaf) for position, leaf in enumerate(leaves)], spec)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        self._outputs = tree_leaves(output)
        self.flow.uses.append(self.parameters_of(self._outputs))

    def finish(self, loss: Any) -> Dataflow:
        """Return the data flow after the pass, with the parameters that the loss uses."""
        if len(self.flow.uses) != len(self._blocks):
            raise ModelError(
                "pipeline_parallel: the model does not run all its blocks",
                expected=f"{len(self._blocks)} calls",
                got=f"{len(self.flow.uses)}",
                fix="name another list with blocks=…",
            )
        self.flow.late = frozenset(
            f"{path}.{name}" if path else name
            for path, module in self._model.named_modules()
            for name, _ in module.named_parameters(recurse=False)
            if module not in self._early
        )
        every = self.parameters_of(tree_leaves(loss))
        # The graph behind the last block ends at its inputs, so what the loss uses besides comes after the block.
        self.flow.tail = every - self.flow.uses[-1]
        self.flow.uses[-1] |= every
        return self.flow


def carried_positions(outputs: list[Any], leaves: list[Any]) -> dict[int, int]:
    """Find the hidden state: map places of a block's outputs to the places of the next block's inputs.

    Args:
        outputs: The block's outputs, flattened.
        leaves: The next block's inputs, flattened; of several that are one tensor, the first counts.

    Raises:
        ModelError: When no output is passed on unchanged.
    """
    carried = {}
    for place, output in enumerate(outputs):
        if isinstance(output, torch.Tensor):
            position = next((at for at, leaf in enumerate(leaves) if leaf is output), None)
            if position is not None:
                carried[place] = position
    if not carried:
        got = next((type(leaf).__name__ for leaf in outputs if leaf is not None), "nothing")
        raise ModelError(
            "pipeline_parallel: a block's output is not the next block's input",
            expected="a hidden state of tensors that goes from block to block as it is: x = block(x)",
            got=f"an output of type {got} that the model changes, or that is no tensor",
            fix="let the blocks do what the model does between them, such as adding the residual",
        )
    return carried


def trace_blocks(
    model: nn.Module, blocks: list[nn.Module], inputs: Any, forward: Callable[[nn.Module, Any], Any]
) -> Dataflow:
    """Run a model over fake tensors and find which outside parameters each block uses.

    Args:
        model: A plain module; it is not changed.
        blocks: The modules of its block list.
        inputs: The model's input of one micro-batch.
        forward: ``forward(model, inputs)`` computes the loss.

    Raises:
        ModelError: When the blocks do not run in order, pass no tensor on, or one is listed several times.
        Exception: Whatever the model raises when it runs over fake tensors.
    """
    _refuse_repeated(blocks)
    # Tensors on meta and the input's would be on two devices.
    fakes = FakeTensors(torch.device("cpu") if is_on_meta(model) else None)
    state = {name: fakes.like(tensor) for name, tensor in model.named_buffers()}
    inside = {parameter for block in blocks for parameter in block.parameters()}
    names = {}
    for name, parameter in model.named_parameters():
        tensor = state[name] = fakes.like(parameter)
        if tensor.is_floating_point():
            tensor.requires_grad_()  # frozen ones too: the ranks that use them need them as well
        if parameter not in inside:
            names[id(tensor)] = name
    run = _Run(model, blocks, names)
    fake_inputs = fakes.like_all(inputs)
    with fakes.running(), torch.enable_grad(), run.hooked():
        return run.finish(run_with(forward, model, state, fake_inputs))


def _refuse_repeated(blocks: list[nn.Module]) -> None:
    first = {block: index for index, block in reversed(list(enumerate(blocks)))}
    repeated = [index for index, block in enumerate(blocks) if first[block] != index]
    if repeated:
        raise ModelError(
            "pipeline_parallel: the list holds one block several times, and stages cannot share it",
            expected="a block of its own at every place of the list",
            got=f"block {first[blocks[repeated[0]]]} again as block {repeated[0]}",
            fix="build each block anew; or shard the model without a pipeline, which keeps shared blocks as they are",
        )


def _accumulator(leaf: torch.Tensor) -> Any:
    return leaf.view_as(leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def parameter_costs(model: nn.Module, blocks: list[nn.Module], flow: Dataflow | None) -> list[int]:
    """Estimate the time of every block by its parameters: a matrix costs in proportion to its elements.

    Parameters used before the blocks count with the first, those used after them with the last. Looking up an embedding
    costs next to nothing.
    """
    costs = [sum(p.numel() for p in block.parameters()) for block in blocks]
    if flow is None:
        return costs
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    looked_up = {name for name, p in model.named_parameters() if id(p) in tables}
    costs[0] += sum(sizes[name] for name in flow.uses[0] - looked_up - (flow.tail if len(blocks) == 1 else set()))
    costs[-1] += sum(sizes[name] for name in flow.tail)
    return costs


# --- Placing what lies outside the blocks
#
# A parameter outside the blocks is trained on the ranks whose blocks depend on it. Other ranks still run the code
# around it (see [Note: splicing] in splice.py), so something must take its place there.

Replacement = Literal["gone", "stands in", "buffer"]
"""Name what takes a parameter's place on a rank that does not train it.

It is nothing, where its module does not run there; a module that returns a tensor of the right shape
(:data:`STAND_INS`); or a buffer with its first value."""

STAND_INS = (nn.Embedding.forward, nn.LayerNorm.forward, nn.RMSNorm.forward)
"""Forwards whose output has a known shape, so that it can be replaced without the parameters."""


def replacements_of(
    model: nn.Module, parameter: nn.Parameter, late: frozenset[str]
) -> Iterator[tuple[nn.Module, str, Replacement]]:
    """Yield each module that owns a parameter, its name there, and what replaces it where it is not trained.

    Args:
        model: The whole model.
        parameter: One outside the blocks.
        late: Names of parameters whose modules run after the blocks only.
    """
    for path, module in model.named_modules():
        for name, own in module.named_parameters(recurse=False):
            if own is not parameter:
                continue
            if (f"{path}.{name}" if path else name) in late:
                yield module, name, "gone"
            elif type(module).forward in STAND_INS:
                yield module, name, "stands in"
            else:
                yield module, name, "buffer"


def place_stages(
    model: nn.Module, path: str, bounds: tuple[int, ...], ranks: tuple[int, ...], flow: Dataflow | None
) -> Cut:
    """Make the cut with these stages: decide which ranks hold the parameters outside the blocks.

    Args:
        model: The whole model.
        path: Path of the list of blocks.
        bounds: Stage s computes blocks ``bounds[s]`` … ``bounds[s + 1] - 1``.
        ranks: The pipeline rank of every stage.
        flow: What each block depends on; None: unknown, so every rank trains every parameter outside the blocks.
    """
    blocks = list(model.get_submodule(path).children())
    owners = [ranks[stage] for stage, (first, end) in enumerate(itertools.pairwise(bounds)) for _ in range(first, end)]
    outside = tuple(_place_outside(model, blocks, owners, flow))
    if flow is None:
        return Cut(path, bounds, ranks, outside)
    return Cut(path, bounds, ranks, outside, flow.late, flow.boundary_bytes)


def _place_outside(
    model: nn.Module, blocks: list[nn.Module], owners: list[int], flow: Dataflow | None
) -> Iterator[Outside]:
    inside = {parameter for block in blocks for parameter in block.parameters()}
    everyone = set(owners)
    for name, parameter in model.named_parameters():
        if parameter in inside:
            continue
        if flow is None:
            yield Outside(name, tuple(sorted(everyone)))
            continue
        # A parameter that nothing uses must be stored somewhere: on the last rank.
        trained = {rank for rank, uses in zip(owners, flow.uses, strict=True) if name in uses} or {owners[-1]}
        needs_buffer = any(kind == "buffer" for _, _, kind in replacements_of(model, parameter, flow.late))
        yield Outside(name, tuple(sorted(trained)), tuple(sorted(everyone - trained)) if needs_buffer else ())
