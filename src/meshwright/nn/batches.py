"""Call a model and its loss on a batch of any container: move it, resize it, cut it into micro-batches.

A batch is a tree: nested containers with tensors as leaves. Torch's ``tree_map`` takes transformers' ``BatchEncoding``
and dataclasses for leaves; :func:`map_tree` and :func:`leaves_of` go into them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import math
import numbers
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.errors import NOTE, ConfigError, DataError, MeshwrightError, ModelError, join_names
from meshwright.runtime.torch_internals.modules import AnyLoss
from meshwright.runtime.torch_internals.pytree import SUPPORTED_NODES, tree_leaves, tree_map

INPUT_FORMATS = (None, "unpack_sequence", "unpack_dict")
_MISUNDERSTOOD: tuple[type[Exception], ...] = (TypeError, AttributeError)
_CALLS = {
    None: "The model was called as model(batch), for want of a model_input_format: 'unpack_sequence' calls "
    "model(*batch), 'unpack_dict' model(**batch).",
    "unpack_sequence": "The model was called as model(*batch), by model_input_format='unpack_sequence'.",
    "unpack_dict": "The model was called as model(**batch), by model_input_format='unpack_dict'.",
}


def to_device(data: Any, device: torch.device) -> Any:
    """Move every tensor of a batch, and whatever else has a ``to``, to ``device``: the default ``prepare_input``."""

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=True)
        return leaf.to(device) if _moves_itself(leaf) else leaf

    return map_tree(moved, data, is_leaf=_moves_itself)


def _moves_itself(node: Any) -> bool:
    # A packed sequence, a graph, a batch of the user's own class. Of a mapping the values are moved, not the whole.
    return callable(getattr(node, "to", None)) and not isinstance(node, Mapping | type)


def check_input_format(model_input_format: str | None) -> None:
    """Check that ``model_input_format`` is one of ATorch's three.

    Raises:
        ConfigError: When it is not.
    """
    if model_input_format not in INPUT_FORMATS:
        raise ConfigError(
            "model_input_format is not known",
            expected="None (model(x)), 'unpack_sequence' (model(*x)) or 'unpack_dict' (model(**x))",
            got=repr(model_input_format),
            fix="use one of the three; prepare_input can bring the batch into that form",
        )


def usual_input_format(batch: Any) -> str | None:
    """Return the ``model_input_format`` for a batch of this kind: mappings by name, sequences in order."""
    if isinstance(batch, Mapping):
        return "unpack_dict"
    return "unpack_sequence" if isinstance(batch, list | tuple) else None


def call_model(model: nn.Module, inputs: Any, model_input_format: str | None) -> Any:
    """Call the model with its input unpacked as the format says.

    Raises:
        DataError: When the input is not of the kind the format unpacks.
    """
    # A single tensor leaves no doubt about how it was passed.
    packed = model_input_format is not None or not isinstance(inputs, torch.Tensor)
    with _noting_call(_CALLS.get(model_input_format, "") if packed else "", _MISUNDERSTOOD):
        if model_input_format is None:
            return model(inputs)
        if model_input_format == "unpack_sequence" and isinstance(inputs, Sequence):
            return model(*inputs)
        if model_input_format == "unpack_dict" and isinstance(inputs, Mapping):
            return model(**inputs)
    raise DataError(
        f"The model input cannot be unpacked as {model_input_format!r}",
        expected="a list or tuple" if model_input_format == "unpack_sequence" else "a dictionary",
        got=type(inputs).__name__,
        fix="let prepare_input return one, or choose another model_input_format",
    )


def call_loss(loss_func: Callable[[Any, Any], Any], inputs: Any, output: Any) -> Any:
    """Return ``loss_func(inputs, output)``; errors that look like a misunderstanding say that it was called so.

    Raises:
        ConfigError: When one of torch's distances would compare an input and an output of different shapes.
    """
    shapes = [tuple(each.shape) for each in (inputs, output) if isinstance(each, torch.Tensor)]
    if len(set(shapes)) > 1 and is_distance(loss_func):
        raise ConfigError(
            "loss_func compares the model's output with its whole input, and they differ in shape",
            expected="loss_func(model_input, model_output)",
            got=f"{loss_func!r:.80} of an input of shape {shapes[0]} and an output of shape {shapes[1]}",
            fix='pass lambda inputs, output: F.mse_loss(output, inputs["target"]), or what of the input is the target',
        )
    # torch's losses, which want (output, target), fail in as many ways as there are kinds of input.
    kinds = (*_MISUNDERSTOOD, RuntimeError, ValueError, IndexError)
    with _noting_call("The loss was computed as loss_func(model_input, model_output).", kinds):
        return loss_func(inputs, output)


@contextlib.contextmanager
def _noting_call(call: str, kinds: tuple[type[Exception], ...]) -> Iterator[None]:
    """Add to errors of these kinds a note of how the function was called; none if ``call`` is empty."""
    try:
        yield
    except kinds as error:
        is_clear = not call or isinstance(error, (MeshwrightError, torch.OutOfMemoryError))
        # The innermost call counts: a loss may run within a model, and a model within a model.
        if not is_clear and not getattr(error, "__notes__", ()):
            error.add_note(f"{NOTE}{call}")
        raise


def loss_of_output(inputs: Any, output: Any) -> Any:
    """Return the loss in the model's own output, as transformers' models return it: the default ``loss_func``.

    Raises:
        ConfigError: When the output has none.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and isinstance(output, torch.Tensor) and output.dim() == 0:
        loss = output
    if loss is None:
        raise ConfigError(
            "There is no loss to train on",
            expected="a loss_func, or a model whose output has a loss",
            got=f"no loss_func and an output of type {type(output).__name__}",
            fix="pass loss_func=(input, output) -> loss, or give the model its labels",
        )
    return loss


