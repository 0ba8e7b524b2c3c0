"""Dimensions of published models that a table leaves out, from their names or parameter counts."""

from __future__ import annotations

import math
import re

from meshwright.planner.model_shapes import GPT, LLAMA, MIXTRAL, Dims, Family, Shape
from published_runs.conventions import Convention
from published_runs.table_rows import Row, sample_length

# (name, billions of parameters): layers, hidden, heads, kv_heads, ffn, vocab, seq
_LLAMAS: dict[tuple[str, float], Dims] = {
    ("mistral", 7): (32, 4096, 32, 8, 14336, 32000, 8192),
    ("qwen", 0.5): (24, 896, 14, 2, 4864, 151936, 4096),
    ("qwen", 1.5): (28, 1536, 12, 2, 8960, 151936, 4096),
    ("qwen", 7): (28, 3584, 28, 4, 18944, 152064, 4096),
    ("qwen", 14): (48, 5120, 40, 8, 13824, 152064, 4096),
    ("qwen", 32): (64, 5120, 40, 8, 27648, 152064, 4096),
    ("qwen", 72): (80, 8192, 64, 8, 29568, 152064, 4096),
    ("yi", 6): (32, 4096, 32, 4, 11008, 64000, 4096),
    ("yi", 34): (60, 7168, 56, 8, 20480, 64000, 4096),
    ("tinyllama", 1.1): (22, 2048, 32, 4, 5632, 32000, 2048),
    ("smollm", 1.7): (24, 2048, 32, 32, 8192, 49152, 2048),
    ("phi-3-mini", 3.8): (32, 3072, 32, 32, 8192, 32064, 4096),
    ("internlm", 7): (32, 4096, 32, 32, 11008, 103168, 2048),
    ("internlm", 20): (60, 5120, 40, 40, 13824, 103168, 4096),
    ("baichuan2", 7): (32, 4096, 32, 32, 11008, 125696, 4096),
    ("baichuan2", 13): (40, 5120, 40, 40, 13696, 125696, 4096),
    ("glm", 130): (70, 12288, 96, 96, 32768, 150528, 2048),
}
_GPTS: dict[tuple[str, float], Dims] = {
    ("bloom", 176): (70, 14336, 112, 112, 57344, 250880, 2048),
    ("neox", 20): (44, 6144, 64, 64, 24576, 50432, 2048),
    ("gpt-j", 6): (28, 4096, 16, 16, 16384, 50400, 2048),
    ("pythia", 1.4): (24, 2048, 16, 16, 8192, 50304, 2048),
    ("pythia", 2.8): (32, 2560, 32, 32, 10240, 50304, 2048),
    ("pythia", 6.9): (32, 4096, 32, 32, 16384, 50432, 2048),
    ("pythia", 12): (36, 5120, 40, 40, 20480, 50688, 2048),
    ("mt-nlg", 530): (105, 20480, 128, 128, 81920, 51200, 2048),
    ("nemotron-4", 15): (32, 6144, 48, 8, 24576, 256000, 4096),
    ("nemotron-4", 340): (96, 18432, 96, 8, 73728, 256000, 4096),
    ("gpt2-xl", 1.5): (48, 1600, 25, 25, 6400, 50257, 1024),
    ("gpt2-large", 0.77): (36, 1280, 20, 20, 5120, 50257, 1024),
    ("gpt2-medium", 0.35): (24, 1024, 16, 16, 4096, 50257, 1024),
}
_CLOSE_DIMS = 0.1  # by which sizes of one model differ as they are rounded
# Encoders with decoders, state spaces, convolutions, and mixtures whose names do not say so.
_OTHERS = re.compile(
    r"\b(?:m|flan-?)?t5\b|mamba|rwkv|jamba|hyena|diffusion|u-?net|resnet|whisper|\bswitch\b|dlrm|dhen|\bswin\b"
)


def is_other(name: str) -> bool:
    """Return whether a name is that of a model that is no decoder of equal blocks."""
    return bool(_OTHERS.search(name.lower()))


def named_dims(name: str, size: float | None) -> Dims | None:
    """Return the dimensions of a model of that name and size (billions of parameters; None: the name alone says it)."""
    plain = re.sub(r"[\s_]+", "-", name.lower())
    near = [
        (abs(billions - (size or billions)), dims)
        for (word, billions), dims in (_LLAMAS | _GPTS).items()
        if re.search(rf"(?<![a-z]){re.escape(word)}", plain)
        and (size is None or abs(billions - size) <= _CLOSE_DIMS * size)
    ]
    exact = size is not None or plain in {word for word, _ in _GPTS} or "phi-3-mini" in plain
    return min(near)[1] if near and exact else None


# --- Dimensions that a table leaves out: of models by name, of others from their number of parameters.

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
    """Return the model of a row; what the table leaves out is assumed, and said. None: too little is known."""
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
    """Return whether the model's name is that of something else than a decoder of equal blocks."""
    return is_other(row.text("model"))


def has_unknown_experts(row: Row) -> bool:
    """Return whether the model's name is that of a mixture of experts whose dimensions are not known here."""
    name = row.text("model").lower()
    return bool(_EXPERTS.search(name)) and _mixtral_size(row) not in MIXTRAL


def size_b(row: Row) -> float | None:
    """Return billions of parameters: the cell, or what the model's name says."""
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
    """Return the dimensions of the known model that a row names, or that is of its size."""
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
