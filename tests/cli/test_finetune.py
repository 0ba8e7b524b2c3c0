"""Fine-tuning from the command line: conversations in files, packed and padded, mixtures, validation."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from meshwright.cli.train_config import DataTable
from meshwright.cli.train_corpus import find_corpus
from meshwright.cli.train_options import parse_config
from meshwright.errors import ConfigError, DataError
from tests.cli.helpers import meshwright, metrics, train_as_rank
from tests.data.test_chat import tokenizer

CONFIG = """
[model]
source = "hf:model"

[data]
source = "chats.jsonl"
seq_len = 48
cache_dir = "cache"

[optimizer]
lr = 3e-3
schedule = "constant"

[run]
steps = 8
batch_size = 4
log_every = 1
device = "cpu"
trackers = []
"""


def chats(count, first=0):
    for number in range(first, first + count):
        question, answer = "what is " + "1+" * (number % 5) + "1?", str(number % 5 + 1)
        yield {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def project(folder, changes=""):
    """A folder with a pretrained model, chats and a training file."""
    tokenizer(folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=272, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    (folder / "chats.jsonl").write_text("".join(json.dumps(each) + "\n" for each in chats(60)))
    (folder / "val.jsonl").write_text("".join(json.dumps(each) + "\n" for each in chats(11, first=60)))
    (folder / "sft.toml").write_text(CONFIG + changes)
    return folder / "sft.toml"


def _losses(out):
    return [record["loss"] for record in metrics(out)]


@pytest.fixture(scope="module")
def runs(ranks, tmp_path_factory):
    """Two runs of one project: eight steps of the whole program; four on two ranks, which one rank resumes."""
    folder = tmp_path_factory.mktemp("finetune")
    file = project(folder, '\n[eval]\nsource = "val.jsonl"\nevery = 4\nkeep_best = true\n')
    told = meshwright("train", file, "--out", "one", "--nproc", 1, folder=folder)
    assert told.returncode == 0, told.stderr
    ranks(2).run(train_as_rank, file, out=folder / "two", steps=4)
    ranks(1).run(train_as_rank, file, out=folder / "two", resume=True)
    return folder, told.stdout + told.stderr


def _validations(out):
    return [json.loads(line) for line in (out / "eval.jsonl").read_text().splitlines()]


def test_losses_do_not_depend_on_the_ranks_or_on_a_resume(runs):
    folder, shown = runs
    assert _losses(folder / "one") == pytest.approx(_losses(folder / "two"), rel=1e-5)
    assert _losses(folder / "one")[-1] < _losses(folder / "one")[0]
    one, two = (_validations(folder / name) for name in ("one", "two"))
    assert [each["step"] for each in one] == [each["step"] for each in two] == [4, 8]
    assert [each["loss"] for each in one] == pytest.approx([each["loss"] for each in two], rel=1e-5)
    assert one[-1]["perplexity"] == pytest.approx(torch.tensor(one[-1]["loss"]).exp().item())
    assert "validation at step 8: loss" in shown
    for out in (folder / "one", folder / "two"):
        assert [path.name for path in (out / "best").glob("step-*")] == ["step-00000008"]


def test_a_run_that_goes_over_its_best_step_again_keeps_it(runs, ranks):
    """As when it was killed after the best checkpoint, and before the next ordinary one."""
    folder, _ = runs
    shutil.copytree(folder / "two", folder / "again")
    shutil.rmtree(folder / "again" / "checkpoints" / "step-00000008")
    ranks(1).run(train_as_rank, folder / "sft.toml", out=folder / "again", resume=True)
    assert _losses(folder / "again") == pytest.approx(_losses(folder / "two"), rel=1e-5)
    assert [path.name for path in (folder / "again" / "best").glob("step-*")] == ["step-00000008"]


def test_packed_padded_and_single_samples_have_one_loss(runs):
    folder, _ = runs
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    for layout in ("packed", "padded"):
        ((_, rows),) = _corpus(folder, source="val.jsonl", layout=layout).sources()
        counts = rows.num_trained()
        losses = [model(**{key: value[None] for key, value in row.items()}).loss.item() for row in rows]
        found = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
        assert found == pytest.approx(_alone(model, folder), rel=1e-6)


def _corpus(folder, **keys):
    table = DataTable.model_validate({"seq_len": 48, "cache_dir": "cache", **keys})
    return find_corpus(table, folder, folder / "model")


def _alone(model, folder):
    """The mean loss over all trained tokens of val.jsonl, one sample at a time, by transformers alone."""
    own, total, count = AutoTokenizer.from_pretrained(folder / "model"), 0.0, 0
    for chat in chats(11, first=60):
        asked = own.apply_chat_template(chat["messages"][:1], add_generation_prompt=True, return_dict=True)
        prompt = asked["input_ids"]
        answer = own(chat["messages"][1]["content"] + "<|im_end|>", add_special_tokens=False)["input_ids"]
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        total += torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum").item()
        count += len(answer)
    return total / count


def test_patience_ends_a_run_and_sources_of_a_mixture_are_told_apart(runs, ranks):
    folder, _ = runs
    mixed = '[{source = "chats.jsonl", weight = 3}, {source = "val.jsonl", name = "small"}]'
    text = (folder / "sft.toml").read_text().replace("every = 4", "every = 2").replace("lr = 3e-3", "lr = 0")
    text = text.replace('source = "val.jsonl"', "holdout = 0.2\npatience = 1")
    text = text.replace('source = "chats.jsonl"', f"mixture = {mixed}")
    (folder / "mixed.toml").write_text(text)
    said, _ = ranks(2).run(train_as_rank, folder / "mixed.toml", out=folder / "mixed")
    assert len(_losses(folder / "mixed")) == 4  # the second validation was no lower than the first
    assert "the run ends here" in said
    assert {"loss/chats", "loss/small"} <= set(_validations(folder / "mixed")[0])


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"tokenizer": "bytes"}, "need a tokenizer with a chat template"),
        ({"layout": "windows"}, "cannot be cut into windows"),
        ({"source": "bad.jsonl"}, r"Line 2 of .* is no JSON object.*no json"),
        ({"source": "list.jsonl"}, r"Line 1 of .* is no JSON object"),
        ({"source": "texts.jsonl"}, r"texts.jsonl:2 has neither a text nor a conversation.*Got keys body"),
        ({"source": "empty.jsonl", "layout": "packed"}, "nothing to train on"),
        ({"too_long": "refuse", "seq_len": 20}, "sample is longer than a row"),
        ({"mixture": [{"source": "chats.jsonl"}, {"source": "chats.jsonl"}]}, "Two sources of the mixture"),
    ],
)
def test_data_that_are_refused(runs, keys, words):
    folder, _ = runs
    good = json.dumps(next(chats(1))) + "\n"
    (folder / "bad.jsonl").write_text(good + "no json\n" + good)
    (folder / "list.jsonl").write_text("[1]\n" + good)
    (folder / "texts.jsonl").write_text(good + '{"body": "a text"}\n')
    (folder / "empty.jsonl").write_text("\n")
    given = {"source": "chats.jsonl"} | keys if "mixture" not in keys else keys
    with pytest.raises((ConfigError, DataError), match=words):
        _corpus(folder, **given).sources()


def test_bad_lines_are_left_out_and_counted(runs, capfd):
    folder, _ = runs
    good = json.dumps(next(chats(1))) + "\n"
    (folder / "skip.jsonl").write_text(good + "no json\n" + good)
    ((_, rows),) = _corpus(folder, source="skip.jsonl", bad_lines="skip").sources()
    assert len(rows.samples) == 2
    assert "skip: 1 lines were no JSON objects" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"every": 5}, "something to validate on"),
        ({"source": "a", "holdout": 0.1}, "one of source, mixture and holdout"),
        ({"source": "a", "every": 0}, "greater than or equal to 1"),
        ({"holdout": 1.0}, "less than 1"),
    ],
)
def test_validation_that_is_refused(table, words):
    with pytest.raises(ConfigError, match=words):
        parse_config({"model": {"source": "a:b"}, "eval": table}, "file")


def test_a_run_tells_its_plan_once_and_nothing_foreign(runs):
    _, shown = runs
    assert shown.count("Plan: ") == 1
    assert "measured" in shown
    assert not [line for line in shown.splitlines() if "torchao" in line or "Warning" in line]


_OWN_LOSS = """
from torch.nn import functional


def of_answers(model_input, output):
    labels = model_input["labels"][:, 1:].flatten()
    return functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels, ignore_index=-100)
"""


def test_a_loss_of_the_users_own_is_validated_on_any_number_of_ranks(ranks, tmp_path):
    """The second batch of eleven rows has three: one of two ranks has blank rows alone, the other some."""
    file = project(tmp_path, '\n[eval]\nsource = "val.jsonl"\nevery = 1\nbatch_size = 8\n')
    (tmp_path / "mine.py").write_text(_OWN_LOSS)
    changes = ('data.layout="padded"', "run.steps=1")
    for name, world, loss in (("transformers", 1, ()), ("one", 1, "mine"), ("two", 2, "mine")):
        own = ('model.loss="mine:of_answers"',) if loss else ()
        ranks(world).run(train_as_rank, file, *changes, *own, out=tmp_path / name)
    found = [_validations(tmp_path / name)[0]["loss"] for name in ("transformers", "one", "two")]
    assert found == pytest.approx([found[0]] * 3, rel=1e-5)
