"""Configs beside weights: whose are written (that transformers reads them: test_folder.py, the booster's tests)."""

import json

import pytest
import torch

import meshwright as mw
from meshwright.store.folder import write_config
from tests import tiny


def written(folder):
    write_config(tiny.build("gpt2").bfloat16(), folder / "new")
    found = json.loads((folder / "new" / "config.json").read_text())
    assert (found["dtype"], found["architectures"]) == ("bfloat16", ["GPT2LMHeadModel"])
    plain, adapted, wrong = torch.nn.Linear(2, 2), tiny.build("gpt2"), tiny.build("gpt2")
    plain.config, adapted.peft_config = {"hidden_size": 2}, {}
    for model in (plain, adapted):
        write_config(model, folder / "none")
    assert not (folder / "none").exists()
    wrong.generation_config.max_new_tokens = -1
    with pytest.raises(mw.CheckpointError, match=r"config was not written.*max_new_tokens"):
        write_config(wrong, folder / "wrong")
    return True


def test_configs_of_transformers_models_alone_are_written(ranks, tmp_path):
    assert all(ranks(1).run(written, tmp_path))
