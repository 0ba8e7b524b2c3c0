"""``eval.samples`` and ``run.epochs``: what a run writes while it trains, and how long it is."""

import json

import pytest
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.cli.eval_and_generate import GenerateOptions, Trained, generate
from tests.cli import helpers, test_finetune, test_validation_layouts
from tests.cli.helpers import as_program, losses, train_as_rank
from tests.pool import RemoteFailure

PROMPTS = ("what is 1+1?", "what is 1+1+1?")
SAMPLES = f"eval.samples={json.dumps(PROMPTS)}"
LAYOUTS = {
    "fsdp": "fsdp",
    "data": "parallel_mode(data=2)",
    "tensor": "parallel_mode(tensor=2) + tensor_parallel",
    "divided": "parallel_mode(tensor=2) + tensor_parallel(sequence=True)",
    "pipeline": "parallel_mode(pipeline=2) + pipeline_parallel + gradient_accumulation(2)",
    "context": "parallel_mode(context=2) + context_parallel",
    "sequence": "parallel_mode(sequence=2) + sequence_parallel",
    "outer": "parallel_mode(replica=2) + outer",
    "compiled": "fsdp + compile(backend='eager')",
    "half": "zero2 + half('bf16') + checkpoint",
    "loss": "fsdp + module_replace",
    "expert": "parallel_mode(expert=2) + expert_parallel",
}
CHANGES = ("eval.every=2", "eval.sample_tokens=6", "run.checkpoint_every=2", "run.steps=4", SAMPLES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("samples")
    test_finetune.project(folder)
    test_validation_layouts.mixture(folder / "mixtral")
    helpers.project(folder)
    return folder


def written(folder, path, uses_template=True):
    with as_program(folder) as said:
        trained = Trained(path, None, None, (), False)
        generate(GenerateOptions(trained, PROMPTS, 6, 0.0, 1.0, 0, uses_template, True))
    return [each["text"] for each in json.loads(said.getvalue())]


def samples(run_dir):
    lines = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    return {line["step"]: [each["text"] for each in line["samples"]] for line in lines}


_LONG = [pytest.param(each, marks=pytest.mark.long) for each in LAYOUTS if each != "fsdp"]


@pytest.mark.parametrize("layout", ["fsdp", *_LONG])
def test_a_run_writes_what_its_checkpoints_do(ranks, folder, layout):
    out, strategy = folder / layout, f"strategy.methods={json.dumps(LAYOUTS[layout])}"
    model = f'model.source="hf:{"mixtral" if layout == "expert" else "model"}"'
    said, _ = ranks(2).run(train_as_rank, folder / "sft.toml", *CHANGES, model, strategy, out=out)
    found = samples(out)
    assert sorted(found) == [2, 4]
    assert f"sample at step 4: '{PROMPTS[0]}' → {found[4][0]!r}" in said
    for step in (2, 4):
        assert found[step] == ranks(1).run(written, folder, out / f"checkpoints/step-{step:08}")[0]


def test_prompts_of_a_file_and_a_model_without_generate_and_training_goes_on_as_it_would(ranks, folder):
    (folder / "prompts.txt").write_text(f"{PROMPTS[0]}\n\n{PROMPTS[1]}\n")
    changes = ("run.steps=4", "model.args.dropout=0.3", "strategy.methods=fsdp")
    prompts = ('eval.samples="prompts.txt"', *CHANGES[:2])
    ranks(2).run(train_as_rank, folder / "tiny.toml", *changes, *prompts, out=folder / "bytes")
    assert samples(folder / "bytes")[4] == ranks(1).run(written, folder, folder / "bytes")[0]
    assert not (folder / "bytes/eval.jsonl").exists()
    ranks(2).run(train_as_rank, folder / "tiny.toml", *changes, out=folder / "mute")
    assert losses(folder / "bytes") == losses(folder / "mute")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (('eval.samples="absent.txt"',), "there are no prompts in .*absent.txt"),
        (("eval.samples=[]",), "samples with one prompt or more"),
        (("eval.sample_tokens=3",), "something to validate on"),
        (("eval.holdout=0.1", "eval.sample_tokens=3"), "sample_tokens beside samples only"),
        (('eval.samples=["a"]', "eval.keep_best=true"), "something to validate on"),
        (('eval.samples=["a"]', "data.source=tiny:Tiny"), "Samples of text need a tokenizer"),
        (('eval.samples=["a"]', "eval.ema=true"), "No average of the weights is kept"),
        (("run.epochs=0",), "greater than 0"),
    ],
)
def test_what_cannot_be_written_is_refused_before_the_first_step(ranks, folder, changes, words):
    with pytest.raises(RemoteFailure, match=words):
        ranks(1).run(train_as_rank, folder / "tiny.toml", *changes, out=folder / "never")
    assert not (folder / "never").exists()


