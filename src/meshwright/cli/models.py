"""The model of a training file: made by the user's function, or by transformers from a configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.cli.config import ModelTable
from meshwright.cli.references import resolve_reference, takes, where_raised
from meshwright.errors import ConfigError, MeshwrightError, ModelError
from meshwright.loss import next_token_loss

_HF = "hf:"


@dataclass(frozen=True)
class ModelSource:
    """How to make a model, and how it is called and judged."""

    build: Callable[[int, int], nn.Module]  # (vocab_size, seq_len) -> model with random weights
    loss_func: Callable[[Any, Any], Any]
    prepare_input: Callable[[Any, torch.device], Any]
    model_input_format: str | None


def model_source(table: ModelTable, folder: Path) -> ModelSource:
    """Finds what ``[model]`` names, without building it.

    Args:
        table: The table.
        folder: Of the training file; its modules are importable already.

    Raises:
        ConfigError: When something it names is not there.
    """
    loss = next_token_loss if table.loss is None else resolve_reference(table.loss, "model.loss")
    if table.source.startswith(_HF):
        path = _config_path(folder / Path(table.source.removeprefix(_HF)).expanduser())
        return ModelSource(
            lambda vocab, length: _from_hf(path, table, vocab, length), loss, _ids_by_name, "unpack_dict"
        )
    function = resolve_reference(table.source, "model.source")
    return ModelSource(lambda vocab, length: _from_function(function, table, vocab, length), loss, _ids, None)


def _ids(batch: torch.Tensor, device: torch.device) -> torch.Tensor:
    return batch.to(device, non_blocking=True)


def _ids_by_name(batch: torch.Tensor, device: torch.device) -> dict[str, torch.Tensor]:
    return {"input_ids": _ids(batch, device)}


def _from_function(function: Callable[..., Any], table: ModelTable, vocab_size: int, seq_len: int) -> nn.Module:
    known = {"vocab_size": vocab_size, "seq_len": seq_len}
    arguments = {**{name: value for name, value in known.items() if takes(function, name)}, **table.args}
    try:
        model = function(**arguments)
    except MeshwrightError:
        raise
    except Exception as error:
        raise ModelError(
            f"The model function {table.source} failed",
            expected="a torch.nn.Module",
            got=f"{type(error).__name__}: {error} ({where_raised(error)})",
            fix="correct model.args or the function; --traceback shows where",
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"The model function {table.source} returned no model",
            expected="a torch.nn.Module",
            got=type(model).__name__,
            fix="return the model",
        )
    return model


def _config_path(path: Path) -> Path:
    if not (path / "config.json" if path.is_dir() else path).is_file():
        raise ConfigError(
            "model.source names no transformers config",
            expected="a config.json, or a directory that holds one",
            got=str(path),
            fix="correct the path; a relative one starts at the folder of the training file",
        )
    return path


def _from_hf(path: Path, table: ModelTable, vocab_size: int, seq_len: int) -> nn.Module:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError(
            "model.source is a transformers config, and transformers is not installed",
            expected="an importable package 'transformers'",
            got=str(error),
            fix="pip install 'meshwright[hf]'",
        ) from None
    try:
        # Without the last, transformers asks on the terminal whether to run code that lies beside a config.
        config = AutoConfig.from_pretrained(
            path, **{**table.args, "local_files_only": True, "trust_remote_code": False}
        )
        config.use_cache = False  # for generation; in training it only holds memory
        _check_hf_sizes(config, table, vocab_size, seq_len)
        return AutoModelForCausalLM.from_config(config)
    except MeshwrightError:
        raise
    except Exception as error:
        raise ModelError(
            f"transformers makes no causal language model of {path}",
            expected="the config of one, such as GPT-2's or Llama's",
            got=f"{type(error).__name__}: {error}",
            fix="correct the config or model.args",
        ) from error


def _check_hf_sizes(config: Any, table: ModelTable, vocab_size: int, seq_len: int) -> None:
    unknown = [key for key in table.args if not hasattr(config, key)]
    if unknown:
        raise ConfigError(
            f"model.args has keys that {type(config).__name__} does not have",
            got=", ".join(unknown),
            fix="correct them",
        )
    sizes = (("vocab_size", vocab_size, "the tokenizer"), ("max_position_embeddings", seq_len, "data.seq_len"))
    for name, needed, who in sizes:
        if (has := getattr(config, name, None)) is not None and has < needed:
            raise ModelError(
                f"The model is too small for {who}",
                expected=f"{name} of {needed} or more",
                got=f"{name} = {has}",
                fix=f"set it in model.args, for example {name} = {needed}",
            )
