"""What a configuration may ask for."""

import json

import pytest
from torch import nn

from meshwright.errors import ModelError
from meshwright.planner.config_models import (
    check_pixels,
    check_values,
    few_modules,
    read_model_config,
    transformers_model,
)


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
