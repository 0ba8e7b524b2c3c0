"""Build transformers models from their configurations alone: on ``meta`` to plan, with random values to train."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from meshwright.errors import ConfigError, MeshwrightError, ModelError
from meshwright.nn import setting_of
from meshwright.planner.model_shapes import Family, Shape
from meshwright.planner.outlines import own_width
from meshwright.planner.workload import ModuleModel, token_batch
from meshwright.runtime.lazy import optional_library

_MOST_LAYERS = 1_000  # as many as the deepest Transformers that were published (DeepNet, Wang et al. 2022)
_MOST_EXPERTS = 10_000
_MOST_MODULES = 200_000  # half a minute
_MOST_PIXELS = 2**27  # values of a sample: half a GiB
_COUNTS = {re.compile(r"(layers?|depths?|blocks)$"): _MOST_LAYERS, re.compile(r"experts$"): _MOST_EXPERTS}


def check_values(path: Path, changes: Mapping[str, Any]) -> None:
    """Refuse excessive numbers of layers and experts, and code from elsewhere, before anything is built.

    Nested configurations are checked, too.

    Args:
        path: Path of a ``config.json``, or of its directory.
        changes: Values that replace those of the file.

    Raises:
        ValueError: Naming the key; also when the file is no JSON.
    """
    file = path / "config.json" if path.is_dir() else path
    for name, value in (*_pairs(json.loads(file.read_text(encoding="utf-8"))), *_pairs(dict(changes))):
        for key, most in _COUNTS.items():
            if isinstance(value, int | float) and key.search(name) and value > most:
                raise ValueError(f"{name} = {value}, and at most {most:,} are built")
        kernels = _KERNELS.search(name)
        if kernels is not None and isinstance(value, str):
            _check_kernels(kernels[1], value)


def _pairs(tree: object, name: str = "") -> Iterator[tuple[str, float | str]]:
    """Yield keys and their numbers and texts; those of a list, or of a table of kernels, have its key."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _pairs(value, name if _KERNELS.search(name) else str(key))
    elif isinstance(tree, list):
        for value in tree:
            yield from _pairs(value, name)
    elif isinstance(tree, int | float | str) and not isinstance(tree, bool):
        yield name, tree


# [Note: kernels from elsewhere] A configuration may name implementations of attention and of experts. Some names make
# transformers download a package of kernels and import it: "owner/repo", and names whose own package is not installed.
# Only names of what is here already are let through, in the file and in the configuration that transformers makes of it
# (which may call a key by another name). Meanwhile transformers' hub is offline: whatever else wants to be downloaded
# fails.

_KERNELS = re.compile(r"^_?(attn|experts)_implementation(_internal)?$")
_OWN_KERNELS = {
    "attn": ("eager", "sdpa", "flex_attention"),
    "experts": ("eager", "batched_mm", "grouped_mm"),
}


def _check_kernels(kind: str, name: str | None) -> None:
    if name is None or name in _OWN_KERNELS[kind] or (kind == "attn" and _is_installed(name)):
        return
    own = ", ".join(_OWN_KERNELS[kind])
    raise ValueError(f"{kind}_implementation = {name!r} may be downloaded and run; what is here already is {own}")


def _is_installed(name: str) -> bool:
    """Return whether an implementation of attention is a package of flash attention that is installed."""
    version = re.fullmatch(r"flash_attention_(\d)", name)
    known = getattr(_transformers().utils, f"is_flash_attn_{version[1]}_available", None) if version else None
    return known is not None and bool(known())


def _check_configs(config: Any) -> None:
    """Refuse kernels from elsewhere in a configuration of transformers and in those inside it."""
    left, kind = [config], _transformers().PreTrainedConfig
    met: set[int] = set()
    while left:
        each = left.pop()
        if id(each) in met:
            continue
        met.add(id(each))
        if isinstance(each, kind):
            _check_kernels("attn", getattr(each, "_attn_implementation", None))
            _check_kernels("experts", getattr(each, "_experts_implementation", None))
            left += vars(each).values()
        elif isinstance(each, list | tuple | dict):
            left += each.values() if isinstance(each, dict) else each


@contextmanager
def _offline() -> Iterator[None]:
    """Let transformers' hub refuse every download; see [Note: kernels from elsewhere]."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextmanager
def few_modules() -> Iterator[None]:
    """Stop building a model of more modules than anyone trains.

    Raises:
        ValueError: At the first excess module.
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


# --- Configurations and models

