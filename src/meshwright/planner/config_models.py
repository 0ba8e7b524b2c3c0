"""Build transformers models from their configurations alone, without reading weights."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from meshwright.errors import ConfigError, MeshwrightError, ModelError
from meshwright.planner.workload import ModuleModel, token_batch

_MOST_LAYERS = 1_000  # as many as the deepest Transformers that were published (DeepNet, Wang et al. 2022)
_MOST_EXPERTS = 10_000
_MOST_MODULES = 200_000  # half a minute
_MOST_PIXELS = 2**27  # values of a sample: half a GiB
_COUNTS = {re.compile(r"(layers?|depths?|blocks)$"): _MOST_LAYERS, re.compile(r"experts$"): _MOST_EXPERTS}


def check_counts(path: Path, changes: Mapping[str, Any]) -> None:
    """Refuse numbers of layers and experts before anything is made of them, in configurations within others too.

    Args:
        path: Of a ``config.json``, or of the directory that holds one.
        changes: Values that replace those of the file.

    Raises:
        ValueError: Naming the key; also where the file is no JSON.
    """
    file = path / "config.json" if path.is_dir() else path
    for name, value in (*_pairs(json.loads(file.read_text(encoding="utf-8"))), *_pairs(dict(changes))):
        for key, most in _COUNTS.items():
            if key.search(name) and value > most:
                raise ValueError(f"{name} = {value}, and at most {most:,} are built")


def _pairs(tree: object, name: str = "") -> Iterator[tuple[str, float]]:
    """Keys and their numbers; those of a list have its key."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _pairs(value, str(key))
    elif isinstance(tree, list):
        for value in tree:
            yield from _pairs(value, name)
    elif isinstance(tree, (int, float)) and not isinstance(tree, bool):
        yield name, tree


@contextmanager
def few_modules() -> Iterator[None]:
    """End the building of a model of more modules than anyone trains.

    Raises:
        ValueError: At the first module too many.
    """
    left = _MOST_MODULES

    def count(*_: object) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(f"the model has more than {_MOST_MODULES:,} modules")

    hook = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def check_pixels(shape: tuple[int, ...]) -> None:
    """Refuse a sample of images that would fill the memory.

    Raises:
        ValueError: Naming its shape.
    """
    if prod(shape) > _MOST_PIXELS:
        raise ValueError(f"a sample would be of shape {list(shape)}, and at most {_MOST_PIXELS:,} values are made")


# --- Models of transformers from their configurations alone: no weights are read. For planning, on ``meta``; for
# training, with random values.

_BY_FUNCTION = "let functions make the model and a batch: --model MODULE:FUNCTION --sample MODULE:FUNCTION"
_LONGEST = 2**24  # tokens of a sample
_CAUSAL, _MASKED = "AutoModelForCausalLM", "AutoModelForMaskedLM"
_AUTO = (_CAUSAL, _MASKED, "AutoModelForSeq2SeqLM", "AutoModelForImageClassification")


def transformers_model(path: Path, seq: int | None, *, on_meta: bool = True) -> ModuleModel:
    """Read a ``config.json``, or the directory that holds one, and build its model with a sample for it.

    Args:
        path: Of the file or directory.
        seq: Tokens of a sample; None: as many as the model has positions. Images need none.
        on_meta: Whether parameters have no values.

    Raises:
        ConfigError: When transformers is not installed, or there is no such file.
        ModelError: When no model can be made of it, or it is too small for ``seq``.
    """
    config = read_model_config(path)
    has_encoder = getattr(config, "is_encoder_decoder", False)  # a decoder alone takes this from its config
    module: Any = model_of_config(config, path, on_meta=on_meta)
    if hasattr(config, "image_size"):
        _check_takes(module, "pixel_values")
        with _told(path):
            images = _images(config)
        return ModuleModel(_name(config, path), module, images, model_input_format="unpack_dict")
    _check_takes(module, "input_ids")
    if has_encoder and not module.config.is_encoder_decoder:
        raise _needs_sample(f"{type(module).__name__}, the decoder alone of a model with an encoder")
    seq = _checked_seq(config, seq)
    ids = token_batch(seq)
    batch = {"input_ids": ids, "labels": ids}
    return ModuleModel(_name(config, path), module, batch, model_input_format="unpack_dict", seq=seq)


def _check_takes(module: Any, name: str) -> None:
    """Refuse what is not called with one kind of input and labels, such as a model of speech or of pairs."""
    taken = inspect.signature(module.forward).parameters
    # What a model of images calls its main input is not told by all of them.
    if not {name, "labels"} <= taken.keys() or (name == "input_ids" and module.main_input_name != name):
        raise _needs_sample(f"{type(module).__name__} of {', '.join(list(taken)[:3])}, …")


def _needs_sample(got: str) -> ModelError:
    return ModelError(
        "No sample can be made for this model from its config alone",
        expected="a model of text (input_ids and labels), or of images (pixel_values and labels)",
        got=got,
        fix=_BY_FUNCTION,
    )


def check_config_path(path: Path, key: str = "hf:") -> None:
    """Refuse a path that is no ``config.json``, nor a directory that holds one.

    Raises:
        ConfigError: Naming ``key``, where it was written.
    """
    if not (path / "config.json" if path.is_dir() else path).is_file():
        raise ConfigError(
            f"{key} names no transformers config",
            expected="hf:PATH of a config.json, or of a directory that holds one",
            got=str(path),
            fix="correct the path; nothing is downloaded",
        )


