"""Batches: moved, sized and cut into micro-batches, whatever containers they come in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from meshwright.errors import ConfigError, DataError, ModelError

INPUT_FORMATS = (None, "unpack_sequence", "unpack_dict")


def to_device(data: Any, device: torch.device) -> Any:
    """The default ``prepare_input``: every tensor of a batch moved to ``device``."""
    return tree_map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf, data)


def check_input_format(model_input_format: str | None) -> None:
    """Refuses a ``model_input_format`` that is none of the seed's three.

    Raises:
        ConfigError: Naming them.
    """
    if model_input_format not in INPUT_FORMATS:
        raise ConfigError(
            "model_input_format is not known",
            expected="None (model(x)), 'unpack_sequence' (model(*x)) or 'unpack_dict' (model(**x))",
            got=repr(model_input_format),
            fix="use one of the three; prepare_input can bring the batch into that form",
        )


def usual_input_format(batch: Any) -> str | None:
    """How a model takes a batch of such a kind where nobody says it: dictionaries by name, sequences in order."""
    if isinstance(batch, Mapping):
        return "unpack_dict"
    return "unpack_sequence" if isinstance(batch, list | tuple) else None


def call_model(model: nn.Module, inputs: Any, model_input_format: str | None) -> Any:
    """Calls the model with its input unpacked as the format says.

    Raises:
        DataError: When the input is not of the kind the format unpacks.
    """
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


def loss_of_output(inputs: Any, output: Any) -> Any:
    """The default ``loss_func``: the loss that the model's own output carries, as transformers' models return it.

    Raises:
        ConfigError: When the output carries none.
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


def first_loss(loss: Any) -> torch.Tensor:
    """The loss itself, where a loss function returns a list or tuple with the loss first.

    Raises:
        ModelError: When that is not a tensor of one number.
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
    return found


def batch_size_of(batch: Any) -> int:
    """Number of samples in a batch: the size of dim 0 that its tensors share.

    Raises:
        DataError: When it holds no tensor with a dim 0, or they differ.
    """
    sizes = {leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0}
    if len(sizes) != 1:
        raise DataError(
            "The number of samples in the batch cannot be told",
            expected="tensors that share the size of their first dim",
            got=f"sizes {sorted(sizes)}" if sizes else f"no such tensor in a {type(batch).__name__}",
            fix="let the collate_fn return tensors with the samples along dim 0",
        )
    return sizes.pop()


def resized(batch: Any, samples: int) -> Any:
    """The batch cut or repeated along dim 0 to a number of samples."""
    size = batch_size_of(batch)
    index = torch.arange(samples) % size
    return tree_map(
        lambda leaf: leaf[index.to(leaf.device)] if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 else leaf, batch
    )


def micro_batches(batch: Any, count: int) -> list[Any]:
    """Cuts a batch into equal parts along dim 0 of its tensors; anything else goes into every part.

    Raises:
        DataError: When the batch does not divide.
    """
    if count == 1:
        return [batch]
    size = batch_size_of(batch)
    if size % count:
        raise DataError(
            "The batch does not divide into micro-batches",
            expected=f"a multiple of {count} samples per rank",
            got=f"{size}",
            fix="choose a batch_size that is a multiple of ranks x num_micro_batches, and drop_last=True",
        )
    rows = size // count

    def part(index: int) -> Any:
        return tree_map(
            lambda leaf: (
                leaf[index * rows : (index + 1) * rows] if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 else leaf
            ),
            batch,
        )

    return [part(index) for index in range(count)]
