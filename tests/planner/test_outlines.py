"""A decoder of any kind has an outline: the dimensions of a known family with about its numbers."""

import dataclasses

import pytest
import torch
from torch import nn

from meshwright.cost import find_cluster
from meshwright.nn import setting_of
from meshwright.planner.family_workload import FamilyModel
from meshwright.planner.outlines import outline_of
from meshwright.strategy import Strategy

_WIDTHS = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8, "vocab_size": 512
}  # fmt: skip
OUTLINED = {
    "qwen2": ("Qwen2", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 128}),
    "gemma3": ("Gemma3Text", {"num_key_value_heads": 4, "head_dim": 64}),
    "gpt_oss": ("GptOss", {"num_key_value_heads": 2, "head_dim": 64, "num_local_experts": 8}),
    "deepseek": (
        "DeepseekV3",
        {
            "n_routed_experts": 16,
            "moe_intermediate_size": 512,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        }
        | {"kv_lora_rank": 64, "q_lora_rank": 128, "qk_rope_head_dim": 32, "v_head_dim": 64, "qk_nope_head_dim": 64},
    ),
}


@pytest.mark.parametrize("name", OUTLINED)
def test_an_outline_has_about_the_parameters_and_experts_of_a_decoder(name):
    transformers = pytest.importorskip("transformers")
    family, sizes = OUTLINED[name]
    config = getattr(transformers, f"{family}Config")(**_WIDTHS, **sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    outline = outline_of(model, 128)
    if "kv_lora_rank" not in sizes:
        assert outline.query_width == sizes.get("head_dim", 64) * 8
    assert (outline.layers, outline.hidden, outline.vocab, outline.seq) == (6, 512, 512, 128)
    assert outline.experts == sizes.get("num_local_experts", sizes.get("n_routed_experts", 1))
    assert outline.num_parameters == pytest.approx(sum(each.numel() for each in model.parameters()), rel=0.15)


def test_an_outline_of_a_classifier_has_no_logits():
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2Config(**{**_WIDTHS, "vocab_size": 32768})
    with torch.device("meta"):
        words = outline_of(transformers.Qwen2ForCausalLM(config), 128)
        classes = outline_of(transformers.Qwen2ForSequenceClassification(config), 128)
    assert words.vocab == 32768
    assert classes == dataclasses.replace(words, vocab=classes.vocab)
    assert classes.vocab < 512


def test_an_outline_knows_in_which_precision_parameters_are():
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**_WIDTHS))
    wide, half = outline_of(model, 128), outline_of(model.bfloat16(), 128)
    assert (wide.itemsize, half.itemsize) == (4, 2)
    model.lm_head.float()
    model.model.layers[0].mlp.float()  # a part of them
    assert outline_of(model, 128) == half
    cluster = find_cluster("h100x8")
    strategy = Strategy([("parallel_mode", {"axes": [("zero", 8)]}), "fsdp", ("amp_native", "bf16")])
    states = [FamilyModel("", each).subject(cluster, 8, None).plan(strategy, 1).memory for each in (wide, half)]
    for name in ("parameters", "gradients", "optimizer"):
        assert getattr(states[1], name) == pytest.approx(getattr(states[0], name) / 2, rel=0.01)


def test_an_outline_knows_adapters_over_a_frozen_base():
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")

    def adapted(**options):
        with torch.device("meta"):
            config = transformers.Qwen2Config(**_WIDTHS, num_key_value_heads=2)
            model = transformers.AutoModelForCausalLM.from_config(config)
        if options.pop("half", False):
            model = model.bfloat16()
        return peft.get_peft_model(model, peft.LoraConfig(r=8, **options)) if options else model

    every = adapted(target_modules="all-linear")
    outline, base = outline_of(every, 128), outline_of(adapted(), 128)
    assert dataclasses.replace(outline, adapters=None) == base
    assert (outline.adapters.rank, outline.adapters.layers, outline.adapters.of_product) == (8, 7, True)
    assert outline.num_parameters - base.num_parameters == sum(p.numel() for p in every.parameters() if p.requires_grad)
    assert outline.model_flops_per_token() < 0.75 * base.model_flops_per_token()
    half = outline_of(adapted(target_modules=["q_proj", "v_proj"], half=True), 128)
    assert (half.itemsize, half.adapters.itemsize) == (2, 4)
    assert (half.adapters.layers, half.adapters.of_product) == (2, False)
    # Formulas know nothing of a head that is trained, too, nor of a part of the blocks.
    assert outline_of(adapted(target_modules="all-linear", modules_to_save=["lm_head"]), 128) is None
    assert outline_of(adapted(target_modules=["q_proj"], layers_to_transform=[0, 1]), 128) is None
    base_model = adapted()
    base_model.model.norm.requires_grad_(False)  # hardly anything: it is searched as if all were trained
    assert outline_of(base_model, 128) == base
    base_model.model.layers[:3].requires_grad_(False)
    assert outline_of(base_model, 128) is None


def test_the_outline_of_a_model_that_sees_is_of_its_decoder():
    transformers = pytest.importorskip("transformers")
    text = {"num_key_value_heads": 4, "head_dim": 64}
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 9, "num_attention_heads": 2}
    config = transformers.Gemma3Config(text_config={**_WIDTHS, **text}, vision_config=vision)
    with torch.device("meta"):
        model = transformers.Gemma3ForConditionalGeneration(config)
        alone = transformers.AutoModelForCausalLM.from_config(transformers.Gemma3TextConfig(**_WIDTHS, **text))
    assert outline_of(model, 128) == outline_of(alone, 128)


def test_a_config_whose_layers_differ_has_no_common_setting():
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**_WIDTHS))

    class OfLayers(type(model.config)):
        def __getattribute__(self, name):
            if name in ("head_dim", "num_key_value_heads"):
                raise RuntimeError(f"{name!r} is a per-layer attribute")
            return super().__getattribute__(name)

    model.config.__class__ = OfLayers
    assert setting_of(model.config, "head_dim") is None
    assert setting_of(model.config, "hidden_size") == 512
    assert outline_of(model, 128).layers == 6


def test_what_is_no_decoder_has_no_outline():
    transformers = pytest.importorskip("transformers")
    t5 = transformers.T5Config(d_model=32, num_layers=2, num_heads=2, vocab_size=64)
    mamba = transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=64)
    with torch.device("meta"):
        for model in (transformers.T5ForConditionalGeneration(t5), transformers.MambaForCausalLM(mamba)):
            assert outline_of(model, 16) is None
    assert outline_of(nn.Linear(2, 2), 16) is None


def test_an_outline_counts_what_further_norms_take():
    transformers = pytest.importorskip("transformers")
    of_heads = {"num_key_value_heads": 2, "head_dim": 128}
    queries, keys = 8 * 128, 2 * 128
    wanted = {"Qwen2": 0, "Qwen3": queries + keys, "Gemma3Text": 2 * 512 + queries + keys}
    for family, normed in wanted.items():
        config = getattr(transformers, f"{family}Config")(**_WIDTHS, **(of_heads if family != "Qwen2" else {}))
        with torch.device("meta"):
            assert outline_of(transformers.AutoModelForCausalLM.from_config(config), 128).normed == normed
