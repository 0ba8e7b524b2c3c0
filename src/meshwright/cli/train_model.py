"""Find the model, the loss and the optimizer that a training file names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.cli.references import call_model_reference, resolve_reference, takes
from meshwright.cli.train_config import AdapterTable, ModelTable, OptimizerTable
from meshwright.errors import ConfigError, ModelError, did_you_mean, join_names
from meshwright.loss import next_token_loss
from meshwright.methods.base import torch_dtype
from meshwright.nn.batches import to_device
from meshwright.optim import (
    CAME,
    Adafactor,
    GaLoreAdamW,
    GaLoreAdamW8bit,
    Lamb,
    Muon,
    get_galore_param_groups,
    muon_param_groups,
)
from meshwright.planner.config_models import (
    check_config_path,
    config_path,
    model_of_config,
    predicts_next_token,
    read_model_config,
)
from meshwright.store.pretrained import check_weights

_KEY = "model.source"


@dataclass(frozen=True)
class ModelSource:
    """A model that can be built, and how it is called and its loss computed."""

    build: Callable[[int | None, int | None], nn.Module]
    """``build(vocab_size, seq_len)`` returns it, initialised; the arguments are None where the data has none."""
    loss_func: Callable[[Any, Any], Any] | None
    """``loss_func(model_input, model_output)``; None: the model's output carries the loss."""
    prepare_input: Callable[[Any, torch.device], Any]
    model_input_format: str | None
    """As in ``accelerate``; None: it follows from the samples."""
    weights: Path | None = None
    """Where trained weights to start from lie; None: it is initialised."""
    notice: str | None = None
    """What to say about a model that is initialised."""
    needs_values: bool = False
    """Whether ``build`` needs the values of the model, and nothing stored says them."""


def model_source(
    table: ModelTable,
    folder: Path,
    *,
    adapter: AdapterTable | None = None,
    of_text: bool = True,
    reads_weights: bool = True,
) -> ModelSource:
    """Find what ``[model]`` names, without building it.

    Args:
        table: The table.
        adapter: The table ``[adapter]``: what is put around it.
        folder: The training file's folder, which is on the import path already.
        of_text: Whether batches are token ids. For other batches the model's output carries the loss, unless one is
            named.
        reads_weights: Whether the model starts from stored weights, if there are some. A checkpoint replaces them.

    Raises:
        ConfigError, CheckpointError: When something that it names does not exist, or cannot be read.
    """
    loss = resolve_reference(table.loss, "model.loss") if table.loss is not None else None
    loss_func = next_token_loss if of_text and loss is None else loss
    path = config_path(table.source, folder)
    weights = _weights(table, path, folder) if reads_weights else None
    # With stored weights, what follows from them is computed while shards are read.
    is_whole = adapter is not None and adapter.needs_values and weights is None
    if path is None:
        function = resolve_reference(table.source, _KEY)
        build = functools.partial(_from_function, function, table)
        return ModelSource(_adapted(build, adapter), loss_func, to_device, None, weights, needs_values=is_whole)
    check_config_path(path, _KEY)
    build = functools.partial(_from_hf, path, table, loss_func is next_token_loss)
    notice = None
    if reads_weights and weights is None and table.weights == _AUTO:
        notice = f"there are no weights in {path}: the model is initialised from run.seed"
    built = _adapted(build, adapter)
    return ModelSource(built, loss_func, _by_name, "unpack_dict", weights, notice, is_whole)


def _adapted(build: Callable[..., nn.Module], adapter: AdapterTable | None) -> Callable[..., nn.Module]:
    if adapter is None or adapter.r is None:
        return build
    from meshwright.cli.adapters import with_adapters

    return lambda vocab_size, seq_len: with_adapters(build(vocab_size, seq_len), adapter)


_AUTO, _RANDOM = "auto", "random"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "consolidated*.pth")


def _weights(table: ModelTable, source: Path | None, folder: Path) -> Path | None:
    """Return where the weights lie that the model starts from; None: nowhere.

    Raises:
        CheckpointError: When they cannot be read.
    """
    path = source if table.weights == _AUTO else folder / Path(table.weights).expanduser()
    if table.weights == _RANDOM or path is None:
        return None
    is_named = table.weights != _AUTO
    if not is_named and not (path.is_dir() and any(True for pattern in _WEIGHTS for _ in path.glob(pattern))):
        return None
    check_weights(path)
    return path


def _by_name(batch: Any, device: torch.device) -> Any:
    moved = to_device(batch, device)
    return {"input_ids": moved} if isinstance(moved, torch.Tensor) else moved


