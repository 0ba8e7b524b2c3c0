"""Training files whose models start from stored weights, by the real program."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.helpers import losses, meshwright, project

MODELS = """

def of_numbers(vocab_size, seq_len):
    model = Tiny(vocab_size, seq_len)
    if model.head.weight.sum().item() == 0:  # needs values
        raise ValueError
    return model


def with_scale(vocab_size, seq_len):
    model = Tiny(vocab_size, seq_len)
    model.scale = nn.Parameter(torch.tensor(0.5))
    return model
"""


def llama(folder, **changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32, "dtype": "bfloat16"}
    torch.manual_seed(5)
    model = LlamaForCausalLM(LlamaConfig(**sizes | changes))
    model.save_pretrained(folder, max_shard_size="20KB")
    return model


def train(folder, *changes, world=2, steps=3, out="run", resume=False):
    words = [word for change in changes for word in ("--set", change)]
    words += ["--resume"] if resume else []
    return meshwright("train", "tiny.toml", "--nproc", world, "--steps", steps, "--out", out, *words, folder=folder)


FSDP = 'strategy.methods="fsdp"'


def test_a_folder_of_weights_is_trained_further(tmp_path):
    project(tmp_path)
    llama(tmp_path / "base")
    shutil.copytree(tmp_path / "base", tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors*"))
    trained = train(tmp_path, 'model.source="hf:base"', FSDP)
    assert trained.returncode == 0, trained.stderr
    assert "meshwright: weights from " in trained.stderr
    assert "base (3 files, " in trained.stderr
    for world, source, weights in ((1, "hf:base", "auto"), (2, "hf:bare", "base"), (2, "tiny:read", "auto")):
        (tmp_path / "tiny.py").write_text(
            "from transformers import AutoModelForCausalLM\n"
            "def read(): return Wrapped(AutoModelForCausalLM.from_pretrained('base', dtype='float32'))\n"
            "import torch\n"
            "class Wrapped(torch.nn.Module):\n"
            "    def __init__(self, inner): super().__init__(); self.inner = inner\n"
            "    def forward(self, ids): return self.inner(input_ids=ids)\n"
        )
        other = f"{world}-{weights}-{source[3:]}"
        again = train(tmp_path, f'model.source="{source}"', f'model.weights="{weights}"', FSDP, world=world, out=other)
        assert again.returncode == 0, again.stderr
        assert losses(tmp_path / other) == pytest.approx(losses(tmp_path / "run"), rel=1e-5)
    assert json.loads((tmp_path / "run" / "model_config.json").read_text())["dtype"] == "float32"

    initialised = train(tmp_path, 'model.source="hf:bare"', FSDP, out="bare_run")
    assert "bare: the model is initialised from run.seed" in initialised.stderr
    assert losses(tmp_path / "bare_run")[0] != pytest.approx(losses(tmp_path / "run")[0], rel=1e-4)

    # The checkpoint has the weights: those of the folder are not read again.
    (tmp_path / "base" / "model.safetensors.index.json").unlink()
    resumed = train(tmp_path, 'model.source="hf:base"', FSDP, steps=4, resume=True)
    assert resumed.returncode == 0, resumed.stderr
    assert "weights from" not in resumed.stderr
    assert len(losses(tmp_path / "run")) == 4


def test_weights_of_another_model_are_refused_on_every_rank(tmp_path):
    project(tmp_path)
    llama(tmp_path / "base")
    llama(tmp_path / "other", hidden_size=32)
    run = train(tmp_path, 'model.source="hf:base"', 'model.weights="other"', FSDP)
    assert run.returncode == 1
    assert "does not fit the model; nothing was loaded" in " ".join(run.stderr.split())
    assert not (tmp_path / "run").exists()
    run = train(tmp_path, 'model.source="hf:base"', 'model.weights="nowhere"', FSDP)
    assert "There are no weights at" in " ".join(run.stderr.split())


def test_functions_are_built_without_memory_where_they_can_be(tmp_path):
    file = project(tmp_path)
    with open(tmp_path / "tiny.py", "a") as stream:
        stream.write(MODELS)
    for name in ("Tiny", "of_numbers", "with_scale"):
        run = train(tmp_path, f'model.source="tiny:{name}"', FSDP, out=name)
        assert run.returncode == 0, run.stderr
        told = "every rank builds the whole model: without memory its code fails" in run.stderr
        assert told == (name == "of_numbers"), run.stderr
    assert losses(tmp_path / "Tiny") == losses(tmp_path / "of_numbers")
    assert file.exists()
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    run = train(tmp_path, 'model.weights="a.safetensors"', out="stored")
    assert "missing: embedding.weight" in " ".join(run.stderr.split())
