"""What a configuration may ask for."""

import json
import types

import pytest
import torch
from torch import nn

from meshwright.errors import ModelError
from meshwright.planner import parse_family
from meshwright.planner.config_models import (
    check_pixels,
    check_values,
    config_of_shape,
    few_modules,
    read_model_config,
    shape_of_config,
    transformers_model,
)
from meshwright.planner.outlines import outline_of


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gpt2", "n_layer": 10**9},
        {"model_type": "llava", "text_config": {"model_type": "llama", "num_hidden_layers": 10**9}},
        {"model_type": "swin", "depths": [2, 10**9]},
        {"model_type": "mixtral", "num_local_experts": 10**9},
        {"model_type": "qwen2", "num_hidden_layers": float("inf")},
        {"model_type": "vit", "image_size": 6418},
        {"model_type": "vit", "num_channels": 10**9},
    ],
)
def test_a_config_that_asks_for_too_much_is_refused_at_once(config, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="at most"):
        transformers_model(tmp_path, 8)


def test_changes_are_counted_too(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ModelError, match="n_layer = 1001, and at most 1,000 are built"):
        read_model_config(tmp_path, {"n_layer": 1001})


def test_what_is_published_is_let_through(tmp_path):
    config = {"num_hidden_layers": 1000, "num_experts": 2048, "num_hidden": 10**9, "vision_feature_layer": -2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_values(tmp_path, {"use_layers": True})
    check_pixels((2, 3, 4096, 4096))


def test_a_model_of_too_many_modules_is_not_built_to_its_end(monkeypatch):
    monkeypatch.setattr("meshwright.planner.config_models._MOST_MODULES", 5)
    with pytest.raises(ValueError, match="more than 5 modules"), few_modules():
        nn.ModuleList(nn.ReLU() for _ in range(9))
    with few_modules():
        assert len(nn.Sequential(*(nn.ReLU() for _ in range(5)))) == 5
    assert len(nn.ModuleList(nn.ReLU() for _ in range(9))) == 9


_WIDTHS = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8, "vocab_size": 512
}  # fmt: skip


def test_the_type_of_published_weights_is_not_that_of_training(tmp_path):
    pytest.importorskip("transformers")
    config = {"model_type": "qwen2", **_WIDTHS, "torch_dtype": "bfloat16"}
    for architectures in ({}, {"architectures": ["Qwen2ForCausalLM"]}):
        (tmp_path / "config.json").write_text(json.dumps({**config, **architectures}))
        model = transformers_model(tmp_path, 8).module
        assert {each.dtype for each in model.parameters()} == {torch.float32}


def test_heads_of_their_own_width_are_read_and_built():
    transformers = pytest.importorskip("transformers")
    sizes = {**_WIDTHS, "hidden_size": 360, "num_key_value_heads": 2}  # 8 heads of 45, or of 64
    config = transformers.LlamaConfig(**sizes, head_dim=64, tie_word_embeddings=False)
    shape = shape_of_config(config, 128)
    assert (shape.head_dim, shape.query_width, shape.kv_width) == (64, 512, 128)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config_of_shape(shape))
    assert sum(each.numel() for each in model.parameters()) == shape.num_parameters
    assert model.config.head_dim == 64
    plain = transformers.LlamaConfig(**_WIDTHS, head_dim=64)
    assert shape_of_config(plain, 128).head_dim is None  # as wide as usual
    sizes = {"hidden_size": 360, "num_attention_heads": 8, "vocab_size": 512}
    model.config = types.SimpleNamespace(**sizes, head_dim=[64, 32])  # of several kinds of layers: none is the model's
    assert outline_of(model, 128).head_dim is None


def test_a_width_that_heads_do_not_divide_needs_one_of_their_own():
    with pytest.raises(ModelError, match="head_dim"):
        parse_family("llama:layers=2,hidden=360,heads=16,vocab=512")
    assert parse_family("llama:layers=2,hidden=360,heads=16,vocab=512,head_dim=32").query_width == 512
    with pytest.raises(ModelError, match="head_dim=0"):
        parse_family("llama:layers=2,hidden=512,heads=16,vocab=512,head_dim=0")