def _from_function(
    function: Callable[..., Any], table: ModelTable, vocab_size: int | None, seq_len: int | None
) -> nn.Module:
    known = {"vocab_size": vocab_size, "seq_len": seq_len}
    fitting = {name: value for name, value in known.items() if value is not None and takes(function, name)}
    model = call_model_reference(function, table.source, {**fitting, **table.args}, "model")
    return model if table.dtype is None else model.to(torch_dtype(table.dtype))


def _from_hf(
    path: Path, table: ModelTable, must_be_causal: bool, vocab_size: int | None, seq_len: int | None
) -> nn.Module:
    config = read_model_config(path, table.args, _KEY)
    _check_sizes(config, vocab_size, seq_len)
    model = model_of_config(config, path, dtype=torch_dtype(table.dtype or "fp32"))
    if must_be_causal and not predicts_next_token(model, config):
        raise ConfigError(
            f"{type(model).__name__} is no causal language model, and text trains next-token prediction",
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


# --- The optimizer

_KEYS = ("weight_decay", "betas", "eps", "momentum")


@dataclass(frozen=True)
class NamedOptimizer:
    """An optimizer that training files can name."""

    build: Callable[..., Optimizer]
    arguments: dict[str, Any] = field(default_factory=dict)
    groups: Callable[..., list[dict[str, Any]]] | None = None
    """``groups(model, **own)`` returns parameter groups; its own keywords are taken out of ``args``."""


_KNOWN: dict[str, NamedOptimizer] = {
    # Fused AdamW is one kernel per update instead of a dozen, on the CPU too.
    "adamw": NamedOptimizer(torch.optim.AdamW, {"fused": True}),
    "sgd": NamedOptimizer(torch.optim.SGD),
    "lamb": NamedOptimizer(Lamb),
    # A training file always sets a learning rate, which relative steps would ignore.
    "adafactor": NamedOptimizer(Adafactor, {"relative_step": False, "scale_parameter": False}),
    "came": NamedOptimizer(CAME),
    "galore": NamedOptimizer(GaLoreAdamW, groups=get_galore_param_groups),
    "galore_8bit": NamedOptimizer(GaLoreAdamW8bit, groups=get_galore_param_groups),
    "muon": NamedOptimizer(Muon, groups=muon_param_groups),
}


@dataclass(frozen=True)
class OptimizerChoice:
    """An optimizer as ``accelerate`` takes it."""

    build: Callable[..., Optimizer]
    arguments: dict[str, Any]
    param_func: Callable[[nn.Module], list[dict[str, Any]]] | None


def optimizer_of(table: OptimizerTable) -> OptimizerChoice:
    """Return the class, keyword arguments and parameter groups of a training file's optimizer.

    Raises:
        ConfigError: When there is no such class, or it does not take a key that is set.
    """
    known = _KNOWN[table.name] if table.name in _KNOWN else NamedOptimizer(_referred(table.name))
    given = {key: value for key in _KEYS if (value := getattr(table, key)) is not None}
    of_groups = _own_keywords(known.groups) & table.args.keys()
    arguments = {key: value for key, value in table.args.items() if key not in of_groups}
    where = {key: f"optimizer.{key}" for key in given} | {key: f"optimizer.args.{key}" for key in arguments}
    _check_keys(table.name, known.build, where)
    options = {key: table.args[key] for key in of_groups}
    if known.groups is get_galore_param_groups:
        options["weight_decay"] = given.get("weight_decay", 0.0)
    groups = known.groups
    return OptimizerChoice(
        known.build,
        {"lr": table.lr, **known.arguments, **given, **arguments},
        None if groups is None else lambda model: groups(model, **options),
    )


def _referred(name: str) -> Callable[..., Optimizer]:
    if ":" in name:
        return resolve_reference(name, "optimizer.name")
    raise ConfigError(
        f"Unknown optimizer {name!r}{did_you_mean(name, _KNOWN)}",
        expected=f"{join_names(_KNOWN)}, or 'module:Class'",
        got=f"optimizer.name = {name!r}",
        fix="correct the name",
    )


def _own_keywords(groups: Callable[..., Any] | None) -> set[str]:
    if groups is None:
        return set()
    return set(list(inspect.signature(groups).parameters)[1:]) - {"weight_decay", "decay"}


def _check_keys(name: str, optimizer: Callable[..., Optimizer], keys: dict[str, str]) -> None:
    parameters = list(inspect.signature(optimizer).parameters.values())[1:]
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return
    known = [each.name for each in parameters]
    for key, where in keys.items():
        if key not in known:
            raise ConfigError(
                f"{name} takes no {key!r}{did_you_mean(key, known)}",
                expected=f"keys from {join_names(known, limit=20)}",
                got=where,
                fix=f"leave {where} out",
            )
