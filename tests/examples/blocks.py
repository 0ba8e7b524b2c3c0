"""GPT in BMTrain's structure and the same GPT-2 in plain torch, with the same weights."""

from __future__ import annotations

import gpt2
import torch
from models import GPT

import meshwright as bmt

SIZES = {
    "num_layers": 3,
    "vocab_size": 61,
    "dim_model": 32,
    "dim_head": 8,
    "num_heads": 4,
    "dim_ff": 128,
    "max_distance": 16,
}
_PLAIN_NAMES = {"word_embedding": "token_embedding", "feedforward": "mlp"}


def build(dtype=torch.float32, **changed):
    """Every parameter random, also those that training would start at 0 or 1."""
    model = GPT(**SIZES | changed, dtype=dtype)
    bmt.init_parameters(model)
    generator = torch.Generator().manual_seed(3)
    values = {name: torch.randn(p.shape, generator=generator) * 0.2 for name, p in model.named_parameters()}
    model.load_state_dict({name: value + ("norm.weight" in name) for name, value in values.items()})
    return model


def plain(weights, num_heads=SIZES["num_heads"]):
    """``examples/gpt2/gpt2.py`` with the weights of a file of ``bmt.save``."""
    vocab_size, dim = weights["word_embedding.weight"].shape
    num_layers = sum(name.endswith("qkv.weight") for name in weights)
    model = gpt2.GPT2(vocab_size, len(weights["position_embedding.weight"]), dim, num_layers, num_heads)
    renamed = {plain_name(name): value for name, value in weights.items()}
    model.load_state_dict({**renamed, "head.weight": weights["word_embedding.weight"]})
    return model


def plain_name(name):
    for ours, theirs in _PLAIN_NAMES.items():
        name = name.replace(ours, theirs)
    return name


def positions(ids_BT):
    return torch.arange(ids_BT.shape[1]).repeat(len(ids_BT), 1)
