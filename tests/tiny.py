"""Tiny models and data for tests: sizes that do not divide evenly, weights that depend on nothing but a seed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

VOCAB, SEQ_LEN = 61, 12

_path = Path(__file__).parents[1] / "examples" / "gpt2" / "gpt2.py"
_spec = importlib.util.spec_from_file_location("tiny_gpt2", _path)
gpt2 = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)  # torch.compile imports it by name
_spec.loader.exec_module(gpt2)


class Tokens(Dataset):
    """``length`` random sequences; item i is the same everywhere."""

    def __init__(self, length=80):
        self.ids = torch.randint(0, VOCAB, (length, SEQ_LEN), generator=torch.Generator().manual_seed(7))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return self.ids[index]


def plain(num_layers=2, dropout=0.0):
    return gpt2.GPT2(vocab_size=VOCAB, seq_len=SEQ_LEN, dim=20, num_layers=num_layers, num_heads=2, dropout=dropout)


def hf_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB, n_embd=20, n_layer=2, n_head=2, n_positions=SEQ_LEN, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def hf_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=50, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=SEQ_LEN, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def hf_bert():
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCAB, hidden_size=20, intermediate_size=50, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=SEQ_LEN, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    return BertForMaskedLM(config)


MODELS = {"plain": plain, "gpt2": hf_gpt2, "llama": hf_llama, "bert": hf_bert}


def build(name, seed=3):
    torch.manual_seed(seed)
    return MODELS[name]()


def loss_func(inputs, output):
    """Next token for causal models, the token itself for BERT (to which it is as good a task as any here)."""
    ids = inputs["input_ids"] if isinstance(inputs, dict) else inputs
    logits = output.logits if hasattr(output, "logits") else output
    if "MaskedLM" in type(output).__name__:
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def input_format(name):
    return None if name == "plain" else "unpack_dict"


def prepare_for(name):
    def prepare(data, device):
        return data.to(device) if name == "plain" else {"input_ids": data.to(device)}

    return prepare


class Mlp(nn.Module):
    """A stack of small blocks: the least model with repeated blocks."""

    def __init__(self, sizes=(7, 13), depth=3):
        super().__init__()
        inner, outer = sizes
        self.first = nn.Linear(inner, outer)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(outer, outer), nn.GELU()) for _ in range(depth))
        self.last = nn.Linear(outer, 3)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x)