_HF = "hf:"
_BY_FUNCTION = "let functions make the model and a batch: --model MODULE:FUNCTION --sample MODULE:FUNCTION"
_LONGEST = 2**24  # tokens of a sample
_FAMILIES: dict[str, Family] = {"GPT2Config": "gpt", "LlamaConfig": "llama", "MixtralConfig": "mixtral"}
_CAUSAL, _MASKED = "AutoModelForCausalLM", "AutoModelForMaskedLM"
_AUTO = (_CAUSAL, _MASKED, "AutoModelForSeq2SeqLM", "AutoModelForImageClassification")


def transformers_model(path: Path, seq: int | None, dtype: torch.dtype = torch.float32) -> ModuleModel:
    """Build the model of a ``config.json`` to plan for, on ``meta``, with a sample batch.

    Args:
        path: Path of the file, or of its directory.
        seq: Tokens per sample; None: the model's number of positions. Images need none. Whisper's are those it writes.
        dtype: Type of its parameters: fp32 as ``meshwright train`` makes them, whatever the weights that somebody
            publishes are stored in.

    Raises:
        ConfigError: When transformers is not installed, or there is no such file.
        ModelError: When no model can be built from it, or it is too small for ``seq``.
    """
    config = read_model_config(path)
    has_encoder = getattr(config, "is_encoder_decoder", False)  # a decoder alone takes this from its config
    module: Any = model_of_config(config, path, on_meta=True, dtype=dtype)
    if (of_images := _config_of_images(config, module)) is not None:
        _check_takes(module, "pixel_values")
        with _naming_config(path):
            images = _images(of_images)
        return ModuleModel(_name(config, path), module, images, model_input_format="unpack_dict")
    if config.model_type == "whisper" and _is_of(module, config, "AutoModelForSpeechSeq2Seq"):
        seq = _checked_seq(config, seq)
        with _naming_config(path):
            speech = _speech(config, seq)
        return ModuleModel(_name(config, path), module, speech, model_input_format="unpack_dict", seq=seq)
    answers = _is_of(module, config, "AutoModelForQuestionAnswering")
    _check_takes(module, "input_ids", "start_positions" if answers else "labels")
    if has_encoder and not module.config.is_encoder_decoder:
        raise _needs_sample(f"{type(module).__name__}, the decoder alone of a model with an encoder")
    seq = _checked_seq(config, seq)
    ids = token_batch(seq)
    batch = {"input_ids": ids, **_targets(module, config, ids)}
    shape = shape_of_config(config, seq) if predicts_next_token(module, config) else None
    return ModuleModel(_name(config, path), module, batch, model_input_format="unpack_dict", seq=seq, shape=shape)


# [Note: one front end] A model by its name or dimensions is the configuration with these dimensions, built on ``meta``
# and traced like any other: ``llama-3-8b`` and ``hf:`` its config.json are one prediction. The keys that dimensions do
# not say are those of transformers' class, as in a config.json that leaves them out; but a GPT has no dropout and GELU
# as one kernel, as those that are trained today, where GPT2Config would have masks and eight kernels. Formulas
# (``family_workload.py``) find the candidates of a search, whichever way the model was named, and what is found is
# traced. They stand in where transformers is not installed and for shapes that it has no class for; and they describe
# runs of others, whose kernels are not ours.


_AS_TODAY = {
    "activation_function": "gelu_pytorch_tanh",  # the same function as GPT-2's gelu_new, in one kernel
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}


@functools.lru_cache(maxsize=8)
def model_of_shape(name: str, shape: Shape, dtype: torch.dtype = torch.float32) -> ModuleModel | None:
    """Build the model of some dimensions on ``meta``, with a sample batch; see [Note: one front end].

    Calls for the same model share it, and so its traces.

    Args:
        name: Name for reports.
        shape: The model.
        dtype: Type of its parameters.

    Returns:
        The model; None where transformers is not installed, or has no class for such a model.
    """
    config = config_of_shape(shape)
    if config is None:
        return None
    module = model_of_config(config, Path(name), on_meta=True, dtype=dtype)
    batch = {"input_ids": token_batch(shape.seq)}
    return ModuleModel(name, module, batch, model_input_format="unpack_dict", seq=shape.seq, shape=shape)


