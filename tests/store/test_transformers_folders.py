"""Folders of transformers into models under any strategy, and back, to the bit."""

import json
import shutil

import pytest
import torch

import meshwright as mw
from meshwright.store import load, save_folder
from tests import tiny
from tests.methods import split_runs

STRATEGIES = {
    "fsdp": ["fsdp"],
    "tensor": ["tensor_parallel", ("parallel_mode", {"tensor": 2})],
    "pipeline": [("parallel_mode", {"pipeline": 2}), "pipeline_parallel"],
}


def folders(path):
    """What transformers writes, in many files and in one; the weights of each."""
    given = {}
    for name in ("llama", "tied", "gpt2"):  # tied: a Llama whose head is its embedding; so it is in GPT-2
        model = split_runs.build(name)
        model.save_pretrained(path / name, max_shard_size="8KB" if name != "tied" else "1GB")
        given[name] = {key: value.clone() for key, value in model.state_dict().items()}
    return given


def loaded_and_exported(path, cases):
    """Loads folders under strategies, and writes them again."""
    for name, kind in cases:
        model = split_runs.build(name)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        result = mw.accelerate(
            model, torch.optim.SGD, tiny.Tokens(), split_runs.loss_func, strategy=STRATEGIES[kind],
            optim_args={"lr": 0.1}, prepare_input=split_runs.prepare_for(name), model_input_format="unpack_dict",
            dataloader_args={"batch_size": 4},
        )  # fmt: skip
        assert load(result.model, path / name) == ([], [])
        save_folder(result.model, path / f"{name}-{kind}", shard_bytes=2**13)
    return True


SHORT = (("gpt2", "tensor"), ("tied", "fsdp"))
ALL = tuple((name, kind) for name in ("llama", "tied", "gpt2") for kind in STRATEGIES)


@pytest.mark.parametrize("cases", [SHORT, pytest.param(ALL, marks=pytest.mark.long)], ids=["some", "all"])
def test_a_folder_of_transformers_goes_in_and_out(ranks, tmp_path, cases):
    from transformers import AutoModelForCausalLM

    given = folders(tmp_path)
    for folder, file in (("llama", "model.safetensors.index.json"), ("tied", "model.safetensors")):
        assert (tmp_path / folder / file).exists()
    assert all(ranks(2).run(loaded_and_exported, tmp_path, cases))
    for name, kind in cases:
        out = tmp_path / f"{name}-{kind}"
        shutil.copy(tmp_path / name / "config.json", out)
        again = AutoModelForCausalLM.from_pretrained(out).state_dict()
        assert again.keys() == given[name].keys()
        assert all(torch.equal(again[key], value) for key, value in given[name].items()), (name, kind)


@pytest.fixture
def world():
    mw.init_distributed()
    yield
    mw.shutdown_distributed()


@pytest.mark.usefixtures("world")
def test_what_else_lies_in_a_folder(tmp_path):
    model = split_runs.build("tied")
    model.save_pretrained(tmp_path)
    torch.save({"step": 3}, tmp_path / "training_args.bin")
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    torch.save({}, tmp_path / "scheduler.pt")
    other = split_runs.build("tied")
    with torch.no_grad():
        other.model.embed_tokens.weight.zero_()
    load(other, tmp_path)
    assert torch.equal(other.lm_head.weight, model.lm_head.weight)
    (tmp_path / "model.safetensors").unlink()
    load(other, tmp_path)
    two = {**model.state_dict(), "lm_head.weight": model.lm_head.weight.detach() + 1}
    torch.save(two, tmp_path / "pytorch_model.bin")
    with pytest.raises(
        mw.CheckpointError, match=r"lm_head\.weight and model\.embed_tokens\.weight, which the model ties"
    ):
        load(other, tmp_path)
    files = dict.fromkeys(model.state_dict(), "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    with pytest.raises(mw.CheckpointError):
        load(other, tmp_path)
