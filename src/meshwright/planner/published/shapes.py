"""Dimensions that a table leaves out: of models by name, of others from their number of parameters."""

from __future__ import annotations

import math
import re

from meshwright.planner.family_shape import Family, Shape
from meshwright.planner.known_models import GPT, LLAMA, MIXTRAL, Dims
from meshwright.planner.published.convention import Convention
from meshwright.planner.published.figures import sample_length
from meshwright.planner.published.named import is_other, named_dims
from meshwright.planner.published.rows import Row

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([mbt])(?![a-z])", re.IGNORECASE)
# "Qwen3_30B_a3B" (so many active), "8x7B", and names that do not say: few of their parameters compute for one token.
_EXPERTS = re.compile(
    r"[ _-]a\d+(\.\d+)?b\b|\d+x\d+b|moe|mixtral|dbrx|grok|kimi|deepseek[ _-]?v[23]|gpt[ _-]?oss|llama-?4|nemotron_3"
)
# Nemotron to the fourth generation has a squared ReLU without a gate (arXiv 2402.16819); Llama-Nemotron is a Llama.
_GPT_WORDS = ("gpt", "mpt", "megatron", "opt", "bloom", "bert", "turing", "mt-nlg", "pythia", "falcon", "nemotron")
_LLAMA_WORDS = ("llama", "mistral", "qwen", "granite", "yi-", "gemma", "baichuan", "internlm", "olmo")
_MOST_LAYERS = 5000  # what is more is a number of something else
_CLOSE = 0.2  # a known model stands for another of its family whose size differs by no more


def shape_of(row: Row, convention: Convention, assumed: list[str]) -> Shape | None:
    """The model of a row; what the table leaves out is assumed, and said. None: too little is known."""
    family = _family(row, convention)
    known = _known(row, family, assumed)
    layers, hidden = row.count("layers") or known.get("layers"), row.count("hidden") or known.get("hidden")
    if layers is None or hidden is None or layers > _MOST_LAYERS:
        return None
    heads = row.count("heads") or known.get("heads") or _usual_heads(hidden, assumed)
    vocab = row.count("vocab") or known.get("vocab") or _usual_vocab(family, convention, assumed)
    seq = sample_length(row) or known.get("seq") or _usual_seq(family, assumed)
    experts = MIXTRAL.get(_mixtral_size(row), ((), 1, 1))
    return Shape(
        family=family,
        layers=layers,
        hidden=_rounded(hidden, heads),
        heads=heads,
        vocab=vocab,
        seq=seq,
        kv_heads=row.count("kv_heads") or known.get("kv_heads"),
        ffn=row.count("ffn") or known.get("ffn"),
        tied=_tied(row, family),
        experts=experts[1],
        experts_per_token=experts[2],
    )


def is_other_kind(row: Row) -> bool:
    """Whether the model's name is that of something else than a decoder of equal blocks."""
    return is_other(row.text("model"))


def has_unknown_experts(row: Row) -> bool:
    """Whether the model's name is that of a mixture of experts whose dimensions are not known here."""
    name = row.text("model").lower()
    return bool(_EXPERTS.search(name)) and _mixtral_size(row) not in MIXTRAL


def size_b(row: Row) -> float | None:
    """Billions of parameters: the cell, or what the model's name says."""
    cell = row.number("params_b")
    if cell is not None and cell > 0:
        return cell / 1e9 if cell > 1e6 else cell
    found = _SIZE.search(row.text("model"))
    if found is None:
        return None
    named = float(found.group(1)) * {"m": 1e-3, "b": 1.0, "t": 1e3}[found.group(2).lower()]
    return named if 0 < named < math.inf else None


def _family(row: Row, convention: Convention) -> Family:
    name = row.text("model").lower()
    if "mixtral" in name:
        return "mixtral"
    if any(word in name for word in _LLAMA_WORDS):
        return "llama"
    if any(word in name for word in _GPT_WORDS):
        return "gpt"
    return convention.family


def _mixtral_size(row: Row) -> str:
    found = re.search(r"\d+x\d+b", row.text("model").lower())
    return found.group(0) if found and "mixtral" in row.text("model").lower() else ""


def _known(row: Row, family: Family, assumed: list[str]) -> dict[str, int]:
    """Dimensions of the known model that a row names, or that is of its size."""
    complete = all(row.count(column) for column in ("layers", "hidden", "heads", "vocab", "seq"))
    size = size_b(row)
    names = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq")
    named = None if complete else named_dims(row.text("model"), size)
    if named is not None:
        return _those_absent(row, dict(zip(names, named, strict=True)), assumed)
    if complete or size is None:
        return {}
    if family == "mixtral":
        found = MIXTRAL.get(_mixtral_size(row))
        return dict(zip(names, found[0], strict=True)) if found else {}
    if family == "llama":
        llama = _nearest_llama(row, size)
        if llama is None:
            return {}
        return _those_absent(row, dict(zip(names, llama, strict=True)), assumed)
    near = min(GPT, key=lambda each: abs(each - size) / size)
    if abs(near - size) / size > _CLOSE:
        return {}
    return _those_absent(row, dict(zip(names, GPT[near], strict=False)), assumed)


def _nearest_llama(row: Row, size: float) -> Dims | None:
    name = row.text("model").lower()
    version = next((v for v in ("3", "2", "1") if re.search(rf"llama-?\s?v?{v}(?!\d*b)", name)), None)
    near = [key for key in LLAMA if abs(key[1] - size) / size <= _CLOSE and (version is None or key[0] == version)]
    return LLAMA[min(near, key=lambda key: (abs(key[1] - size), -int(key[0])))] if near else None


def _those_absent(row: Row, known: dict[str, int], assumed: list[str]) -> dict[str, int]:
    # A table that gives the width has its own feed-forward layers and heads: only what surrounds the blocks is taken.
    taken = {"vocab", "seq"} if row.count("hidden") else set(known)
    absent = {name: value for name, value in known.items() if name in taken and row.count(name) is None}
    if absent:
        assumed.append("of the model's name: " + ", ".join(f"{name} {value}" for name, value in absent.items()))
    return absent


def _usual_heads(hidden: int, assumed: list[str]) -> int:
    width = 128 if hidden % 128 == 0 and hidden >= 2048 else 64
    heads = max(1, hidden // width)
    assumed.append(f"heads {heads}")
    return heads


def _usual_vocab(family: Family, convention: Convention, assumed: list[str]) -> int:
    vocab = convention.vocab or (51200 if family == "gpt" else 32000)
    assumed.append(f"vocab {vocab}")
    return vocab


def _usual_seq(family: Family, assumed: list[str]) -> int:
    seq = 2048 if family == "gpt" else 4096
    assumed.append(f"seq {seq}")
    return seq


def _tied(row: Row, family: Family) -> bool | None:
    size = size_b(row)
    if "nanotron" in row.text("source").lower() and size is not None:
        return size < 4  # as the table's note says
    return False if "nemotron" in row.text("model").lower() else None


def _rounded(hidden: int, heads: int) -> int:
    """BMTrain prints 128 heads for a width of 5120; widths that heads do not divide are taken up to one they do."""
    return -(-hidden // heads) * heads
