"""Record how a model calls its blocks, run single blocks on random values, and compare the results.

The parts that proofs are made of: [Note: proof of a split] in ``split_proof.py``, and of blocks on parts of the tokens
in ``methods/tokens/token_split.py``.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from meshwright.errors import ModelError
from meshwright.methods.tensor.split_plan import LINEAR, PlannedLayer
from meshwright.nn import FakeTensors, find_blocks, run_with
from meshwright.nn.batches import map_tree
from meshwright.runtime.torch_internals.pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten


@dataclass(frozen=True)
class SampleRun:
    """Runs a model once on a sample.

    Args:
        inputs_of: ``inputs_of(samples)`` returns a model input of that many samples, or None.
        forward: ``forward(model, inputs)`` calls the model.
    """

    inputs_of: Callable[[int], Any]
    forward: Callable[[nn.Module, Any], Any]


# --- Comparing tensors up to rounding

_TOLERANCE = 1e-3  # relative to the norm; a wrong split differs by as much as the values themselves
_NOISE = 1e-5  # relative to the largest gradient; covers gradients that are zero in exact arithmetic (a key bias's)


class Refuted(Exception):
    """A split does not compute what the whole block computes; the message says where."""


def reason_of(error: Exception) -> str:
    """Return an exception's type and the first line of its message, shortened."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"


def split_dim(output: torch.Tensor, expected: torch.Tensor, rank: int, ranks: int) -> int | None:
    """Return the dim in which ``output`` is a rank's part of ``expected``; None if it is the whole.

    Raises:
        Refuted: When it is neither.
    """
    if output.shape == expected.shape and close(output, expected, 0.0):
        return None
    for dim, size in enumerate(expected.shape):
        if dim < output.dim() and size == output.shape[dim] * ranks:
            part = expected.chunk(ranks, dim)[rank]
            if part.shape == output.shape and close(output, part, 0.0):
                return dim
    raise Refuted("an output of the block is neither the whole nor a part of it")


def total(parts: Iterable[torch.Tensor | None], like: torch.Tensor) -> torch.Tensor:
    """Return the sum of parts shaped ``like``; nan if none or one of another shape is among them."""
    present = [part for part in parts if part is not None]
    same = [part for part in present if part.shape == like.shape]
    return torch.stack(same).sum(0) if same and len(same) == len(present) else torch.full_like(like, torch.nan)


def close(value: torch.Tensor | None, expected: torch.Tensor, scale: float) -> bool:
    """Return whether a value equals ``expected`` up to rounding; ``scale`` is the norm of the largest such value."""
    if value is None or value.shape != expected.shape:
        return False
    if not expected.is_floating_point():
        return torch.equal(value, expected)
    apart = torch.linalg.vector_norm(value.detach() - expected)
    return bool(apart <= _TOLERANCE * torch.linalg.vector_norm(expected) + _NOISE * scale)


def largest(tensors: Iterable[torch.Tensor | None]) -> float:
    """Return the largest norm."""
    return max((torch.linalg.vector_norm(tensor).item() for tensor in tensors if tensor is not None), default=0.0)


# --- Running one block with random values

_SEED = 5


VIEWS = "views"
"""Name of an adjustment of the views that a module's forward takes; its value is the number of ranks."""


@dataclass(frozen=True)
class Adjustment:
    """A new value for a module's attribute that counts heads or features, of which a rank has only a part.

    Code that computes the shape of its heads from its input, of which a rank has the whole width, has no such
    attribute: ``view(B, T, n_head, C // n_head)``. There the views are adjusted; see :class:`NarrowViews`.
    """

    path: str
    name: str
    value: int


class NarrowViews(TorchFunctionMode):
    """Lets a module view a rank's part of the features in the shape that the whole would have.

    A view that asks for as many times the elements as there are ranks gets a rank's share of the first dim that differs
    from the tensor's and can be divided: of the heads where features are cut into heads, and of the features where
    heads are put together. The proof of a split finds out whether that is right.

    Args:
        ranks: Number of ranks that share the features.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self._ranks = ranks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func in _VIEWS and not kwargs:
            tensor, shape = args[0], args[1] if isinstance(args[1], tuple | list | torch.dtype) else args[1:]
            return func(tensor, self._narrowed(tensor.shape, shape))
        return func(*args, **(kwargs or {}))

    def _narrowed(self, own: Sequence[int], shape: Any) -> Any:
        """Return the shape to view a tensor of shape ``own`` in."""
        if isinstance(shape, torch.dtype) or -1 in shape or math.prod(shape) != math.prod(own) * self._ranks:
            return shape
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(own, shape, strict=False)))
        at = next((at for at, size in enumerate(shape) if at >= same and size % self._ranks == 0), None)
        return shape if at is None else [size // self._ranks if i == at else size for i, size in enumerate(shape)]


_VIEWS = (torch.Tensor.view, torch.Tensor.reshape, torch.reshape)


def narrow_views(ranks: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a module's forward with the views of a rank's part of the features."""
    with NarrowViews(ranks):
        return forward(*args, **kwargs)