def first_loss(loss: Any, trains: bool = False) -> torch.Tensor:
    """Return the loss from a loss function's result: itself, or the first of a list or tuple.

    Args:
        loss: The result.
        trains: Whether the loss must have a graph to differentiate.

    Raises:
        ModelError: When it is not a tensor of one number, or has no graph although ``trains``.
    """
    found = loss[0] if isinstance(loss, list | tuple) and loss else loss
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        is_tensor = isinstance(found, torch.Tensor)
        raise ModelError(
            "The loss function returned no loss",
            expected="a tensor of one number, alone or first in a tuple",
            got=f"a tensor of shape {tuple(found.shape)}" if is_tensor else f"{type(found).__name__} {found!r:.80}",
            fix="return the mean over the samples" if is_tensor else "return the loss from loss_func",
        )
    if trains and not found.requires_grad:
        raise ModelError(
            "The loss does not depend on anything that trains",
            expected="a loss computed from the model's output, by parameters that require gradients",
            got="a tensor without a graph",
            fix="look for detach(), item(), torch.tensor(…) or torch.no_grad() on the way to it, and for a model whose "
            "parameters are all frozen",
        )
    return found


def batch_size_of(batch: Any) -> int:
    """Return the number of samples in a batch: the size of dim 0 that its tensors share.

    Raises:
        DataError: When it holds no tensor with a dim 0, or they differ.
    """
    sizes = {leaf.shape[0] for leaf in leaves_of(batch) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0}
    if len(sizes) != 1:
        raise DataError(
            "The number of samples in the batch cannot be told",
            expected="tensors that share the size of their first dim",
            got=f"sizes {sorted(sizes)}" if sizes else f"no such tensor in a {type(batch).__name__}",
            fix="let the collate_fn return tensors with the samples along dim 0",
        )
    return sizes.pop()


def resized(batch: Any, samples: int) -> Any:
    """Return the batch cut or repeated along dim 0 to a number of samples."""
    size = batch_size_of(batch)
    places = [place % size for place in range(samples)]
    index = torch.tensor(places)

    def choose(leaf: torch.Tensor) -> torch.Tensor:
        # A tensor of Python's numbers that is made on a GPU is waited for.
        return leaf[index.to(leaf.device, non_blocking=True)]

    return _chosen(batch, size, choose, places)


def first_samples(batch: Any, count: int) -> tuple[Any] | None:
    """Return the first samples of a batch, or all if none are wanted; None if it cannot be told which they are."""
    try:
        size = batch_size_of(batch)
        _refuse_numbers(batch, size)
    except DataError:
        return None
    if count in (0, size):
        return (batch,)
    return (_chosen(batch, size, lambda leaf: leaf[:count], range(count)),)


