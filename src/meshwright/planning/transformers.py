"""A model of transformers from its configuration alone, built on ``meta``: no weights are read or made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from meshwright.errors import ConfigError, MeshwrightError, ModelError
from meshwright.planning.models import ModuleModel, token_batch

_Made = TypeVar("_Made")
_COUNTS = ("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers", "num_local_experts", "num_experts")
_MOST = 10_000  # layers or experts: more take hours to build, and are a mistake
_LONGEST = 2**24  # tokens of a sample
_LARGEST_SIDE = 8192  # pixels of an image
_AUTO = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM", "AutoModelForImageClassification")


def transformers_model(path: Path, seq: int | None, *, on_meta: bool = True) -> ModuleModel:
    """Reads a ``config.json``, or the directory that holds one, and builds its model.

    The class is the one that ``architectures`` names, else the first automatic class that takes the config.

    Args:
        path: Of the file or directory.
        seq: Tokens of a sample; None: as many as the model has positions. Images need none.
        on_meta: Whether parameters have no values.

    Raises:
        ConfigError: When transformers is not installed, or there is no such file.
        ModelError: When no model can be made of it, or it is too small for ``seq``.
    """
    if not (path / "config.json" if path.is_dir() else path).is_file():
        raise ConfigError(
            "hf: names no transformers config",
            expected="hf:PATH of a config.json, or of a directory that holds one",
            got=str(path),
            fix="correct the path; nothing is downloaded",
        )
    config = _of_transformers(path, lambda transformers: _config(transformers, path))
    # Errors of its own, with what to do.
    seq = None if hasattr(config, "image_size") else _checked_seq(config, seq)
    return _of_transformers(path, lambda transformers: _planned(transformers, config, path, seq, on_meta))


def _config(transformers: Any, path: Path) -> Any:
    # Without the last, transformers asks on the terminal whether to run code that lies beside a config.
    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    config.use_cache = False  # for generation; in training it only holds memory
    for name in _COUNTS:
        count = getattr(config, name, None)
        if isinstance(count, int) and count > _MOST:
            raise ValueError(f"{name} = {count}, and at most {_MOST:,} are built")
    return config


def _planned(transformers: Any, config: Any, path: Path, seq: int | None, on_meta: bool) -> ModuleModel:
    with torch.device("meta" if on_meta else "cpu"):
        module = _of_config(transformers, config)
    if seq is None:
        return ModuleModel(_name(config, path), module, _images(config), model_input_format="unpack_dict")
    ids = token_batch(seq)
    batch = {"input_ids": ids, "labels": ids}
    return ModuleModel(_name(config, path), module, batch, model_input_format="unpack_dict", seq=seq)


def _of_transformers(path: Path, make: Callable[[Any], _Made]) -> _Made:
    """What ``make`` makes with the library, whose errors are of every kind."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "hf: needs transformers, which is not installed",
            expected="an importable package 'transformers'",
            got=str(error),
            fix="pip install 'meshwright[hf]'",
        ) from None
    try:
        return make(transformers)
    except MeshwrightError:
        raise
    except Exception as error:
        raise ModelError(
            f"transformers makes no model of {path}",
            expected="the config of a model such as GPT-2, Llama, BERT or ViT",
            got=f"{type(error).__name__}: {error}",
            fix="correct the config",
        ) from error


def _of_config(transformers: Any, config: Any) -> nn.Module:
    named = next((getattr(transformers, name, None) for name in config.architectures or ()), None)
    if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
        return named(config)
    for name in _AUTO:
        auto = getattr(transformers, name)
        if type(config) in auto._model_mapping:
            return auto.from_config(config)
    raise ModelError(
        f"{type(config).__name__} has no model with a loss",
        expected=f"a config that one of {', '.join(_AUTO)} takes, or one that names its architectures",
        got=str(config.architectures),
        fix='add "architectures": ["…"] to the config',
    )


def _name(config: Any, path: Path) -> str:
    folder = path if path.is_dir() else path.parent
    return f"{config.model_type} ({folder.name or folder.resolve().name})"


def _images(config: Any) -> dict[str, torch.Tensor]:
    size = config.image_size if isinstance(config.image_size, (list, tuple)) else (config.image_size,) * 2
    if max(size) > _LARGEST_SIDE:
        raise ValueError(f"image_size = {config.image_size}")
    pixels = torch.zeros(2, getattr(config, "num_channels", 3), *size)
    return {"pixel_values": pixels, "labels": torch.zeros(2, dtype=torch.long)}


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
