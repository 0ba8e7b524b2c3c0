"""Prove a split on one block: run every rank's part, forward and backward, against the whole block.

[Note: proof of a split]
Ranks run one after the other in one process. What they would exchange is replaced by what the whole block has at that
place: a row layer returns the whole block's output, a column layer's input gets the whole block's gradient, while each
rank's own contribution is noted. Then the contributions must add up to the whole, outputs and gradients must be the
whole's or parts of them. A split that passes computes the same block, whatever its code does with sizes and heads.
Weights and inputs are random, so that nothing (a bias of zero, a norm of one) hides an error. Running single blocks and
comparing tensors is in ``block_trials.py``.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import nn

from meshwright.methods.tensor.block_trials import (
    Adjustment,
    BlockCall,
    Exchanged,
    Refuted,
    adjusted,
    close,
    evaluating,
    exchanging,
    largest,
    random_state,
    reason_of,
    split_dim,
    total,
)
from meshwright.methods.tensor.split_plan import WIDE_NORM, PlannedLayer, norm_in_parts
from meshwright.nn import call_with
from meshwright.runtime.torch_internals.pytree import tree_leaves


def part_of(tensor: torch.Tensor, dim: int, parts: Sequence[int], rank: int, ranks: int) -> torch.Tensor:
    """Return the part of a whole tensor that one rank holds along ``dim``; a view if nothing is fused in it.

    Args:
        tensor: Whole, in the model's own order.
        dim: The dim that is divided.
        parts: Sizes of the tensors fused along it, such as queries, keys and values; empty if there is one.
        rank: Index of the rank.
        ranks: Size of the axis; divides every size.
    """
    if len(parts) < 2:
        return tensor.chunk(ranks, dim)[rank]
    return torch.cat([part.chunk(ranks, dim)[rank] for part in tensor.split(list(parts), dim)], dim)


# --- Hidden states among a module's arguments and outputs

TOKENS_DIM = 1
Where = int | str
"""Position or name of a module's argument."""


def is_hidden(value: Any) -> bool:
    """Return whether a value has the form of a hidden state: floating point, (batch, tokens, features)."""
    return isinstance(value, torch.Tensor) and value.dim() == 3 and value.is_floating_point()


def hidden_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Where | None:
    """Find the argument that is the hidden state: the first of its form; None without one."""
    every: list[tuple[Where, Any]] = [*enumerate(args), *kwargs.items()]
    return next((where for where, value in every if is_hidden(value)), None)


def first_hidden(leaves: Any) -> int | None:
    """Return the place of the hidden state among the leaves of a tree; None without one."""
    return next((place for place, leaf in enumerate(tree_leaves(leaves)) if is_hidden(leaf)), None)


def with_argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a module with ``change`` applied to its hidden state."""
    where = hidden_argument(args, kwargs)
    if where is None:
        return args, kwargs
    if isinstance(where, int):
        return (*args[:where], change(args[where]), *args[where + 1 :]), kwargs
    return args, {**kwargs, where: change(kwargs[where])}


# --- Exchanges of a split whose blocks pass on a part of the tokens


class _Exchange(torch.autograd.Function):
    """Replaces a tensor by ``value``; backward passes the gradient to ``note`` and continues with its result."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, value: torch.Tensor, note: Callable[..., torch.Tensor]) -> torch.Tensor:
        ctx.note = note
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return ctx.note(gradient), None, None