def micro_batches(batch: Any, count: int) -> list[Any]:
    """Cut a batch along dim 0 of its tensors into parts of which none has two samples more than another.

    Lists and tuples with one item per sample, such as names, are cut as well: as many items as there are samples, and
    no tensors among them. Anything else goes into every part. A batch of fewer samples than parts gives one part for
    each of them.

    Args:
        batch: Tensors in containers of any kind.
        count: Number of parts.

    Raises:
        DataError: When it is unclear whether numbers belong to samples.
    """
    if count == 1:
        return [batch]
    size = batch_size_of(batch)
    _refuse_numbers(batch, size)
    rows, larger = divmod(size, count)
    sizes = [rows + (index < larger) for index in range(count)]
    starts = [0, *itertools.accumulate(sizes)]

    def part(first: int, end: int) -> Any:
        return _chosen(batch, size, lambda leaf: leaf[first:end], range(first, end))  # views

    return [part(first, end) for first, end in itertools.pairwise(starts) if first < end or not size]


def equal_micro_batches(batch: Any, count: int, ranks: int, *, singly: bool = False) -> tuple[list[Any], int]:
    """Cut a batch into parts of equally many samples, as stages of a pipeline exchange them.

    A batch that does not divide by ``count`` gives more and smaller parts. Those at the end repeat the last one where
    the schedule needs their number: ``count``, or above it a multiple of ``ranks``.

    Args:
        batch: As for :func:`micro_batches`.
        count: Number of parts of a batch that divides.
        ranks: Number of ranks of the pipeline.
        singly: Give each sample a part of its own, since some must not count.

    Returns:
        The parts, and the number of those that are no repeats.
    """
    if count == 1 and not singly:
        return [batch], 1
    cut = equal_parts(batch_size_of(batch), count, ranks, singly=singly)
    parts = micro_batches(batch, cut.distinct)
    return parts + parts[-1:] * (cut.total - cut.distinct), cut.distinct


class EqualParts(NamedTuple):
    """Sizes of the parts that a batch is cut into for a pipeline.

    Attributes:
        rows: Samples of every part.
        distinct: Parts that hold the batch.
        total: Parts that the schedule runs; those above ``distinct`` repeat the last one, and do not count.
    """

    rows: int
    distinct: int
    total: int


