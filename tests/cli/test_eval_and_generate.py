"""``meshwright eval`` and ``generate``: runs and folders, on any layout, beside what transformers computes."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

from meshwright.cli import app, eval_and_generate, train_loop
from meshwright.cli.eval_and_generate import EvalOptions, GenerateOptions, Trained, evaluate, generate
from meshwright.cli.train_options import Options
from meshwright.optim.dtensors import local_tensor
from tests.cli import helpers, test_finetune
from tests.cli.helpers import as_program
from tests.pool import RemoteFailure

LAYOUTS = {"fsdp": "fsdp", "tensor": "parallel_mode(tensor=2) + tensor_parallel", "chosen": None}
PIPELINE = "parallel_mode(pipeline=2) + pipeline_parallel"
PROMPTS = ("what is 1+1?", "what is 1+1+1?")


def trained(folder):
    """A short run of chats, and one of a model that is no transformers'; what they said."""
    with as_program(folder):
        train_loop.train(Options(folder / "sft.toml", out=folder / "run", steps=3))
        train_loop.train(Options(folder / "tiny.toml", out=folder / "bytes", steps=2))


@pytest.fixture(scope="module")
def folder(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    test_finetune.project(folder, '\n[eval]\nsource = "val.jsonl"\nevery = 3\n')
    helpers.project(folder)
    ranks(2).run(trained, folder)
    return folder


def of(path, strategy=None, changes=()):
    return Trained(Path(path), strategy, None, tuple(changes), False)


def evaluated(folder, path, data=(), strategy=None):
    with as_program(folder) as said:
        evaluate(EvalOptions(of(path, strategy), data, None, True))
    return json.loads(said.getvalue()) if said.getvalue() else None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loss_of_a_run_is_that_of_its_validation_on_any_layout(ranks, folder, layout):
    world = 1 if layout == "chosen" else 2
    found, *others = ranks(world).run(evaluated, folder, "run", (), LAYOUTS[layout])
    assert others == [None] * (world - 1)
    expected = json.loads((folder / "run" / "eval.jsonl").read_text().splitlines()[-1])
    assert found["step"] == 3
    assert found["sources"]["val"]["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found["sources"]["val"]["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-4)


def test_sources_have_losses_of_their_own_and_a_folder_has_some_too(ranks, folder):
    first, *_ = ranks(2).run(evaluated, folder, "model", ("val.jsonl", "chats.jsonl"))
    assert list(first["sources"]) == ["val", "chats", "all"]
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert first["sources"]["val"]["loss"] == pytest.approx(test_finetune._alone(model, folder), rel=1e-5)
    one, *_ = ranks(1).run(evaluated, folder, "bytes/checkpoints/step-00000002", ("corpus.txt",))
    assert one["sources"]["corpus"]["loss"] > 0


def written(folder, path, **options):
    given = {"max_new_tokens": 6, "temperature": 0.0, "top_p": 1.0, "seed": 3, "uses_template": True, "as_json": True}
    given |= options
    strategy = given.pop("strategy", None)
    with as_program(folder) as said:
        generate(GenerateOptions(of(path, strategy), PROMPTS, **given))
    return [each["text"] for each in json.loads(said.getvalue())] if said.getvalue() else None


def by_transformers(folder, prompt):
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    talk = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    made = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    return tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("strategy", ["fsdp", PIPELINE])
def test_texts_are_those_of_transformers_on_any_layout(ranks, folder, strategy):
    found, *_ = ranks(2).run(written, folder, "model", strategy=strategy)
    assert found == [by_transformers(folder / "model", prompt) for prompt in PROMPTS]


def test_a_text_may_be_longer_than_the_positions_of_a_model(ranks, folder):
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 24, "vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(folder / "short")
    tokenizer.save_pretrained(folder / "short")
    found, *_ = ranks(1).run(written, folder, "short", max_new_tokens=40, temperature=1.0)
    assert any(len(tokenizer(text)["input_ids"]) > 24 for text in found)


def test_a_model_without_generate_is_read_token_by_token(ranks, folder):
    alone, *_ = ranks(1).run(written, folder, "bytes", temperature=0.8, top_p=0.9)
    shared, *_ = ranks(2).run(written, folder, "bytes", temperature=0.8, top_p=0.9, strategy="fsdp")
    assert alone == shared
    assert all(len(text.encode(errors="replace")) >= 1 for text in alone)


def test_relative_paths_inside_a_run_are_of_that_run(tmp_path, monkeypatch):
    step = tmp_path / "run" / "checkpoints" / "step-00000010"
    step.mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text('{"file": "x.toml", "model": {}, "run": {}}')
    for folder, path in ((step, "."), (step, ".."), (step.parent, "."), (step.parent, step.name)):
        monkeypatch.chdir(folder)
        assert of(path).run() == tmp_path / "run"


def test_what_is_no_trained_model_is_refused(tmp_path):
    for words, expected in (
        (["eval", str(tmp_path), "--data", "x.txt"], "is no trained model"),
        (["generate", str(tmp_path / "absent"), "--prompt", "x"], "no such folder"),
    ):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 1
        assert expected in result.stderr


def test_there_must_be_something_to_evaluate_on(folder):
    result = CliRunner().invoke(app, ["eval", str(folder / "bytes")])
    assert result.exit_code == 1
    assert "--data SOURCE" in result.stderr


def trained_with_average(folder):
    changes = ('strategy.methods="fsdp + ema(decay=0.9)"', 'eval.source="corpus.txt"', "eval.ema=true", "run.steps=4")
    with as_program(folder):
        train_loop.train(Options(folder / "tiny.toml", out=folder / "averaged", changes=changes))


def evaluated_with(folder, *changes):
    with as_program(folder) as said:
        evaluate(EvalOptions(of("averaged", "fsdp", changes), (), None, True))
    return json.loads(said.getvalue())["sources"]["corpus"]["loss"] if said.getvalue() else None


def test_the_average_of_the_weights_is_evaluated_where_the_run_did(ranks, folder):
    ranks(2).run(trained_with_average, folder)
    expected = json.loads((folder / "averaged" / "eval.jsonl").read_text().splitlines()[-1])["loss"]
    for world in (1, 2):
        assert ranks(world).run(evaluated_with, folder)[0] == pytest.approx(expected, rel=1e-6)
    (weights,) = ranks(1).run(evaluated_with, folder, "eval.ema=false")
    assert abs(weights - expected) > 1e-3 * expected
    with pytest.raises(RemoteFailure, match="no moving average of the weights"):
        ranks(1).run(evaluated_without_one, folder)


def loaded_by_generate(folder, averaged):
    """Return the weights with which ``generate`` writes."""
    found = []
    plain = eval_and_generate.Writer.continued
    with as_program(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            eval_and_generate.Writer, "continued",
            lambda writer, job, ids: (
                found.append({name: local_tensor(value).clone() for name, value in job.model.state_dict().items()}),
                plain(writer, job, ids),
            )[1],
        )  # fmt: skip
        generate(GenerateOptions(of("averaged", "fsdp"), PROMPTS[:1], 2, 0.0, 1.0, 3, True, True, averaged))
    return found[0]


def test_the_average_of_the_weights_speaks_where_the_run_validates_it(ranks, folder):
    if not (folder / "averaged").exists():
        ranks(2).run(trained_with_average, folder)
    usual, plain, average = (ranks(1).run(loaded_by_generate, folder, each)[0] for each in (None, False, True))
    assert all(torch.equal(usual[name], average[name]) for name in usual)
    assert any(not torch.equal(plain[name], average[name]) for name in usual)


def evaluated_without_one(folder):
    with as_program(folder):
        evaluate(EvalOptions(of("bytes", None, ("eval.ema=true",)), ("corpus.txt",), None, True))
