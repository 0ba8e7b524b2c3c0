"""The examples of transformers' models: a few steps of each on two ranks, whole runs in the long tests."""

import functools
import json
import re
import sys

import pytest
import torch

from tests.cli.helpers import environment, losses, meshwright
from tests.examples.runs import EXAMPLES, both_ways

pytest.importorskip("transformers")

NAMES = ("llama", "bert", "lora", "vit")


@pytest.fixture(scope="module")
def short(ranks, tmp_path_factory):
    """``short(name)``: an example on two ranks, run once: (its folder, losses of every rank)."""

    @functools.cache
    def run(name):
        folder = tmp_path_factory.mktemp(name)
        return folder, ranks(2).run(both_ways, name, folder)

    return run


@pytest.mark.parametrize("name", NAMES)
def test_the_script_and_the_training_file_are_one_run_whose_loss_falls(short, name):
    (script, trained), (silent, same) = short(name)[1]
    assert silent == []  # rank 0 alone tells
    assert same == trained
    assert script == pytest.approx(trained, abs=2e-4)  # four digits are printed; the file's AdamW is the fused one
    first, last = trained
    assert last < first - 0.1


def test_the_frozen_model_is_not_in_the_checkpoint_and_adapters_leave_as_peft_reads_them(short):
    peft = pytest.importorskip("peft")
    folder, _ = short("lora")
    result = meshwright("checkpoint", "export", folder / "run", folder / "exported", folder=folder)
    assert result.returncode == 0, result.stderr
    assert "adapters for peft" in result.stdout
    (checkpoint,) = (folder / "run" / "checkpoints").iterdir()
    stored = json.loads((checkpoint / "state.json").read_text())["tensors"]
    assert stored
    assert all("lora_" in name for name in stored)
    for saved in ("adapters", "exported"):  # by the script, and by the program
        torch.manual_seed(0)
        base = _llama(folder / "config-0")
        before = {name: weight.clone() for name, weight in base.state_dict().items()}
        adapted = peft.PeftModel.from_pretrained(base, folder / saved)
        grown = [weight.abs().max().item() for name, weight in adapted.named_parameters() if "lora_B" in name]
        assert len(grown) == 15  # the head is one
        assert min(grown) > 0
        assert all(torch.equal(weight, before[name]) for name, weight in adapted.unload().state_dict().items())


def _llama(config):
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config, tie_word_embeddings=False))


def test_masks_are_those_of_the_index_and_equally_many(monkeypatch):
    bert = _imported(monkeypatch, "bert")
    tokens = torch.arange(200).view(2, 100)
    masked = bert.MaskedText([tokens[0], tokens[1]], seed=3)
    sample, again, other = masked[0], masked[0], masked[1]
    assert torch.equal(again["labels"], sample["labels"])
    told = sample["labels"] != bert.IGNORED
    assert told.sum() == (other["labels"] != bert.IGNORED).sum() == 15
    assert not torch.equal(told, other["labels"] != bert.IGNORED)
    assert torch.equal(sample["labels"][told], torch.arange(100)[told])
    assert torch.equal(sample["input_ids"][~told], torch.arange(100)[~told])
    assert 9 <= (sample["input_ids"] == bert.MASK).sum() <= 15


def test_images_are_those_of_the_index_and_of_every_kind(monkeypatch):
    vit = _imported(monkeypatch, "vit")
    images = vit.shapes(num_images=60)
    assert torch.equal(images[7]["pixel_values"], images[7]["pixel_values"])
    assert images[7]["pixel_values"].shape == (3, 32, 32)
    assert {int(images[index]["labels"]) for index in range(60)} == {0, 1, 2, 3}
    areas = [vit.inside(name, 64, [0.5, 0.5], 0.3).float().mean().item() for name in vit.SHAPES]
    disc, square = 3.1416 * 0.3**2, 0.54**2
    assert areas == pytest.approx([disc, disc * (1 - 0.6**2), square, 2 * 0.6 * 0.18 - 0.18**2], rel=0.06)


def _imported(monkeypatch, name):
    import importlib

    monkeypatch.syspath_prepend(str(EXAMPLES / name))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)


GOALS = {"llama": 2.6, "bert": 3.4, "lora": 2.95, "vit": 0.7}


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", NAMES)
def test_a_whole_run_learns(name, tmp_path, monkeypatch):
    monkeypatch.setattr("tests.cli.helpers.TIMEOUT_S", 1700)
    result = meshwright("train", EXAMPLES / name / f"{name}.toml", "--out", tmp_path / "run", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert sum(losses(tmp_path / "run")[-20:]) / 20 < GOALS[name]


@pytest.mark.long
@pytest.mark.parametrize("launcher", [(), ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")])
@pytest.mark.parametrize("name", NAMES)
def test_scripts_run_alone_and_under_torchrun(name, launcher, tmp_path):
    import subprocess

    command = [sys.executable, *launcher, str(EXAMPLES / name / f"{name}.py"), "--steps", "2", "--batch-size", "4"]
    told = {**environment(), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(command, env=told, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^step \d/2  loss \d", done.stdout, re.MULTILINE)) == 2
