"""Training files whose models start from stored weights, on living ranks."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright.cli import train_loop as training
from meshwright.cli.train_options import Options
from meshwright.runtime.device import seed_everything
from tests.cli.helpers import losses, project
from tests.pool import RemoteFailure

FUNCTIONS = """

def of_numbers(vocab_size, seq_len):
    model = Tiny(vocab_size, seq_len)
    if model.head.weight.sum().item() == 0:  # needs values
        raise ValueError
    return model


def with_scale(vocab_size, seq_len):
    model = Tiny(vocab_size, seq_len)
    model.scale = nn.Parameter(torch.tensor(0.5))
    return model


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, ids):
        return self.inner(input_ids=ids)


def reads_itself():
    from transformers import AutoModelForCausalLM

    return Wrapped(AutoModelForCausalLM.from_pretrained("base", dtype=torch.float32))
"""
WHOLE = "every rank builds the whole model"


@pytest.fixture
def folder(tmp_path):
    """A training file, functions, a folder ``base`` of a Llama's weights, and ``bare`` with its config alone."""
    project(tmp_path)
    with (tmp_path / "tiny.py").open("a") as stream:
        stream.write(FUNCTIONS)
    llama(tmp_path / "base")
    shutil.copytree(tmp_path / "base", tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors*"))
    return tmp_path


def llama(folder, **changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
    torch.manual_seed(5)
    LlamaForCausalLM(LlamaConfig(**sizes | changes)).save_pretrained(folder, max_shard_size="20KB")


def train(folder, out, *changes, steps=3, resume=False):
    """What a rank of the program does, and prints on standard error."""
    seed_everything(0)
    path, said = list(sys.path), io.StringIO()
    changes = ('strategy.methods="fsdp"', *(f"{key}={json.dumps(value)}" for key, value in changes))
    try:
        with (
            mock.patch.object(training, "shutdown_distributed"),
            contextlib.redirect_stderr(said),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.chdir(folder),
        ):
            options = Options(folder / "tiny.toml", steps=steps, out=folder / out, changes=changes, resume=resume)
            training.train(options)
    finally:
        sys.path[:] = path
        sys.modules.pop("tiny", None)
    return said.getvalue()


HF = ("model.source", "hf:base")


def test_a_folder_of_weights_is_trained_further(ranks, folder):
    said, _ = ranks(2).run(train, folder, "run", HF)
    assert "meshwright: weights from " in said
    assert "base (3 files, " in said
    expected = losses(folder / "run")
    itself = ranks(2).run(train, folder, "itself", ("model.source", "tiny:reads_itself"))
    assert f"{WHOLE}: its code reads or computes the values itself" in itself[0]
    named = (("model.source", "hf:bare"), ("model.weights", "base"))
    ranks(1).run(train, folder, "named", *named)
    for other in ("itself", "named"):
        assert losses(folder / other) == pytest.approx(expected, rel=1e-5)

    ranks(2).run(train, folder, "half", HF, ("model.dtype", "bf16"))
    assert losses(folder / "half") == pytest.approx(expected, rel=3e-2)
    assert [json.loads((folder / run / "model_config.json").read_text())["dtype"] for run in ("run", "half")] == [
        "float32",
        "bfloat16",
    ]


def test_a_folder_without_weights_is_initialised(ranks, folder):
    said, _ = ranks(2).run(train, folder, "bare_run", ("model.source", "hf:bare"))
    assert "bare: the model is initialised from run.seed" in said
    said, _ = ranks(2).run(train, folder, "random", HF, ("model.weights", "random"))
    assert "weights from" not in said
    assert losses(folder / "bare_run") == losses(folder / "random")


def test_a_resumed_run_does_not_read_the_weights_again(ranks, folder):
    ranks(2).run(train, folder, "run", HF)
    (folder / "base" / "model.safetensors.index.json").unlink()
    said, _ = ranks(2).run(train, folder, "run", HF, steps=4, resume=True)
    assert "resuming after step 3" in said
    assert "weights from" not in said
    assert len(losses(folder / "run")) == 4


def test_a_new_head_is_initialised_where_the_file_allows_it(ranks, folder):
    stored = [load_file(file) for file in (folder / "base").glob("*.safetensors")]
    headless = {name: tensor for each in stored for name, tensor in each.items() if name != "lm_head.weight"}
    save_file(headless, folder / "headless.safetensors", metadata={"format": "pt"})
    named = (("model.source", "hf:bare"), ("model.weights", "headless.safetensors"))
    with pytest.raises(RemoteFailure, match=r"model\.allow_missing_weights = true"):
        ranks(2).run(train, folder, "refused", *named)
    said, _ = ranks(2).run(train, folder, "run", *named, ("model.allow_missing_weights", True))
    assert "lm_head.weight" in said
    assert len(losses(folder / "run")) == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ((HF, ("model.weights", "other")), "does not fit the model; nothing was loaded"),
        ((HF, ("model.weights", "nowhere")), "There are no weights at"),
        ((("model.weights", "a.safetensors"),), r"missing: .*embedding\.weight"),
    ],
    ids=str,
)
def test_wrong_weights_are_refused_on_every_rank_before_anything_is_written(changes, words, ranks, folder):
    llama(folder / "other", hidden_size=32)
    save_file({"a": torch.ones(2)}, folder / "a.safetensors")
    with pytest.raises(RemoteFailure, match=words) as caught:
        ranks(2).run(train, folder, "run", *changes)
    assert "rank 1, too" in str(caught.value)
    assert not (folder / "run").exists()


def test_functions_are_built_without_memory_where_they_can_be(ranks, folder):
    for name in ("Tiny", "of_numbers", "with_scale"):
        said, _ = ranks(2).run(train, folder, name, ("model.source", f"tiny:{name}"))
        assert (f"{WHOLE}: without memory its code fails" in said) == (name == "of_numbers"), said
    assert losses(folder / "Tiny") == losses(folder / "of_numbers") == losses(folder / "with_scale")
