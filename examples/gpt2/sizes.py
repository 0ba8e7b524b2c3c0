"""Sizes of GPT by name: the arguments of ``models.GPT`` but ``bias`` and ``dtype``, and what they amount to.

Attributes:
    SIZES: ``tiny`` for bytes on a laptop; GPT-2's four (Radford et al. 2019, table 2, with today's counts); 2.7b and
        6.7b after GPT-3 (Brown et al. 2020, table 2.1) with GPT-2's vocabulary and positions; 13b from BMTrain's
        README (40 layers, 128 heads, 5120 hidden, 512 positions).
"""

from __future__ import annotations

GPT2_VOCABULARY = 50257


def _size(
    num_layers: int, num_heads: int, dim_model: int, max_distance: int = 1024, vocab_size: int = GPT2_VOCABULARY
) -> dict[str, int]:
    return {
        "num_layers": num_layers,
        "vocab_size": vocab_size,
        "dim_model": dim_model,
        "dim_head": dim_model // num_heads,
        "num_heads": num_heads,
        "dim_ff": 4 * dim_model,
        "max_distance": max_distance,
    }


SIZES: dict[str, dict[str, int]] = {
    "tiny": _size(4, 4, 128, max_distance=128, vocab_size=257),
    "small": _size(12, 12, 768),
    "medium": _size(24, 16, 1024),
    "large": _size(36, 20, 1280),
    "xl": _size(48, 25, 1600),
    "2.7b": _size(32, 32, 2560),
    "6.7b": _size(32, 32, 4096),
    "13b": _size(40, 128, 5120, max_distance=512),
}


def num_parameters(
    num_layers: int, vocab_size: int, dim_model: int, dim_head: int, num_heads: int, dim_ff: int, max_distance: int
) -> int:
    """Parameters of a ``models.GPT`` with biases; the word embedding counts once, the output layer being tied to it."""
    inner = num_heads * dim_head
    attention = 3 * inner * (dim_model + 1) + dim_model * (inner + 1)
    feedforward = dim_ff * (dim_model + 1) + dim_model * (dim_ff + 1)
    norms = 2 * 2 * dim_model
    return num_layers * (attention + feedforward + norms) + (vocab_size + max_distance) * dim_model + 2 * dim_model