def config_of_shape(shape: Shape) -> Any | None:
    """Return the configuration of a model by its dimensions; None as for :func:`model_of_shape`."""
    if not _has_transformers():
        return None
    transformers, kv_heads = _transformers(), shape.kv_heads or shape.heads
    own_width = {} if shape.head_dim is None else {"head_dim": shape.head_dim}
    outside = {"vocab_size": shape.vocab, "tie_word_embeddings": shape.is_tied, "use_cache": False}
    if shape.family == "gpt":
        if kv_heads != shape.heads or own_width:
            return None
        return transformers.GPT2Config(
            n_layer=shape.layers,
            n_embd=shape.hidden,
            n_head=shape.heads,
            n_inner=shape.ffn_width,
            n_positions=shape.positions or shape.seq,
            **_AS_TODAY,
            **outside,
        )
    inside = {
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn_width,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": shape.seq,
        **own_width,
    }
    if shape.family == "llama":
        return transformers.LlamaConfig(**inside, **outside)
    experts = {"num_local_experts": shape.experts, "num_experts_per_tok": shape.experts_per_token}
    return transformers.MixtralConfig(**inside, **experts, **outside)


def why_formulas(shape: Shape) -> str:
    """Say why the formulas of a family stand in for a model that :func:`model_of_shape` does not build."""
    reason = f"transformers has no {shape.family} with fewer heads of keys than of queries, or a width of their own"
    if not _has_transformers():
        reason = "transformers is not installed (pip install 'meshwright[hf]')"
    return f"the model's own operators: formulas of the family {shape.family} stand in, because {reason}"


def _has_transformers() -> bool:
    return importlib.util.find_spec("transformers") is not None


def shape_of_config(config: Any, seq: int) -> Shape | None:
    """Return the dimensions of a configuration, with samples of ``seq`` tokens; None where they do not say it all."""
    family = _FAMILIES.get(type(config).__name__)
    if family is None:
        return None
    if family == "gpt":
        dims = (config.n_layer, config.n_embd, config.n_head, config.vocab_size, seq)
        return Shape("gpt", *dims, None, config.n_inner, config.tie_word_embeddings, positions=config.n_positions)
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        return None
    inside: dict[str, Any] = {"kv_heads": config.num_key_value_heads, "head_dim": own_width(config)}
    if family == "mixtral":
        inside |= {"experts": config.num_local_experts, "experts_per_token": config.num_experts_per_tok}
    dims = (config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.vocab_size, seq)
    return Shape(family, *dims, ffn=config.intermediate_size, tied=config.tie_word_embeddings, **inside)


def _check_takes(module: Any, name: str, target: str = "labels") -> None:
    """Refuse models that are not called with one input and a target, such as those of speech or of pairs."""
    taken = inspect.signature(module.forward).parameters
    # Not all models of images say what their main input is called.
    if not {name, target} <= taken.keys() or (name == "input_ids" and module.main_input_name != name):
        raise _needs_sample(f"{type(module).__name__} of {', '.join(list(taken)[:3])}, …")


def _needs_sample(got: str) -> ModelError:
    return ModelError(
        "No sample can be made for this model from its config alone",
        expected="a model of text (input_ids and labels), of images (pixel_values and labels), or Whisper",
        got=got,
        fix=_BY_FUNCTION,
    )


def config_path(model: str, folder: Path | None = None) -> Path | None:
    """Return the path of a model ``hf:PATH``, relative to a folder; None for other models."""
    if not model.startswith(_HF):
        return None
    return (folder or Path()) / Path(model.removeprefix(_HF)).expanduser()


def check_config_path(path: Path, key: str = _HF) -> None:
    """Refuse a path that is neither a ``config.json`` nor a directory with one.

    Raises:
        ConfigError: Naming ``key``, which set the path.
    """
    if not (path / "config.json" if path.is_dir() else path).is_file():
        raise ConfigError(
            f"{key} names no transformers config",
            expected="hf:PATH of a config.json, or of a directory that holds one",
            got=str(path),
            fix="correct the path; nothing is downloaded",
        )


def read_model_config(path: Path, changes: Mapping[str, Any] | None = None, key: str = _HF) -> Any:
    """Return the configuration of a ``config.json``, with the cache for generation off.

    Args:
        path: Path of the file, or of its directory.
        changes: Values that replace those of the file.
        key: The key or option that set the path, for errors.

    Raises:
        ConfigError: When transformers is not installed, there is no such file, or it has no such keys.
        ModelError: When it is no configuration that transformers knows.
    """
    check_config_path(path, key)
    transformers = _transformers(key)
    with _naming_config(path), _offline():
        check_values(path, changes or {})
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
    config.use_cache = False  # useless memory in training
    return config


