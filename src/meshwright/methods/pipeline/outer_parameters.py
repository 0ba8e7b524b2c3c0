"""Find which parameters outside the blocks each block depends on, in one forward pass over fake tensors.

The autograd graph is cut before every block but the first: its hidden state is replaced by a detached copy. So the
graph behind a block's output reaches the parameters that this block uses, not those of earlier blocks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshwright.errors import ModelError
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
