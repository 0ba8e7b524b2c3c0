"""Models that are known by name, and models written as a family with its dimensions."""

from __future__ import annotations

import dataclasses
import difflib
import re
from typing import Any, get_args

from meshwright.errors import ModelError, did_you_mean, join_names
from meshwright.planner.family_shape import Family, Shape

# (layers, hidden, heads, kv_heads, ffn, vocab, seq), from the models' papers and configurations.
Dims = tuple[int, int, int, int, int, int, int]
LLAMA: dict[tuple[str, float], Dims] = {
    ("3", 1): (16, 2048, 32, 8, 8192, 128256, 8192),
    ("3", 3): (28, 3072, 24, 8, 8192, 128256, 8192),
    ("3", 8): (32, 4096, 32, 8, 14336, 128256, 8192),
    ("3", 70): (80, 8192, 64, 8, 28672, 128256, 8192),
    ("3", 405): (126, 16384, 128, 8, 53248, 128256, 8192),
    ("2", 7): (32, 4096, 32, 32, 11008, 32000, 4096),
    ("2", 13): (40, 5120, 40, 40, 13824, 32000, 4096),
    ("2", 34): (48, 8192, 64, 8, 22016, 32000, 4096),
    ("2", 70): (80, 8192, 64, 8, 28672, 32000, 4096),
    ("1", 30): (60, 6656, 52, 52, 17920, 32000, 2048),
    ("1", 65): (80, 8192, 64, 64, 22016, 32000, 2048),
}
_TIED_LLAMA = (("3", 1), ("3", 3))  # of all Llamas, only these share embedding and head
# Brown et al. 2020, Table 2.1, and those of Megatron-LM beyond.
GPT: dict[float, tuple[int, int, int]] = {
    0.125: (12, 768, 12), 0.35: (24, 1024, 16), 0.76: (24, 1536, 16), 1.3: (24, 2048, 16), 1.5: (48, 1600, 25),
    2.7: (32, 2560, 32), 6.7: (32, 4096, 32), 13: (40, 5120, 40), 20: (44, 6144, 64), 22: (48, 6144, 64),
    30: (48, 7168, 56), 66: (64, 9216, 72), 175: (96, 12288, 96), 530: (105, 20480, 128), 1000: (128, 25600, 160),
}  # fmt: skip
MIXTRAL: dict[str, tuple[Dims, int, int]] = {
    "8x7b": ((32, 4096, 32, 8, 14336, 32000, 4096), 8, 2),
    "8x22b": ((56, 6144, 48, 8, 16384, 32768, 4096), 8, 2),
}
_GPT2 = {"gpt2": 0.125, "gpt2-medium": 0.35, "gpt2-xl": 1.5}  # Radford et al. 2019
_GPT2_LARGE = (36, 1280, 20)
_GPT_VOCAB = 50257
_LIKE_LLAMA_3 = ("3", "3.1", "3.2", "3.3")  # the dimensions of a size are the same in all of them
_REQUIRED = ("layers", "hidden", "heads", "vocab")
_USUAL_SEQ = {"gpt": 1024, "llama": 4096, "mixtral": 4096}
_LONGEST = 15  # digits
_KEYS = tuple(field.name for field in dataclasses.fields(Shape) if field.name != "family")


def known_models() -> dict[str, Shape]:
    """Every model that is known, by name: ``gpt2``, ``gpt-3-175b``, ``llama-2-7b``, ``llama-3.1-405b``, …"""
    gpt2 = {name: GPT[size] for name, size in _GPT2.items()} | {"gpt2-large": _GPT2_LARGE}
    found = {name: _learned_positions(dims, 1024) for name, dims in gpt2.items()}
    found |= {f"gpt-3-{_size(size)}": _learned_positions(dims, 2048) for size, dims in GPT.items()}
    for (version, size), dims in LLAMA.items():
        for each in _LIKE_LLAMA_3 if version == "3" else (version,):
            found[f"llama-{each}-{_size(size)}"] = _gated("llama", dims, tied=(version, size) in _TIED_LLAMA)
    for name, (dims, experts, per_token) in MIXTRAL.items():
        shape = _gated("mixtral", dims)
        found[f"mixtral-{name}"] = dataclasses.replace(shape, experts=experts, experts_per_token=per_token)
    return found


