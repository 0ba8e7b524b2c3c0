"""Dimensions of models that tables call by name, as their papers and configurations have them."""

from __future__ import annotations

import re

from meshwright.planner.known_models import Dims

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
_CLOSE = 0.1  # by which sizes of one model differ as they are rounded
# Encoders with decoders, state spaces, convolutions, and mixtures whose names do not say so.
_OTHERS = re.compile(
    r"\b(?:m|flan-?)?t5\b|mamba|rwkv|jamba|hyena|diffusion|u-?net|resnet|whisper|\bswitch\b|dlrm|dhen|\bswin\b"
)


def is_other(name: str) -> bool:
    """Whether a name is that of a model that is no decoder of equal blocks."""
    return bool(_OTHERS.search(name.lower()))


def named_dims(name: str, size: float | None) -> Dims | None:
    """The dimensions of a model of that name and size (billions of parameters; None: the name alone says it)."""
    plain = re.sub(r"[\s_]+", "-", name.lower())
    near = [
        (abs(billions - (size or billions)), dims)
        for (word, billions), dims in (_LLAMAS | _GPTS).items()
        if re.search(rf"(?<![a-z]){re.escape(word)}", plain) and (size is None or abs(billions - size) <= _CLOSE * size)
    ]
    exact = size is not None or plain in {word for word, _ in _GPTS} or "phi-3-mini" in plain
    return min(near)[1] if near and exact else None