def equal_parts(size: int, count: int, ranks: int, *, singly: bool = False) -> EqualParts:
    """Return the cut of ``size`` samples that computes fewest: what :func:`equal_micro_batches` does, for plans too.

    Args:
        size: Samples of a batch.
        count: As for :func:`equal_micro_batches`.
        ranks: As for :func:`equal_micro_batches`.
        singly: As for :func:`equal_micro_batches`.
    """
    if size % count == 0 and size and not singly:
        return EqualParts(size // count, count, count)

    def total(parts: int) -> int:
        return count if parts <= count else math.ceil(parts / ranks) * ranks

    sizes = [rows for rows in range(1, max(size, 1) + 1) if size % rows == 0 and (rows == 1 or not singly)]
    rows = min(sizes, key=lambda rows: (rows * total(size // rows), -rows))
    distinct = max(size // rows, 1)
    return EqualParts(rows, distinct, total(distinct))


def shares_of(parts: Sequence[Any]) -> list[float]:
    """Return the number by which the mean over each part's samples is divided in the mean over all samples."""
    if len(parts) == 1:
        return [1.0]
    sizes = [batch_size_of(part) for part in parts]
    return [sum(sizes) / size for size in sizes]


def _chosen(batch: Any, size: int, tensor_rows: Callable[[torch.Tensor], torch.Tensor], places: Sequence[int]) -> Any:
    """Return the samples at ``places``, which ``tensor_rows`` selects from tensors."""

    def choose(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return tensor_rows(leaf)
        if _is_per_sample(leaf, size) and not _is_all_numbers(leaf):
            return type(leaf)(leaf[place] for place in places)
        return leaf

    return map_tree(choose, batch, is_leaf=lambda node: _is_per_sample(node, size))


def _is_per_sample(node: Any, size: int) -> bool:
    """Return whether a node is a list or tuple with as many items as there are samples, and no tensors in them."""
    is_listed = type(node) in (list, tuple) and len(node) == size  # a named tuple is a structure
    # Only None: arguments that are left out.
    is_filled = is_listed and any(item is not None for item in node)
    return is_filled and not any(isinstance(leaf, torch.Tensor) for leaf in leaves_of(node))


def _is_all_numbers(node: Any) -> bool:
    return all(isinstance(item, numbers.Number) for item in node)


def _refuse_numbers(batch: Any, size: int) -> None:
    # Two numbers beside two samples may be one for each, or the height and width of all.
    for leaf in leaves_of(batch, is_leaf=lambda node: _is_per_sample(node, size)):
        if _is_per_sample(leaf, size) and _is_all_numbers(leaf):
            raise DataError(
                "The batch holds as many numbers as samples, and they may belong to samples or not",
                expected="numbers per sample in a tensor, which is cut into micro-batches",
                got=f"a {type(leaf).__name__} of {size} numbers: {join_names(map(repr, leaf))}",
                fix="let the collate_fn make a tensor of them, or a dictionary of numbers that concern the whole batch",
            )


# --- Loss functions that can be called as ``loss_func(model_input, model_output)``.
#
# Most of torch's losses cannot: they take an output and a target. Only for distances the order makes no difference;
# these compare the output with the input itself, as autoencoders do.

_DISTANCES = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)
_DISTANCE_FUNCTIONS = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)


def is_loss_func(value: Any) -> bool:
    """Return whether a value can be called with a model's input and its output; no class can, and few torch losses."""
    if isinstance(value, type) or not callable(value):
        return False
    is_torch_loss = isinstance(value, AnyLoss) or getattr(value, "__module__", "") == F.__name__
    return not is_torch_loss or is_distance(value)


def is_distance(value: Any) -> bool:
    """Return whether a value is one of torch's losses that is symmetric in its arguments."""
    return isinstance(value, _DISTANCES) or value in _DISTANCE_FUNCTIONS


# --- Trees: torch's containers, and mappings and dataclasses that torch takes for leaves.


def map_tree(function: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Map a tree as torch's ``tree_map`` does, but also go into other mappings and into dataclasses.

    Args:
        function: Called with every leaf.
        tree: Nested containers, which are not modified. The result has containers of the same classes; a dataclass in
            which nothing changes is the same object.
        is_leaf: Nodes that are passed to ``function`` whole, containers included.
    """

    def enter(leaf: Any) -> Any:
        if not _is_opaque(leaf) or (is_leaf is not None and is_leaf(leaf)):
            return function(leaf)
        before = _values_of(leaf)
        values = {key: map_tree(function, value, is_leaf) for key, value in before.items()}
        return _with_values(leaf, values, is_same=all(values[key] is before[key] for key in before))

    return tree_map(enter, tree, is_leaf=is_leaf)


def cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    """Cast every floating tensor in nested containers; a ModelOutput stays one."""

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return map_tree(cast, tree)


def leaves_of(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """List the leaves of a tree as torch's ``tree_leaves`` does, those in other mappings and in dataclasses too."""
    found = []
    for leaf in tree_leaves(tree, is_leaf=is_leaf):
        is_container = _is_opaque(leaf) and not (is_leaf is not None and is_leaf(leaf))
        found += leaves_of(_values_of(leaf), is_leaf) if is_container else [leaf]
    return found


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """List the tensors among the leaves of a tree."""
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, torch.Tensor)]


def _is_opaque(leaf: Any) -> bool:
    """Return whether torch takes this mapping or dataclass instance for a leaf."""
    return (isinstance(leaf, Mapping) or _is_dataclass(leaf)) and type(leaf) not in SUPPORTED_NODES


def _is_dataclass(leaf: Any) -> bool:
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type | Mapping)


def _values_of(leaf: Any) -> dict[Any, Any]:
    if not _is_dataclass(leaf):
        return dict(leaf)
    return {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf) if hasattr(leaf, field.name)}


def _with_values(mapping: Any, values: dict[Any, Any], is_same: bool) -> Any:
    if _is_dataclass(mapping):
        if is_same:  # it may be a state that is changed where it is, or settings
            return mapping
        changed = copy.copy(mapping)
        for key, value in values.items():
            object.__setattr__(changed, key, value)  # frozen ones, too
        return changed
    if not isinstance(mapping, MutableMapping):
        return values
    changed = copy.copy(mapping)
    for key, value in values.items():
        changed[key] = value
    return changed