def model_of_config(config: Any, path: Path, *, on_meta: bool = False, dtype: torch.dtype | None = None) -> nn.Module:
    """Return the model of a configuration, with random weights or on ``meta``.

    Its class is the one that ``architectures`` names, else that of the first automatic class that knows the
    configuration; encoders that could be decoders (BERT) become masked language models.

    Args:
        config: A configuration of :func:`read_model_config`.
        path: Where it was read, for errors.
        on_meta: Whether to build on ``meta``; otherwise on torch's default device.
        dtype: Type of its parameters; None: fp32, or what the configuration says, as its class does.

    Raises:
        ModelError: When no model can be built from it.
    """
    device = torch.device("meta") if on_meta else nullcontext()
    with _naming_config(path), _offline(), few_modules(), device, _default_dtype(dtype):
        _check_configs(config)
        if dtype is not None:
            config.dtype = dtype
        return _of_config(_transformers(), config)


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def predicts_next_token(module: nn.Module, config: Any) -> bool:
    """Return whether the model is a causal language model, whose logits predict the next token."""
    return _is_of(module, config, _CAUSAL) and not _is_encoder(config)


def _is_of(module: nn.Module, config: Any, auto: str) -> bool:
    """Return whether an automatic class of transformers makes such a module of a configuration."""
    mapping = getattr(_transformers(), auto)._model_mapping
    return type(config) in mapping and isinstance(module, mapping[type(config)])


def _transformers(key: str = _HF) -> ModuleType:
    return optional_library("transformers", key, "pip install 'meshwright[hf]'")


@contextmanager
def _naming_config(path: Path) -> Iterator[None]:
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
    """Return whether the attention is bidirectional, as in masked language models without ``is_decoder``."""
    masked = getattr(_transformers(), _MASKED)._model_mapping
    return type(config) in masked and not getattr(config, "is_decoder", False)


def _name(config: Any, path: Path) -> str:
    folder = path if path.is_dir() else path.parent
    return f"{config.model_type} ({folder.name or folder.resolve().name})"


def _config_of_images(config: Any, module: Any) -> Any:
    """Return the config that says how large images are; None for what does not take them alone."""
    if hasattr(config, "image_size"):
        return config
    nested = getattr(config, "vision_config", None)  # of CLIP and SigLIP as classifiers
    return nested if module.main_input_name == "pixel_values" and hasattr(nested, "image_size") else None


def _images(config: Any) -> dict[str, torch.Tensor]:
    size = config.image_size if isinstance(config.image_size, (list, tuple)) else (config.image_size,) * 2
    shape = (2, getattr(config, "num_channels", 3), *size)
    check_pixels(shape)
    return {"pixel_values": torch.zeros(shape), "labels": torch.zeros(2, dtype=torch.long)}


def _speech(config: Any, seq: int) -> dict[str, torch.Tensor]:
    """Return a sample of speech, whole windows of 30 s as Whisper takes them, and of ``seq`` tokens it writes."""
    shape = (2, config.num_mel_bins, 2 * config.max_source_positions)
    check_pixels(shape)
    return {"input_features": torch.zeros(shape), "labels": token_batch(seq)}


def _targets(module: nn.Module, config: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what a model of text computes its loss from, beside its tokens, ``[2, seq]``."""
    if predicts_next_token(module, config):
        return {}  # as ``meshwright train``, with a loss of its own: the model's would copy the logits in fp32
    if _is_of(module, config, "AutoModelForQuestionAnswering"):
        return dict.fromkeys(("start_positions", "end_positions"), torch.zeros(2, dtype=torch.long))
    if not _is_of(module, config, "AutoModelForSequenceClassification"):
        return {"labels": ids}
    if config.problem_type == "multi_label_classification":
        return {"labels": torch.zeros(2, config.num_labels)}
    return {"labels": torch.zeros(2, dtype=torch.long if config.num_labels > 1 else torch.float32)}


_POSITIONS = ("max_position_embeddings", "max_target_positions")  # the latter of what Whisper writes


def _checked_seq(config: Any, seq: int | None) -> int:
    known = {name: setting_of(config, name) for name in _POSITIONS}
    name, positions = next(((n, size) for n, size in known.items() if type(size) is int and size > 0), ("", None))
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
            expected=f"at most {positions} tokens, its {name}",
            got=str(seq),
            fix="shorten seq, or change the config",
        )
    length = seq if seq is not None else int(positions or 0)
    if length > _LONGEST:
        raise ModelError(
            "A sample is too long to plan for",
            expected=f"at most {_LONGEST:,} tokens",
            got=f"{length:,}",
            fix="give another seq (--seq)",
        )
    return length