def read_model_config(path: Path, changes: Mapping[str, Any] | None = None, key: str = "hf:") -> Any:
    """Return the configuration in a ``config.json`` or in the directory that holds one, without a cache for generation.

    Args:
        path: Of the file or directory.
        changes: Values that replace those of the file.
        key: Where the path was written, for errors.

    Raises:
        ConfigError: When transformers is not installed, there is no such file, or it has no such keys.
        ModelError: When it is no configuration that transformers knows.
    """
    check_config_path(path, key)
    transformers = _transformers(key)
    with _told(path):
        check_counts(path, changes or {})
        # Without the last, transformers asks on the terminal whether to run code that lies beside a config.
        config = transformers.AutoConfig.from_pretrained(
            path, **{**(changes or {}), "local_files_only": True, "trust_remote_code": False}
        )
    unknown = [name for name in changes or {} if not hasattr(config, name)]
    if unknown:
        raise ConfigError(
            f"{type(config).__name__} does not have all of the keys that shall be changed",
            expected="keys of the configuration",
            got=", ".join(unknown),
            fix="correct them",
        )
    config.use_cache = False  # in training it only holds memory
    return config


def model_of_config(config: Any, path: Path, *, on_meta: bool = False) -> nn.Module:
    """Return the model of a configuration, with random weights, or with none on ``meta``.

    The class is the one that ``architectures`` names, else the first automatic class that takes the configuration; of
    one that could be a decoder and is not (BERT's), the one for masked language models.

    Args:
        config: As :func:`read_model_config` returns it.
        path: Where it was read, for errors.
        on_meta: Whether parameters have no values.

    Raises:
        ModelError: When no model can be made of it.
    """
    with _told(path), few_modules(), torch.device("meta" if on_meta else "cpu"):
        return _of_config(_transformers(), config)


def predicts_next_token(module: nn.Module, config: Any) -> bool:
    """Return whether a model's logits are those of the next token: it is a causal language model, and no encoder."""
    mapping = getattr(_transformers(), _CAUSAL)._model_mapping
    return type(config) in mapping and isinstance(module, mapping[type(config)]) and not _is_encoder(config)


def _transformers(key: str = "hf:") -> ModuleType:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"{key} needs transformers, which is not installed",
            expected="an importable package 'transformers'",
            got=str(error),
            fix="pip install 'meshwright[hf]'",
        ) from None
    return transformers


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except MeshwrightError:
        raise
    except Exception as error:
        raise ModelError(
            f"transformers makes no model of {path}",
            expected="the config of a model such as GPT-2, Llama, BERT or ViT",
            got=f"{type(error).__name__}: {error}",
            fix="correct the config",
        ) from error


def _of_config(transformers: ModuleType, config: Any) -> nn.Module:
    named = next((getattr(transformers, name, None) for name in config.architectures or ()), None)
    if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
        return named(config)
    for name in (_MASKED, *_AUTO) if _is_encoder(config) else _AUTO:
        auto = getattr(transformers, name)
        if type(config) in auto._model_mapping:
            return auto.from_config(config)
    raise ModelError(
        f"{type(config).__name__} has no model with a loss",
        expected=f"a config that one of {', '.join(_AUTO)} takes, or one that names its architectures",
        got=str(config.architectures),
        fix=f'add "architectures": ["…"] to the config; or {_BY_FUNCTION}',
    )


def _is_encoder(config: Any) -> bool:
    """Return whether it is of a kind whose attention sees what follows unless ``is_decoder`` says otherwise."""
    masked = getattr(_transformers(), _MASKED)._model_mapping
    return type(config) in masked and not getattr(config, "is_decoder", False)


def _name(config: Any, path: Path) -> str:
    folder = path if path.is_dir() else path.parent
    return f"{config.model_type} ({folder.name or folder.resolve().name})"


def _images(config: Any) -> dict[str, torch.Tensor]:
    size = config.image_size if isinstance(config.image_size, (list, tuple)) else (config.image_size,) * 2
    shape = (2, getattr(config, "num_channels", 3), *size)
    check_pixels(shape)
    return {"pixel_values": torch.zeros(shape), "labels": torch.zeros(2, dtype=torch.long)}


def _checked_seq(config: Any, seq: int | None) -> int:
    positions = getattr(config, "max_position_embeddings", None)
    positions = positions if isinstance(positions, int) and positions > 0 else None
    if seq is None and positions is None:
        raise ConfigError(
            "The length of a sample is not known",
            expected="seq, in tokens",
            got=f"none, and a {type(config).__name__} without max_position_embeddings",
            fix="give seq (--seq)",
        )
    if seq is not None and positions is not None and seq > positions:
        raise ModelError(
            "The model is too small for seq",
            expected=f"at most {positions} tokens, its max_position_embeddings",
            got=str(seq),
            fix="shorten seq, or change the config",
        )
    length = seq if seq is not None else int(positions or 0)
    if length > _LONGEST:
        raise ModelError(
            "A sample is too long to be planned for",
            expected=f"at most {_LONGEST:,} tokens",
            got=f"{length:,}",
            fix="give another seq (--seq)",
        )
    return length
