"""Run single blocks on random values as the model calls them, and compare the results."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from meshwright.errors import ModelError
from meshwright.methods.tensor.split_plan import LINEAR, PlannedLayer
from meshwright.nn import find_blocks, run_with
from meshwright.nn.batches import map_tree


@dataclass(frozen=True)
class SampleRun:
    """How to run the model once.

    Args:
        inputs_of: ``inputs_of(samples)`` returns a model input of that many samples; None when there is none to be had.
        forward: ``forward(model, inputs)``.
    """

    inputs_of: Callable[[int], Any]
    forward: Callable[[nn.Module, Any], Any]


# --- Whether tensors of a trial are equal, up to rounding.

_TOLERANCE = 1e-3  # of the norm; a wrong split is off by as much as the values themselves
_NOISE = 1e-5  # of the largest gradient: what is zero in exact arithmetic, such as a key bias's


class Refuted(Exception):
    """A split does not compute what the whole block computes; says where."""


def split_dim(output: torch.Tensor, expected: torch.Tensor, rank: int, ranks: int) -> int | None:
    """Return the dim in which a rank has its part of what is expected; None where it has the whole.

    Raises:
        Refuted: When it has neither.
    """
    if output.shape == expected.shape and close(output, expected, 0.0):
        return None
    for dim, size in enumerate(expected.shape):
        if size == output.shape[dim] * ranks if dim < output.dim() else False:
            part = expected.chunk(ranks, dim)[rank]
            if part.shape == output.shape and close(output, part, 0.0):
                return dim
    raise Refuted("an output of the block is neither the whole nor a part of it")


def total(parts: Iterable[torch.Tensor | None], like: torch.Tensor) -> torch.Tensor:
    """Return the sum of parts; nan where one has another shape."""
    present = [part for part in parts if part is not None]
    same = [part for part in present if part.shape == like.shape]
    return torch.stack(same).sum(0) if same and len(same) == len(present) else torch.full_like(like, torch.nan)


def close(value: torch.Tensor | None, expected: torch.Tensor, scale: float) -> bool:
    """Return whether a value is what is expected; ``scale`` is how large such values are."""
    if value is None or value.shape != expected.shape:
        return False
    if not expected.is_floating_point():
        return torch.equal(value, expected)
    apart = torch.linalg.vector_norm(value.detach() - expected)
    return bool(apart <= _TOLERANCE * torch.linalg.vector_norm(expected) + _NOISE * scale)


def largest(tensors: Iterable[torch.Tensor | None]) -> float:
    """Return the largest norm."""
    return max((torch.linalg.vector_norm(tensor).item() for tensor in tensors if tensor is not None), default=0.0)


# --- Running one block with random values, and what is exchanged in it: the parts that a proof is made of.

_SEED = 5


@dataclass(frozen=True)
class Adjustment:
    """An attribute of a module that counts what a rank has only a part of."""

    path: str
    name: str
    value: int


@dataclass(frozen=True)
class BlockCall:
    """The arguments of one block: a tree whose tensors tell shape, type and whether they have a gradient."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    split: tuple[tuple[int, int], ...] = ()  # leaves that an earlier block gives split, and their dims
    fill: tuple[int, bool] = (0, True)  # what integers and booleans are: nobody can tell masks and indices apart

    def values(self) -> list[Any]:
        """Random leaves, integers and booleans as ``fill`` says. The same at every call."""
        generator = torch.Generator().manual_seed(_SEED)
        return [_random(leaf, generator, *self.fill) for leaf in tree_leaves((self.args, self.kwargs))]

    def filled(self) -> list[BlockCall]:
        """Return the same with other integers and booleans, where there are any.

        A mask may hide everything, or nothing.
        """
        leaves = tree_leaves((self.args, self.kwargs))
        kinds = {leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_floating_point()}
        integers = (0, 1) if kinds - {torch.bool} else (0,)
        booleans = (True, False) if torch.bool in kinds else (True,)
        return [replace(self, fill=fill) for fill in itertools.product(integers, booleans)]

    def tree(self, leaves: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments made of leaves."""
        args, kwargs = tree_unflatten(leaves, tree_flatten((self.args, self.kwargs))[1])
        return args, kwargs


def _random(leaf: Any, generator: torch.Generator, integer: int, boolean: bool) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if not leaf.is_floating_point():
        return torch.full(leaf.shape, boolean if leaf.dtype == torch.bool else integer, dtype=leaf.dtype)
    values = torch.randn(leaf.shape, generator=generator)
    return values.requires_grad_(leaf.requires_grad)


@dataclass
class Exchanged:
    """What the whole block has at the places where ranks exchange something; of a rank: what it contributes."""

    values: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)  # outputs of row layers
    gradients: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)  # of inputs of column layers


class _Meet(torch.autograd.Function):
    """Identity; in backward notes the gradient and goes on with ``whole``, as an all-reduce would."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, note: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        ctx.note = note
        return tensor.clone()  # a view could not be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return ctx.note(gradient), None


@contextlib.contextmanager
def evaluating(block: nn.Module) -> Iterator[None]:
    """Without dropout; modules go back to the mode they were in."""
    training = [module for module in block.modules() if module.training]
    block.eval()
    try:
        with torch.enable_grad():
            yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def adjusted(block: nn.Module, adjustments: tuple[Adjustment, ...]) -> Iterator[None]:
    """Set attributes for a while."""
    before = [(a, getattr(block.get_submodule(a.path), a.name)) for a in adjustments]
    for adjustment in adjustments:
        setattr(block.get_submodule(adjustment.path), adjustment.name, adjustment.value)
    try:
        yield
    finally:
        for adjustment, value in before:
            setattr(block.get_submodule(adjustment.path), adjustment.name, value)


@contextlib.contextmanager
def meeting(layers: list[PlannedLayer], own: Exchanged, whole: Exchanged | None) -> Iterator[None]:
    """Let row layers give what the whole block has, and column layers' inputs the gradients that it has."""
    hooks = []
    for layer in layers:
        if layer.style.output == "all_reduce":
            hooks.append(layer.module.register_forward_hook(_giving(layer.path, own, whole)))
        elif layer.style.name in LINEAR:
            hooks.append(layer.module.register_forward_pre_hook(_taking(layer.path, own, whole), prepend=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _giving(path: str, own: Exchanged, whole: Exchanged | None) -> Callable[..., torch.Tensor]:
    def give(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        key = (path, sum(1 for known, _ in own.values if known == path))
        own.values[key] = output.detach().clone()  # it may be changed in place
        if whole is None:
            return output
        expected = whole.values.get(key)
        if expected is None or expected.shape != output.shape:
            raise Refuted(f"the output of {path} has another shape")
        return output + (expected - output).detach()

    return give


def _taking(path: str, own: Exchanged, whole: Exchanged | None) -> Callable[..., tuple[Any, ...]]:
    count = 0

    def take(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        nonlocal count
        key, count = (path, count), count + 1

        def note(gradient: torch.Tensor) -> torch.Tensor:
            own.gradients[key] = gradient.detach()
            return gradient if whole is None else whole.gradients[key]

        return (_Meet.apply(args[0], note), *args[1:])

    return take


# --- How a model calls its blocks: one forward pass over tensors without data, on a small sample.

_TOKENS = 16  # enough to tell positions apart; made a multiple of the ranks, which may cut them


@dataclass
class RecordedBlock:
    """A block and its first call."""

    path: str
    module: nn.Module
    call: BlockCall | None = None  # None: the block did not run
    given: dict[int, tuple[int, int]] = field(default_factory=dict)  # input leaf -> (earlier block, its output leaf)


def record_calls(model: nn.Module, sample: SampleRun | None, ranks: int) -> list[RecordedBlock]:
    """Run the model once over fake tensors; the model itself is not touched.

    Raises:
        ModelError: When the model has no list of blocks, there is no sample, or it does not run without data.
    """
    blocks = [RecordedBlock(path, module) for path, module in find_blocks(model)]
    if not blocks:
        children = ", ".join(f"{name} ({type(child).__name__})" for name, child in model.named_children())
        raise _unknown("the model has no list of blocks to look into", "an nn.ModuleList of layers", children)
    reasons: list[str] = []
    for inputs, forward in _tries(model, sample, ranks):
        for block in blocks:
            block.call, block.given = None, {}
        try:
            _run(model, blocks, inputs, forward)
        except Exception as error:  # a user's model may do anything; behind the blocks it does not matter
            reasons.append(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}")
        if all(block.call is not None for block in blocks):
            return blocks
    silent = [block.path for block in blocks if block.call is None]
    raise _unknown(
        f"the data flow of {silent[0]} cannot be read off",
        "a dataset or sample_batch that the model runs with",
        (reasons or ["there is no sample" if sample is None else "it does not run with the sample"])[0],
    )


def _unknown(what: str, expected: str, got: str) -> ModelError:
    return ModelError(
        f"tensor_parallel: {what}, and no plan says how its layers are split",
        expected=expected,
        got=got,
        fix="give plan={'layers.*.up': 'colwise', 'layers.*.down': 'rowwise', …} with the names of its layers; or "
        "shard it with fsdp, which needs no plan",
    )


def _tries(
    model: nn.Module, sample: SampleRun | None, ranks: int
) -> Iterator[tuple[Any, Callable[[nn.Module, Any], Any]]]:
    inputs = sample.inputs_of(2) if sample is not None else None
    if sample is not None and inputs is not None:
        yield _short(inputs, -(-_TOKENS // ranks) * ranks), sample.forward
        yield inputs, sample.forward
    dummy = getattr(model, "dummy_inputs", None)  # transformers' models bring one
    if isinstance(dummy, Mapping) and "input_ids" in dummy:
        yield dummy["input_ids"], lambda model, ids: model(input_ids=ids)


def _short(inputs: Any, tokens: int) -> Any:
    """Token ids, masks and labels cut to a few positions: a proof of a large block is a matter of seconds then."""

    def short(leaf: Any) -> Any:
        is_ids = isinstance(leaf, torch.Tensor) and leaf.dim() >= 2 and not leaf.is_floating_point()
        return leaf[:, :tokens] if is_ids else leaf

    return map_tree(short, inputs)


def _run(model: nn.Module, blocks: list[RecordedBlock], inputs: Any, forward: Callable[[nn.Module, Any], Any]) -> None:
    fake = FakeTensorMode(allow_non_fake_inputs=True)

    def converted(tensor: torch.Tensor) -> torch.Tensor:
        return fake.from_tensor(tensor.detach()).to("cpu")

    with warnings.catch_warnings(), fake:
        warnings.simplefilter("ignore")
        state = {}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            trains = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
            state[name] = converted(tensor).requires_grad_(trains)
        fake_inputs = map_tree(lambda leaf: converted(leaf) if isinstance(leaf, torch.Tensor) else leaf, inputs)
        with _recording(blocks), torch.enable_grad():
            run_with(forward, model, state, fake_inputs)


@contextlib.contextmanager
def _recording(blocks: list[RecordedBlock]) -> Iterator[None]:
    made: dict[int, tuple[int, int]] = {}  # tensor -> the block that returned it, and its place in the output
    alive: list[Any] = []  # ids of tensors mean something while these live
    hooks = []

    def enter(index: int) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            block = blocks[index]
            if block.call is None:
                args, kwargs = _without_caches((args, kwargs))
                leaves = tree_leaves((args, kwargs))
                block.given = {i: made[id(leaf)] for i, leaf in enumerate(leaves) if id(leaf) in made}
                block.call = BlockCall(*tree_map(_described, (args, kwargs)))

        return note

    def leave(index: int) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
            alive.extend(tensors)
            made.update({id(tensor): (index, place) for place, tensor in enumerate(tensors)})

        return note

    for index, block in enumerate(blocks):
        hooks.append(block.module.register_forward_pre_hook(enter(index), with_kwargs=True, prepend=True))
        hooks.append(block.module.register_forward_hook(leave(index)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _without_caches(arguments: Any) -> Any:
    """Without the caches of keys and values that a model makes for generation."""

    def is_cache(leaf: Any) -> bool:
        return type(leaf).__name__.endswith("Cache")

    args, kwargs = tree_map(lambda leaf: None if is_cache(leaf) else leaf, arguments, is_leaf=is_cache)
    return args, {key: False if key == "use_cache" else value for key, value in kwargs.items()}


def _described(leaf: Any) -> Any:
    """A tensor without memory that has the shape, type and need of a gradient of another."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        return torch.empty(tuple(leaf.shape), dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)


def signature(block: RecordedBlock) -> tuple[Any, ...]:
    """Return what two blocks share that are split alike."""
    assert block.call is not None
    leaves, tree = tree_flatten((block.call.args, block.call.kwargs))
    shapes = tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves if isinstance(leaf, torch.Tensor))
    modules = tuple((name, type(module)) for name, module in block.module.named_modules())
    parameters = tuple((name, tuple(p.shape)) for name, p in block.module.named_parameters())
    return modules, parameters, shapes, str(tree), block.call.split