# --- run.epochs


def test_epochs_are_counted_in_steps_and_the_later_of_both_keys_counts(ranks, folder):
    file, rank = folder / "tiny.toml", ranks(1)
    (told,) = rank.run(train_as_rank, file, "run.epochs=0.5", "run.batch_size=7", out=folder / "half")
    count = int(told.partition("0.5 epochs of ")[2].partition(" ")[0])
    run = json.loads((folder / "half" / "config.json").read_text())["run"]
    assert (run["epochs"], run["steps"]) == (0.5, -(-count // 14))
    assert len(losses(folder / "half")) == run["steps"]
    (told,) = rank.run(train_as_rank, file, "run.epochs=1", "run.batch_size=7", out=folder / "half", resume=True)
    assert f"1 epochs of {count} sequences are {-(-count // 7)} steps" in told
    assert "run.steps has changed" in told
    assert len(losses(folder / "half")) == -(-count // 7)
    rank.run(train_as_rank, file, "run.epochs=9", out=folder / "few", steps=2)
    assert len(losses(folder / "few")) == 2


def test_epochs_count_what_was_seen_where_a_run_goes_on_in_other_batches(ranks, folder):
    """Nine steps of four, then batches of seven: the run ends with the step that completes the epoch."""
    file, out, rank = folder / "tiny.toml", folder / "batches", ranks(1)
    seen = rank.run(train_as_rank, file, "run.epochs=1", out=folder / "whole")[0].partition("1 epochs of ")[2]
    count = int(seen.partition(" ")[0])
    rank.run(train_as_rank, file, out=out, steps=9)
    more = -(-(count - 36) // 7)
    for changes in (("run.epochs=1", "run.batch_size=7"), ("run.epochs=1", "run.batch_size=7")):
        (told,) = rank.run(train_as_rank, file, *changes, out=out, resume=True)
        assert f"1 epochs of {count} sequences are {9 + more} steps, of which" in told
        assert len(losses(out)) == 9 + more
    assert "nothing to do" in told
    # With data that have become longer the same epoch goes on, also in the same batches.
    corpus = folder / "corpus.txt"
    before = corpus.read_text()
    corpus.write_text(before + "more " * 64)  # 20 sequences
    (told,) = rank.run(train_as_rank, file, "run.epochs=1", "run.batch_size=7", out=out, resume=True)
    corpus.write_text(before)
    assert f"1 epochs of {count + 20} sequences are {9 + -(-(count + 20 - 36) // 7)} steps" in told


def test_an_epoch_of_a_mixture_has_as_many_sequences_as_all_sources(ranks, folder):
    mixture = '[{source = "chats.jsonl", weight = 3}, {source = "val.jsonl", name = "small"}]'
    text = (folder / "sft.toml").read_text().replace('source = "chats.jsonl"', f"mixture = {mixture}")
    (folder / "mixed.toml").write_text(
        text.replace("steps = 8", "epochs = 1").replace("batch_size = 4", "batch_size = 3")
    )
    (told,) = ranks(1).run(train_as_rank, folder / "mixed.toml", out=folder / "mixed")
    assert "1 epochs of 71 sequences are 24 steps; by its weight, of chats 0.9, small 1.6 epochs" in told


STREAM = """
[model]
source = "tiny:Tiny"
args = { vocab_size = 257, seq_len = 16 }
[data]
source = "mine:Stream"
[run]
epochs = 1
device = "cpu"
trackers = []
"""


def test_streams_and_two_lengths_are_refused(ranks, folder):
    (folder / "mine.py").write_text(
        "import torch\n\n\nclass Stream:\n    def __iter__(self):\n        yield from torch.arange(64).view(4, 16)\n"
    )
    (folder / "stream.toml").write_text(STREAM)
    with pytest.raises(RemoteFailure, match=r"run\.epochs needs data with a length"):
        ranks(1).run(train_as_rank, folder / "stream.toml", out=folder / "streamed")
    (folder / "both.toml").write_text(STREAM.replace("epochs = 1", "epochs = 1\nsteps = 3"))
    assert "steps or epochs, not both" in CliRunner().invoke(app, ["train", str(folder / "both.toml")]).stderr
