"""How a model calls its blocks: one forward pass over tensors without data, on a small sample."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from meshwright.errors import ModelError
from meshwright.methods.sample import SampleRun
from meshwright.methods.tensor.trial import BlockCall
from meshwright.nn import find_blocks, run_with
from meshwright.utils.trees import map_tree

_TOKENS = 16  # enough to tell positions apart; made a multiple of the ranks, which may cut them


@dataclass
class RecordedBlock:
    """A block and its first call."""

    path: str
    module: nn.Module
    call: BlockCall | None = None  # None: the block did not run
    given: dict[int, tuple[int, int]] = field(default_factory=dict)  # input leaf -> (earlier block, its output leaf)


def record_calls(model: nn.Module, sample: SampleRun | None, ranks: int) -> list[RecordedBlock]:
    """Runs the model once over fake tensors; the model itself is not touched.

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
    """What two blocks share that are split alike."""
    assert block.call is not None
    leaves, tree = tree_flatten((block.call.args, block.call.kwargs))
    shapes = tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves if isinstance(leaf, torch.Tensor))
    modules = tuple((name, type(module)) for name, module in block.module.named_modules())
    parameters = tuple((name, tuple(p.shape)) for name, p in block.module.named_parameters())
    return modules, parameters, shapes, str(tree), block.call.split