@dataclass(frozen=True)
class BlockCall:
    """The arguments of one block: a tree whose tensors have shapes, dtypes and ``requires_grad``, but no data."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    split: tuple[tuple[int, int], ...] = ()  # leaves that an earlier block returns split, and their dims
    fill: tuple[int, bool] = (0, True)  # value of all integers and booleans: masks and indices look the same

    def values(self) -> list[Any]:
        """Return random leaves, integers and booleans as ``fill`` says; the same at every call."""
        generator = torch.Generator().manual_seed(_SEED)
        return [_random(leaf, generator, *self.fill) for leaf in tree_leaves((self.args, self.kwargs))]

    def filled(self) -> list[BlockCall]:
        """Return the call with each choice of integers and booleans, since a mask may hide all tokens or none."""
        leaves = tree_leaves((self.args, self.kwargs))
        kinds = {leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_floating_point()}
        integers = (0, 1) if kinds - {torch.bool} else (0,)
        booleans = (True, False) if torch.bool in kinds else (True,)
        return [replace(self, fill=fill) for fill in itertools.product(integers, booleans)]

    def tree(self, leaves: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Rebuild the arguments from their leaves."""
        args, kwargs = tree_unflatten(leaves, tree_flatten((self.args, self.kwargs))[1])
        return args, kwargs


def _random(leaf: Any, generator: torch.Generator, integer: int, boolean: bool) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if not leaf.is_floating_point():
        return torch.full(leaf.shape, boolean if leaf.dtype == torch.bool else integer, dtype=leaf.dtype)
    values = torch.randn(leaf.shape, generator=generator)
    return values.requires_grad_(leaf.requires_grad)


_DRAWN = 1_000_003  # numbers; a prime, so that rows and parts of no width begin alike


def _random_weights(shape: torch.Size, scale: float, generator: torch.Generator) -> torch.Tensor:
    """Return random numbers; many of them repeat what is drawn first, since to draw all would take seconds."""
    count = shape.numel()
    drawn = torch.randn(min(count, _DRAWN), generator=generator).mul_(scale)
    if count == len(drawn):
        return drawn.view(shape)
    values = torch.empty(count)
    for begin in range(0, count, len(drawn)):
        part = values[begin : begin + len(drawn)]
        part.copy_(drawn[: len(part)])
    return values.view(shape)


