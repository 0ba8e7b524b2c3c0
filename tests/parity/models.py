"""The models of the parity matrix: tiny, with random weights, called as their users call them."""

from __future__ import annotations

import torch
from torch import nn

from tests import tiny

VOCAB = 64  # every axis of 2 divides it
SIZES = {"vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 52, "num_attention_heads": 4}
DECODER = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": tiny.SEQ_LEN, "use_cache": False}
NO_DROPOUT = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}


def plain(layers):
    """A GPT as one writes it by hand: tied embedding and head, queries, keys and values in one projection."""
    return tiny.gpt2.GPT2(vocab_size=VOCAB, seq_len=tiny.SEQ_LEN, dim=20, num_layers=layers, num_heads=2)


def gpt2(layers):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB, n_embd=20, n_layer=layers, n_head=2, n_positions=tiny.SEQ_LEN, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def llama(layers):
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**DECODER, num_hidden_layers=layers))


def qwen2(layers):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**DECODER, num_hidden_layers=layers, tie_word_embeddings=True))


def qwen3(layers):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**DECODER, num_hidden_layers=layers, head_dim=6))


def bert(layers):
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(**SIZES, **NO_DROPOUT, num_hidden_layers=layers, max_position_embeddings=tiny.SEQ_LEN)
    return BertForMaskedLM(config)


def t5(layers):
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=VOCAB, d_model=24, d_kv=6, d_ff=52, num_layers=layers, num_heads=4, feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
    )  # fmt: skip
    return T5EncoderModel(config)


MODELS = {"plain": plain, "gpt2": gpt2, "llama": llama, "qwen2": qwen2, "qwen3": qwen3, "bert": bert, "t5": t5}
MASKED = ("bert", "t5")  # are given sequences of different lengths


def build(name, layers):
    """Weights depend on nothing but name and number of layers; biases of zero would hide what is lost."""
    torch.manual_seed(3)
    model = MODELS[name](layers)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model


def prepare_for(name):
    """Token ids alone, or a dictionary: with padding for encoders, with labels where the model makes the loss."""

    def prepare(ids, device):
        ids = ids.to(device)
        if name == "plain":
            return ids
        inputs = {"input_ids": ids}
        if name in MASKED:
            lengths = tiny.SEQ_LEN - ids[:, :1] % 4
            inputs["attention_mask"] = (torch.arange(tiny.SEQ_LEN, device=ids.device) < lengths).long()
        return {**inputs, "labels": ids} if name == "bert" else inputs

    return prepare


def input_format(name):
    return None if name == "plain" else "unpack_dict"


def loss_func(inputs, output):
    """The model's own loss (BERT), next token where there are logits, else a mean that moves all features apart."""
    if isinstance(output, torch.Tensor) or not hasattr(output, "last_hidden_state"):
        own = getattr(output, "loss", None)
        return own if own is not None else tiny.loss_func(inputs, output)
    features = output.last_hidden_state
    return (features * torch.linspace(-1, 1, features.shape[-1]).to(features)).square().mean()


def forward(name, model: nn.Module, inputs):
    return model(inputs) if name == "plain" else model(**inputs)