def parse_family(text: str) -> Shape:
    """Reads a model by its dimensions.

    Args:
        text: A family with its dimensions, ``"gpt:layers=24,hidden=1024,heads=16,vocab=50304"`` (the other keys are
            those of ``Shape``), or a known model, whose dimensions may be changed: ``"llama-3-8b:seq=4096"``.

    Raises:
        ModelError: Naming what is not known, absent or no number.
    """
    name, _, rest = text.strip().partition(":")
    name, known = _plain(name), known_models()
    given = _dimensions(rest)
    if name in known:
        return dataclasses.replace(known[name], **given)
    if name not in get_args(Family):
        nearest = difflib.get_close_matches(name, known, n=len(known), cutoff=0.0)
        raise ModelError(
            f"{name!r} is neither a family nor a known model{did_you_mean(name, (*get_args(Family), *known))}",
            expected=f"a family ({join_names(get_args(Family))}) with dimensions, or one of {join_names(nearest, 8)}",
            got=repr(text),
            fix="correct the name, or write family:layers=…,hidden=…,heads=…,vocab=…",
        )
    absent = [key for key in _REQUIRED if key not in given]
    if absent:
        raise ModelError(
            f"The model {text!r} has too few dimensions",
            expected=f"{join_names(_REQUIRED)}, and optionally {join_names(k for k in _KEYS if k not in _REQUIRED)}",
            got=f"no {join_names(absent)}",
            fix=f"add {join_names(f'{key}=…' for key in absent)}",
        )
    return Shape(**{"seq": _USUAL_SEQ[name], **given, "family": name})


def _plain(name: str) -> str:
    """``Meta-Llama-3-8B`` and ``llama3-8b`` are ``llama-3-8b``."""
    name = re.sub(r"[\s_]+", "-", name.strip().lower())
    name = re.sub(r"^(meta-|mistralai/|meta-llama/)+", "", name)
    name = re.sub(r"^llama(\d)", r"llama-\1", name)
    return re.sub(r"^gpt3", "gpt-3", name)


def _dimensions(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = (each.strip() for each in part.partition("="))
        if key not in _KEYS:
            raise ModelError(
                f"A model has no dimension {key!r}{did_you_mean(key, _KEYS)}",
                expected=f"keys from {join_names(_KEYS, 20)}",
                got=repr(part),
                fix="correct the key or leave it out",
            )
        if key in found:
            raise ModelError(
                f"The dimension {key!r} is given twice",
                expected="every dimension once",
                got=repr(text),
                fix="keep one of them",
            )
        found[key] = _flag(value) if key == "tied" else _number(key, value)
    return found


def _number(key: str, value: str) -> int:
    if not re.fullmatch(r"\d+(?:_\d+)*", value, re.ASCII) or len(value) > _LONGEST:
        raise ModelError(
            f"The dimension {key!r} is no number",
            expected=f"a positive whole number, such as {key}=1024",
            got=repr(value),
            fix="correct the number",
        )
    return int(value)


def _flag(value: str) -> bool:
    if value.lower() not in ("true", "false", "1", "0"):
        raise ModelError("tied is true or false", expected="true or false", got=repr(value), fix="correct the value")
    return value.lower() in ("true", "1")


def _learned_positions(dims: tuple[int, int, int], positions: int) -> Shape:
    """The table keeps its published size whatever the samples' length: it is a part of the model."""
    return Shape("gpt", *dims, vocab=_GPT_VOCAB, seq=positions, positions=positions)


def _gated(family: Family, dims: Dims, *, tied: bool = False) -> Shape:
    layers, hidden, heads, kv_heads, ffn, vocab, seq = dims
    return Shape(family, layers, hidden, heads, vocab, seq, kv_heads=kv_heads, ffn=ffn, tied=tied)


def _size(billions: float) -> str:
    """As models are called: 125m, 6.7b, 1t."""
    if billions < 1:
        return f"{billions * 1000:.0f}m"
    return f"{billions / 1000:g}t" if billions >= 1000 else f"{billions:g}b"
