"""Small transformers of five families: enough blocks for some of them to stand for all."""

from __future__ import annotations

import torch

VOCAB, SEQ, BLOCKS = 61, 16, 8
_WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": BLOCKS, "num_attention_heads": 4}
_TOKENS = {"vocab_size": VOCAB, "max_position_embeddings": SEQ}


def ids(samples):
    return {"input_ids": torch.randint(0, VOCAB, (samples, SEQ), generator=torch.Generator().manual_seed(1))}


def images(samples):
    return {"pixel_values": torch.ones(samples, 3, 16, 16), "labels": torch.zeros(samples, dtype=torch.long)}


def of_tokens(model, inputs):
    return model(**inputs, labels=inputs["input_ids"]).loss


def of_images(model, inputs):
    return model(**inputs).loss


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=BLOCKS, n_head=2, n_positions=SEQ, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)  # with its dropout


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **_WIDTHS, **_TOKENS))


def bert():
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**_WIDTHS, **_TOKENS))


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(image_size=16, patch_size=4, num_labels=5, **_WIDTHS))


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(num_key_value_heads=2, num_local_experts=4, **_WIDTHS, **_TOKENS))


FAMILIES = {
    "gpt2": (gpt2, ids, of_tokens),
    "llama": (llama, ids, of_tokens),
    "bert": (bert, ids, of_tokens),
    "vit": (vit, images, of_images),
    "mixtral": (mixtral, ids, of_tokens),
}