class SequenceTrial:
    """Replaces the token exchanges of a block: gathers before modules that need all tokens, scatters of row layers.

    Args:
        scopes: Paths of the modules that take all tokens.
        ranks: Size of the axis.
    """

    def __init__(self, scopes: tuple[str, ...], ranks: int) -> None:
        self._scopes, self._ranks = scopes, ranks
        # Of the whole block: inputs of scopes, and gradients of row layers' outputs.
        self._inputs: dict[tuple[str, int], torch.Tensor] = {}
        self._slopes: dict[tuple[str, int], torch.Tensor] = {}

    @contextlib.contextmanager
    def exchanging(
        self, block: nn.Module, layers: list[PlannedLayer], own: Exchanged, whole: Exchanged | None, rank: int
    ) -> Iterator[None]:
        """Replace the exchanges of one run inside; the first run is that of the whole block."""
        hooks, stack = [], contextlib.ExitStack()
        for path in self._scopes:
            hook = self._gathering(path, own, whole, rank)
            hooks.append(block.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True, prepend=True))
        for layer in layers:
            if layer.style.output == "all_reduce":
                hooks.append(layer.module.register_forward_hook(self._scattering(layer.path, own, whole, rank)))
            if layer.style is WIDE_NORM:
                total = self._adding_up(layer.path, own, whole)
                normed = norm_in_parts(layer.module, 1 if whole is None else self._ranks, total)
                stack.enter_context(mock.patch.object(layer.module, "forward", normed))
        try:
            with stack:
                yield
        finally:
            for each in hooks:
                each.remove()

    def _part(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        return tensor.chunk(self._ranks, TOKENS_DIM)[rank]

    def _gathering(self, path: str, own: Exchanged, whole: Exchanged | None, rank: int) -> Callable[..., Any]:
        count = 0

        def gather(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal count
            key, count = (path, count), count + 1

            def note(gradient: torch.Tensor) -> torch.Tensor:
                own.gradients[key] = gradient.detach()
                return gradient if whole is None else self._part(whole.gradients[key], rank)

            def change(tensor: torch.Tensor) -> torch.Tensor:
                if whole is None:
                    self._inputs[key] = tensor.detach().clone()
                elif not close(tensor, self._part(self._inputs[key], rank), 0.0):
                    raise Refuted(f"{path} does not get a part of the tokens")
                return _Exchange.apply(tensor, self._inputs[key], note)

            if hidden_argument(args, kwargs) is None:
                raise Refuted(f"{path} takes no hidden state")
            return with_argument(args, kwargs, change)

        return gather

    def _adding_up(self, path: str, own: Exchanged, whole: Exchanged | None) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the sum of a norm's squares over the ranks, and in backward of its gradient."""
        count = 0

        def total(part: torch.Tensor) -> torch.Tensor:
            nonlocal count
            key, count = (path, count), count + 1
            own.values[key] = part.detach().clone()
            if whole is not None and part.shape != whole.values[key].shape:
                raise Refuted(f"{path} gets other tokens")

            def note(gradient: torch.Tensor) -> torch.Tensor:
                own.gradients[key] = gradient.detach()
                return gradient if whole is None else whole.gradients[key]

            return _Exchange.apply(part, part.detach() if whole is None else whole.values[key], note)

        return total

    def _scattering(self, path: str, own: Exchanged, whole: Exchanged | None, rank: int) -> Callable[..., Any]:
        count = 0

        def scatter(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            nonlocal count
            key, count = (path, count), count + 1
            own.values[key] = output.detach().clone()

            def note(gradient: torch.Tensor) -> torch.Tensor:
                if whole is None:
                    self._slopes[key] = gradient.detach()
                    return gradient
                if not close(gradient, self._part(self._slopes[key], rank), 0.0):
                    raise Refuted(f"the gradient of the output of {path} is not that of the whole block")
                return self._slopes[key]

            if whole is None:
                return _Exchange.apply(output, output.detach(), note)
            if output.shape != whole.values[key].shape:
                raise Refuted(f"the output of {path} has another shape")
            return _Exchange.apply(output, self._part(whole.values[key], rank), note)

        return scatter


# --- The proof

_SEED = 7


@dataclass
class _Run:
    """Results of one forward and backward pass."""

    outputs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor | None]  # of parameters
    inputs: list[torch.Tensor | None]  # gradients of the arguments
    exchanged: Exchanged


class BlockProof:
    """Compares splits of a block with the whole block, on one call; see [Note: proof of a split].

    Args:
        block: A plain module; its weights are not used, and it is left as it was.
        call: How the model calls it.
        ranks: Size of the tensor axis.
    """

    def __init__(self, block: nn.Module, call: BlockCall, ranks: int) -> None:
        self.block, self.call, self.ranks = block, call, ranks
        self.state = random_state(block, _SEED)
        for name, _ in block.named_parameters():
            self.state[name].requires_grad_()
        self._only_values = False
        self._known: dict[tuple[tuple[str, str], ...], _Run] = {}  # last run of the whole block, by the layers watched
        self.call = self._most_telling(call)

    def _most_telling(self, call: BlockCall) -> BlockCall:
        """Return the call in which most weights get a gradient: if a mask hides all tokens, any split looks right."""
        calls = call.filled()
        matrices = sum(tensor.dim() > 1 for tensor in self.state.values() if tensor.requires_grad)
        best, most = call, -1
        for each in calls if len(calls) > 1 else ():
            seen = self._seen(each)
            best, most = (each, seen) if seen > most else (best, most)
            if most == matrices:
                break
        return best

    def _seen(self, call: BlockCall) -> int:
        """Count the weights that get a gradient in a call of the whole block; -1 if the call fails."""
        try:
            gradients = self._run([], self.state, call.values(), None, []).gradients.values()
        except Refuted:
            return -1
        return sum(g is not None and g.dim() > 1 and bool(g.isfinite().all() and g.any()) for g in gradients)

    def num_outputs(self) -> int:
        """Count the tensors that the block returns."""
        return len(self._run([], self.state, self.call.values(), None, []).outputs)

    def given(self, split: tuple[tuple[int, int], ...]) -> BlockProof:
        """Return a copy with other inputs split; weights and the run of the whole block are shared."""
        other = copy.copy(self)
        other.call = replace(self.call, split=split)
        return other

    def of_values(self) -> BlockProof:
        """Return a copy without backward: it takes a third of the time, and refutes hypotheses but proves none."""
        other = copy.copy(self)
        other._only_values, other._known = True, {}
        return other

    def holds(
        self, layers: list[PlannedLayer], adjustments: tuple[Adjustment, ...], sequence: SequenceTrial | None = None
    ) -> tuple[set[str], list[int | None]]:
        """Run every rank of a split, and compare with the whole block.

        Args:
            layers: The layers that are split; paths within the block.
            adjustments: Attributes that are divided with them.
            sequence: Lets the ranks work on parts of the tokens between the layers.

        Returns:
            The parameters that stay whole and whose gradients must be summed over the ranks; and for every tensor that
            the block returns the dim in which it is split (None: whole).

        Raises:
            Refuted: When some rank does not compute its part of the whole.
        """
        whole = self._whole(layers, sequence)
        dims: list[int | None] = [None] * len(whole.outputs)
        runs = []
        for rank in range(self.ranks):
            with adjusted(self.block, adjustments):
                run = self._run(layers, self._parts(layers, rank), self._inputs(rank), whole, dims, rank, sequence)
            runs.append(run)
        _check_exchanged(whole.exchanged, [run.exchanged for run in runs])
        self._check_inputs(whole, runs)
        return self._summed(layers, whole, runs), dims

    def _whole(self, layers: list[PlannedLayer], sequence: SequenceTrial | None) -> _Run:
        """Run the whole block; hypotheses about the same layers share the result."""
        if sequence is not None:
            return self._run(layers, self.state, self.call.values(), None, [], sequence=sequence)
        watched = tuple((layer.path, layer.style.name) for layer in layers)
        if watched not in self._known:
            self._known.clear()
            self._known[watched] = self._run(layers, self.state, self.call.values(), None, [])
        return self._known[watched]

    def _parts(self, layers: list[PlannedLayer], rank: int) -> dict[str, torch.Tensor]:
        state = dict(self.state)
        for layer in layers:
            for name, _, dim in layer.parameters():
                key = f"{layer.path}.{name}"
                if dim is not None:
                    state[key] = _leaf(part_of(state[key], dim, layer.parts, rank, self.ranks))
                elif layer.style.output == "all_reduce" and rank > 0:
                    state[key] = _leaf(torch.zeros_like(state[key]))  # a bias is added once, on the first rank
        return state

    def _inputs(self, rank: int) -> list[Any]:
        leaves = self.call.values()
        for index, dim in self.call.split:
            leaves[index] = _leaf(leaves[index].chunk(self.ranks, dim)[rank], leaves[index].requires_grad)
        return leaves

    def _run(
        self, layers: list[PlannedLayer], state: dict[str, torch.Tensor], leaves: list[Any], whole: _Run | None,
        dims: list[int | None], rank: int = 0, sequence: SequenceTrial | None = None,
    ) -> _Run:  # fmt: skip
        exchanged = Exchanged()
        # Clones: a block may overwrite what it is given.
        args, kwargs = self.call.tree([leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])
        of_whole = whole.exchanged if whole else None
        if sequence is None:
            context = exchanging(layers, exchanged, of_whole)
        else:
            context = sequence.exchanging(self.block, layers, exchanged, of_whole, rank)
        with evaluating(self.block), context:
            try:
                result = call_with(self.block, state, args, kwargs)
            except Refuted:
                raise
            except Exception as error:  # a block's code may do anything with sizes
                raise Refuted(reason_of(error)) from error
            outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            if whole is not None:
                for index, dim in enumerate(self._output_dims(outputs, whole.outputs, rank)):
                    dims[index] = dim
            if not self._only_values:
                self._backward(outputs, dims, rank)
        gradients = {name: tensor.grad for name, tensor in state.items() if tensor.requires_grad}
        inputs = [leaf.grad if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        for tensor in (*state.values(), *leaves):
            if isinstance(tensor, torch.Tensor):
                tensor.grad = None
        return _Run([output.detach() for output in outputs], gradients, inputs, exchanged)

    def _output_dims(self, outputs: list[torch.Tensor], expected: list[torch.Tensor], rank: int) -> list[int | None]:
        if len(outputs) != len(expected):
            raise Refuted(f"it returns {len(outputs)} tensors instead of {len(expected)}")
        return [split_dim(o, e, rank, self.ranks) for o, e in zip(outputs, expected, strict=True)]

    def _backward(self, outputs: list[torch.Tensor], dims: list[int | None], rank: int) -> None:
        """Run backward from the outputs with fixed random gradients; of a split output, with rank r's part of one."""
        generator = torch.Generator().manual_seed(_SEED + 1)
        pairs = []
        for index, output in enumerate(outputs):
            dim = dims[index] if dims else None
            shape = [size * self.ranks if d == dim else size for d, size in enumerate(output.shape)]
            direction = torch.randn(shape, generator=generator)
            if output.requires_grad:
                pairs.append((output, direction if dim is None else direction.chunk(self.ranks, dim)[rank]))
        if not pairs:
            raise Refuted("no output of it has a gradient")
        torch.autograd.backward([output for output, _ in pairs], [slope.to(output.dtype) for output, slope in pairs])

    def _check_inputs(self, whole: _Run, runs: list[_Run]) -> None:
        split = dict(self.call.split)
        scale = largest(whole.inputs)
        for index, expected in enumerate(whole.inputs):
            if expected is None:
                continue
            for rank, run in enumerate(runs):
                own = expected.chunk(self.ranks, split[index])[rank] if index in split else expected
                if not close(run.inputs[index], own, scale):
                    raise Refuted("the gradient of an input of the block comes out differently on every rank")

    def _summed(self, layers: list[PlannedLayer], whole: _Run, runs: list[_Run]) -> set[str]:
        split = {f"{layer.path}.{n}": (dim, layer.parts) for layer in layers for n, _, dim in layer.parameters()}
        scale = largest(list(whole.gradients.values()))
        summed = set()
        for name, expected in whole.gradients.items():
            dim, parts = split.get(name, (None, ()))
            is_seen = expected is not None and bool(expected.any())
            if not is_seen and not self._only_values and dim is not None and name.endswith("weight"):
                raise Refuted(f"nothing that it returns depends on {name}, so no split of it can be tried out")
            if expected is None:
                continue
            found = [run.gradients[name] for run in runs]
            if all(
                close(each, expected if dim is None else part_of(expected, dim, parts, rank, self.ranks), scale)
                for rank, each in enumerate(found)
            ):
                continue
            if dim is None and close(total(found, expected), expected, scale):
                summed.add(name)
                continue
            raise Refuted(f"the gradient of {name} is not that of the whole block")
        return summed


def _leaf(tensor: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(requires_grad)


def _check_exchanged(whole: Exchanged, ranks: list[Exchanged]) -> None:
    for what, of in (("output", lambda e: e.values), ("gradient of the input", lambda e: e.gradients)):
        scale = largest(list(of(whole).values()))
        for key, expected in of(whole).items():
            parts = [of(rank).get(key) for rank in ranks]
            if not close(total(parts, expected), expected, scale):
                raise Refuted(f"the {what} of {key[0]} is not the sum of its parts")
