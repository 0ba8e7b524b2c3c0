"""Configs beside weights: whose are written (that transformers reads them: test_folder.py, the booster's tests)."""

import json

import pytest
import torch

import meshwright as mw
from meshwright.store import save_folder
from meshwright.store.folder import configs_of
from tests import tiny


def written(folder):
    save_folder(tiny.build("gpt2").bfloat16(), folder / "new")
    found = json.loads((folder / "new" / "config.json").read_text())
    assert (found["dtype"], found["architectures"]) == ("bfloat16", ["GPT2LMHeadModel"])
    before = {path.name for path in (folder / "new").iterdir()}
    plain, adapted, wrong = torch.nn.Linear(2, 2), tiny.build("gpt2"), tiny.build("gpt2")
    plain.config, adapted.peft_config = {"hidden_size": 2}, {}
    assert [configs_of(model) for model in (plain, adapted)] == [[], []]
    wrong.generation_config.max_new_tokens = -1
    with pytest.raises(mw.CheckpointError, match=r"config was not written.*max_new_tokens"):
        save_folder(wrong, folder / "new")
    after = {path.name for path in (folder / "new").iterdir()}
    assert json.loads((folder / "new" / "config.json").read_text()) == found
    assert after == before
    return True


def test_configs_of_transformers_models_alone_are_written(ranks, tmp_path):
    assert all(ranks(1).run(written, tmp_path))
