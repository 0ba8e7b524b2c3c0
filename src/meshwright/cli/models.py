"""The model of a training file: made by the user's function, or by transformers from a configuration."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.batches import to_device
from meshwright.cli.config import ModelTable
from meshwright.cli.references import call_reference, resolve_reference, takes
from meshwright.errors import ConfigError, ModelError
from meshwright.loss import next_token_loss
from meshwright.planning.transformers import (
    check_config_path,
    model_of_config,
    predicts_next_token,
    read_model_config,
)

_HF = "hf:"
_KEY = "model.source"


@dataclass(frozen=True)
class ModelSource:
    """How to make a model, and how it is called and judged."""

    build: Callable[[int | None, int | None], nn.Module]
    """(vocab_size, seq_len), None where the data has none -> model with random weights."""
    loss_func: Callable[[Any, Any], Any] | None
    """None: the loss that the model's output carries."""
    prepare_input: Callable[[Any, torch.device], Any]
    model_input_format: str | None
    """As of ``accelerate``; for samples of a function it depends on what a sample is."""


def model_source(table: ModelTable, folder: Path, *, of_text: bool = True) -> ModelSource:
    """Finds what ``[model]`` names, without building it.

    Args:
        table: The table.
        folder: Of the training file; its modules are importable already.
        of_text: Whether batches are token ids; of any other the model's output carries the loss, unless one is named.

    Raises:
        ConfigError: When something it names is not there.
    """
    loss = resolve_reference(table.loss, "model.loss") if table.loss is not None else None
    judged = next_token_loss if of_text and loss is None else loss
    if not table.source.startswith(_HF):
        function = resolve_reference(table.source, _KEY)
        return ModelSource(functools.partial(_from_function, function, table), judged, to_device, None)
    path = folder / Path(table.source.removeprefix(_HF)).expanduser()
    check_config_path(path, _KEY)
    build = functools.partial(_from_hf, path, table, judged is next_token_loss)
    return ModelSource(build, judged, _by_name, "unpack_dict")


def _by_name(batch: Any, device: torch.device) -> Any:
    moved = to_device(batch, device)
    return {"input_ids": moved} if isinstance(moved, torch.Tensor) else moved


def _from_function(
    function: Callable[..., Any], table: ModelTable, vocab_size: int | None, seq_len: int | None
) -> nn.Module:
    known = {"vocab_size": vocab_size, "seq_len": seq_len}
    fitting = {name: value for name, value in known.items() if value is not None and takes(function, name)}
    model = call_reference(
        function,
        table.source,
        {**fitting, **table.args},
        key="model",
        expected="a torch.nn.Module",
        error_cls=ModelError,
    )
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"The model function {table.source} returned no model",
            expected="a torch.nn.Module",
            got=type(model).__name__,
            fix="return the model",
        )
    return model


def _from_hf(
    path: Path, table: ModelTable, must_be_causal: bool, vocab_size: int | None, seq_len: int | None
) -> nn.Module:
    config = read_model_config(path, table.args, _KEY)
    _check_sizes(config, vocab_size, seq_len)
    model = model_of_config(config, path)
    if must_be_causal and not predicts_next_token(model, config):
        raise ConfigError(
            f"{type(model).__name__} is no causal language model, and text is for predicting the next token",
            expected="the config of one, such as GPT-2's or Llama's",
            got=f"model.source = {table.source!r} with data.source a text",
            fix="let data.source = 'module:function' return samples with labels (examples/bert), or name a model.loss",
        )
    return model


def _check_sizes(config: Any, vocab_size: int | None, seq_len: int | None) -> None:
    sizes = (("vocab_size", vocab_size, "the tokenizer"), ("max_position_embeddings", seq_len, "data.seq_len"))
    for name, needed, who in sizes:
        if needed is not None and (has := getattr(config, name, None)) is not None and has < needed:
            raise ModelError(
                f"The model is too small for {who}",
                expected=f"{name} of {needed} or more",
                got=f"{name} = {has}",
                fix=f"set it in model.args, for example {name} = {needed}",
            )