def random_state(block: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Return random parameters for a block, and its buffers in fp32 on the CPU (zeros if they are on ``meta``)."""
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, torch.Tensor] = {}
    for name, parameter in block.named_parameters():
        scale = max(parameter.shape[-1], 1) ** -0.5 if parameter.dim() > 1 else 1.0
        state[name] = _random_weights(parameter.shape, scale, generator)
    for name, buffer in block.named_buffers():
        dtype = torch.float32 if buffer.is_floating_point() else buffer.dtype
        state[name] = torch.zeros(buffer.shape, dtype=dtype) if buffer.is_meta else buffer.detach().cpu().to(dtype)
    return state


@dataclass
class Exchanged:
    """Tensors at the places where ranks exchange something: the whole block's, or one rank's contributions."""

    values: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)  # outputs of row layers
    gradients: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)  # of inputs of column layers


class _ReplacedGradient(torch.autograd.Function):
    """Identity; backward passes the gradient to ``note`` and continues with its result, as after an all-reduce."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, note: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        ctx.note = note
        return tensor.clone()  # a view could not be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return ctx.note(gradient), None


@contextlib.contextmanager
def evaluating(block: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode with gradients inside; restore each module's mode afterwards."""
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
    """Set attributes and adjust views inside; restore them afterwards."""
    counts = [each for each in adjustments if each.name != VIEWS]
    before = [(a, getattr(block.get_submodule(a.path), a.name)) for a in counts]
    viewing = [(block.get_submodule(each.path), each.value) for each in adjustments if each.name == VIEWS]
    forwards = [(module, module.__dict__.get("forward")) for module, _ in viewing]
    for adjustment in counts:
        setattr(block.get_submodule(adjustment.path), adjustment.name, adjustment.value)
    for module, ranks in viewing:
        module.__dict__["forward"] = functools.partial(narrow_views, ranks, module.forward)
    try:
        yield
    finally:
        for adjustment, value in before:
            setattr(block.get_submodule(adjustment.path), adjustment.name, value)
        for module, forward in forwards:
            del module.__dict__["forward"]
            if forward is not None:
                module.__dict__["forward"] = forward


@contextlib.contextmanager
def exchanging(layers: list[PlannedLayer], own: Exchanged, whole: Exchanged | None) -> Iterator[None]:
    """Replace exchanges by the whole block's values: outputs of row layers, gradients of column layers' inputs.

    Args:
        layers: The layers that are split.
        own: Takes this run's contributions.
        whole: The whole block's values; None while the whole block runs.
    """
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
        own.values[key] = output.detach().clone()  # the block may change it in place
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

        return (_ReplacedGradient.apply(args[0], note), *args[1:])

    return take


# --- Recording how a model calls its blocks

_TOKENS = 16  # enough to tell positions apart; rounded up to a multiple of the ranks, which may divide them


@dataclass
class RecordedBlock:
    """A block and its first call."""

    path: str
    module: nn.Module
    call: BlockCall | None = None  # None: the block did not run
    given: dict[int, tuple[int, int]] = field(default_factory=dict)  # input leaf -> (earlier block, its output leaf)

    def with_split_inputs(
        self, dims: list[tuple[int | None, ...]], split: dict[int, int] | None = None
    ) -> RecordedBlock:
        """Return the block with its split inputs marked.

        Args:
            dims: The dims in which earlier blocks return their outputs split (None: whole), such as T5's bias of the
                attention scores.
            split: Dims of further leaves that are split.
        """
        assert self.call is not None
        given = {leaf: dims[giver][place] for leaf, (giver, place) in self.given.items()}
        every = (split or {}) | {leaf: dim for leaf, dim in given.items() if dim is not None}
        return replace(self, call=replace(self.call, split=tuple(every.items())))


def record_calls(model: nn.Module, sample: SampleRun | None, ranks: int) -> list[RecordedBlock]:
    """Run the model once over fake tensors and record the calls of its blocks; the model is not changed.

    Raises:
        ModelError: When the model has no list of blocks, there is no sample, or it does not run without data.
    """
    blocks = [RecordedBlock(path, module) for path, module in find_blocks(model)]
    if not blocks:
        children = ", ".join(f"{name} ({type(child).__name__})" for name, child in model.named_children())
        raise _unknown(
            "the model has no repeated blocks to look into", "an nn.ModuleList or nn.Sequential of layers", children
        )
    reasons: list[str] = []
    for inputs, forward in _tries(model, sample, ranks):
        for block in blocks:
            block.call, block.given = None, {}
        try:
            _run(model, blocks, inputs, forward)
        except Exception as error:  # a user's model may do anything; an error after the blocks does not matter
            reasons.append(reason_of(error))
        if all(block.call is not None for block in blocks):
            return blocks
    silent = [block.path for block in blocks if block.call is None]
    raise _unknown(
        f"the data flow of {silent[0]} cannot be found",
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
    """Cut token ids, masks and labels to a few positions, so that proving a large block takes seconds."""

    def short(leaf: Any) -> Any:
        is_ids = isinstance(leaf, torch.Tensor) and leaf.dim() >= 2 and not leaf.is_floating_point()
        return leaf[:, :tokens] if is_ids else leaf

    return map_tree(short, inputs)


def _run(model: nn.Module, blocks: list[RecordedBlock], inputs: Any, forward: Callable[[nn.Module, Any], Any]) -> None:
    fakes = FakeTensors(torch.device("cpu"))
    state = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        trains = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
        state[name] = fakes.like(tensor).requires_grad_(trains)
    fake_inputs = fakes.like_all(inputs)
    with fakes.running(), _recording(blocks), torch.enable_grad():
        run_with(forward, model, state, fake_inputs)


@contextlib.contextmanager
def _recording(blocks: list[RecordedBlock]) -> Iterator[None]:
    made: dict[int, tuple[int, int]] = {}  # id of a tensor -> the block that returned it, and its place in the output
    alive: list[Any] = []  # keeps these ids unique
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
    """Remove key-value caches, which a model makes for generation, from a block's arguments."""

    def is_cache(leaf: Any) -> bool:
        return type(leaf).__name__.endswith("Cache")

    args, kwargs = tree_map(lambda leaf: None if is_cache(leaf) else leaf, arguments, is_leaf=is_cache)
    return args, {key: False if key == "use_cache" else value for key, value in kwargs.items()}


def _described(leaf: Any) -> Any:
    """Return a ``meta`` tensor with a fake tensor's shape, dtype and ``requires_grad``."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    from meshwright.runtime.torch_internals.fake_tensors import unset_fake_temporarily

    with unset_fake_temporarily():
        return torch.empty(tuple(leaf.shape), dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)


def signature(block: RecordedBlock) -> tuple[Any, ...]:
    """Return a key that is equal for blocks that can be split alike."""
    assert block.call is not None
    leaves, tree = tree_flatten((block.call.args, block.call.kwargs))
    shapes = tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves if isinstance(leaf, torch.Tensor))
    modules = tuple((name, type(module)) for name, module in block.module.named_modules())
    parameters = tuple((name, tuple(p.shape)) for name, p in block.module.named_parameters())
    return modules, parameters, shapes, str(tree), block.call.split
