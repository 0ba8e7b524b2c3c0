"""``meshwright checkpoint``, and runs that are asked to stop."""

import contextlib
import io
import json
import os
import shutil
import signal
import sys
import time
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from typer.testing import CliRunner

from meshwright import runtime
from meshwright.cli import app, checkpoint_tools, train_loop as training
from meshwright.cli.run_files import MODEL_CONFIG
from meshwright.cli.train_options import Options
from meshwright.store import CheckpointStore, TrainingState, export, folder as folders
from meshwright.store.pretrained import StoredWeights
from meshwright.training.accelerated import Accelerated
from tests.cli.helpers import losses, project


def _train(options, signal_at_step=None):
    """What a rank of the program does; rank 1 (or the only one) is sent SIGTERM in a step."""
    path, said, told, step = list(sys.path), io.StringIO(), io.StringIO(), training._step

    def _signalled(session, *given, **named):
        result = step(session, *given, **named)
        if session.state.step == signal_at_step and int(os.environ.get("RANK", "1")) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
        return result

    runtime.seed_everything(0)  # as a process does that starts
    try:
        with (
            mock.patch.object(training, "shutdown_distributed"),
            mock.patch.object(training, "_step", _signalled),
            contextlib.redirect_stderr(said),
            contextlib.redirect_stdout(told),
        ):
            status = training.train(options)
    finally:
        sys.path[:] = path
        sys.modules.pop("tiny", None)
    return status, said.getvalue(), told.getvalue()


def _stop_and_go_on(file, folder):
    """A run that is stopped behind step 4, its saves in the background, and goes on; then one that is not stopped."""
    background = ("run.background_checkpoints=true",)
    stopped = _train(Options(file, out=folder / "stopped", changes=background), signal_at_step=4)
    names = sorted(path.name for path in (folder / "stopped" / "checkpoints").iterdir())
    went_on = _train(Options(file, out=folder / "stopped", resume=True))
    return stopped, names, went_on, _train(Options(file, out=folder / "whole"))


def test_a_run_that_is_asked_to_stop_saves_and_goes_on_exactly(ranks, tmp_path):
    first, second = ranks(2).run(_stop_and_go_on, project(tmp_path), tmp_path)
    (status, said, told), names, went_on, whole = first
    assert (status, second[0][0]) == (143, 143)
    assert "stopped by SIGTERM after step 5, which is saved" in said  # the first whose loss tells of the signal
    steps = len(losses(tmp_path / "whole"))
    assert f"--resume --steps {steps} " in told  # to where it was going, and not to twice as far as it has come
    assert names == ["step-00000003", "step-00000005"]
    assert (went_on[0], whole[0]) == (0, 0)
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")


def _stop_in_validation(file, out):
    """A run that is sent SIGTERM with the third batch of its first validation, of ten."""
    evaluate, calls = Accelerated.evaluate, []

    def signalled(*given):
        calls.append(given)
        if len(calls) == 3 and runtime.rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
        return evaluate(*given)

    changes = ("eval.holdout=0.55", "eval.every=2")
    with mock.patch.object(Accelerated, "evaluate", signalled):
        stopped = _train(Options(file, out=out, changes=changes))
    count = len(calls)
    went_on = _train(Options(file, out=out, changes=changes, resume=True))
    return stopped, count, went_on


def test_a_run_that_is_asked_to_stop_within_a_validation_saves_at_once(ranks, tmp_path):
    found = ranks(2).run(_stop_in_validation, project(tmp_path), tmp_path / "run")
    (_, said, _), _, went_on = found[0]
    assert [each[0][0] for each in found] == [143, 143]
    assert "stopped by SIGTERM after step 2, which is saved" in said
    assert [count for _, count, _ in found] == [3, 3]
    assert went_on[0] == 0
    assert len(losses(tmp_path / "run")) == 6
    lines = (tmp_path / "run" / "eval.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [4, 6]


def _run(*arguments):
    return CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])


@pytest.fixture
def gpt2_run(tmp_path):
    """Two checkpoints of a tiny GPT-2 in a run directory: (run, model)."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    run = tmp_path / "run"
    store = CheckpointStore(run / "checkpoints")
    for step in (1, 2):
        strategy = json.dumps({"methods": ["fsdp", ["half", {}]]})
        store.save(TrainingState(model, torch.optim.AdamW(model.parameters()), step=step, strategy=strategy))
        with torch.no_grad():
            model.transformer.wpe.weight.add_(1)
    (run / MODEL_CONFIG).write_text(config.to_json_string())
    return run, model


def test_checkpoints_are_listed_verified_and_exported(gpt2_run, tmp_path):
    run, model = gpt2_run
    rows = json.loads(_run("list", run, "--json").stdout)
    assert [(row["step"], row["world_size"], row["methods"]) for row in rows] == [
        (step, 1, "fsdp, half") for step in (1, 2)
    ]
    assert "step-00000002" in _run("list", run).stdout
    assert _run("verify", run).exit_code == 0
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja", "model.safetensors"):
        (source / name).write_text(name)
    (run / "config.json").write_text(
        json.dumps({"file": str(tmp_path / "train.toml"), "model": {"source": "hf:source"}})
    )
    exported = _run("export", run, tmp_path / "hf", "--dtype", "bf16")
    assert exported.exit_code == 0, exported.stderr
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    loaded = type(model).from_pretrained(tmp_path / "hf", dtype=torch.bfloat16)
    with torch.no_grad():
        model.transformer.wpe.weight.sub_(1)
    expected = model.to(torch.bfloat16).state_dict()
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in expected.items())

    damaged = run / "checkpoints" / "step-00000002"
    (damaged / "state.json").write_text("{}")
    (damaged / "rng-00000.safetensors").unlink()
    verified = _run("verify", run / "checkpoints")
    assert verified.exit_code == 1
    assert "step-00000001: whole" in verified.stdout
    assert "missing: rng-00000.safetensors; of another size: state.json" in verified.stdout
    one_file = _run("export", run, tmp_path / "weights" / "one.safetensors")
    assert "passed over" in one_file.stderr
    kept = load_file(tmp_path / "weights" / "one.safetensors")
    assert kept["transformer.wpe.weight"].dtype == torch.float32
    assert _run("list", run).exit_code == 0


def _exported_in_turns(run, out):
    with (
        mock.patch.object(folders, "write_beside", wraps=folders.write_beside) as write,
        mock.patch.object(export, "_SHARD_BYTES", 1000),
        mock.patch.object(checkpoint_tools, "shutdown_distributed"),
    ):
        result = _run("export", run, out)
    return (
        result.exit_code,
        result.stdout,
        [name for call in write.mock_calls if (name := call.args[0].name).startswith("model-")],
    )


def test_all_ranks_of_a_launch_export(gpt2_run, ranks, tmp_path):
    run, model = gpt2_run
    answers = ranks(2).run(_exported_in_turns, run, tmp_path / "hf")
    assert [status for status, _, _ in answers] == [0, 0]
    assert [len(said.splitlines()) for _, said, _ in answers] == [1, 0]
    files = [file for _, _, written in answers for file in written]
    assert all(written for _, _, written in answers)
    assert len(files) == len(set(files)) == len(list((tmp_path / "hf").glob("*.safetensors")))
    _run("export", run, tmp_path / "one.safetensors")
    model.load_state_dict(load_file(tmp_path / "one.safetensors"), strict=False)  # the head is tied
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        loaded = type(model).from_pretrained(tmp_path / "hf").eval()
        assert torch.equal(loaded(tokens).logits, model.eval()(tokens).logits)


def _exported_to_dcp(run, out):
    with mock.patch.object(checkpoint_tools, "shutdown_distributed"):
        result = _run("export", run, out, "--format", "dcp", "--dtype", "bf16")
    return result.exit_code, result.stdout + result.stderr


def test_torchs_distributed_checkpoint_is_written_by_all_ranks_and_read(gpt2_run, ranks, tmp_path):
    run, model = gpt2_run
    answers = ranks(2).run(_exported_to_dcp, run, tmp_path / "dcp")
    assert [status for status, _ in answers] == [0, 0], answers
    assert "; for torch's DCP" in answers[0][1]
    assert sorted(path.name for path in (tmp_path / "dcp").iterdir()) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    assert _run("export", run, tmp_path / "one.safetensors").exit_code == 0
    entries = load_file(tmp_path / "one.safetensors")
    wanted = {name: torch.zeros_like(each, dtype=torch.bfloat16) for name, each in entries.items()}
    dcp.load(wanted, checkpoint_id=tmp_path / "dcp")
    assert all(torch.equal(wanted[name], each.bfloat16()) for name, each in entries.items())
    weights = StoredWeights.open(tmp_path / "dcp", model)
    whole = weights.read("transformer.wpe.weight", (slice(0, 8), slice(0, 8)), torch.bfloat16)
    assert torch.equal(whole, wanted["transformer.wpe.weight"])
    assert "writes a folder" in _run("export", run, tmp_path / "x.safetensors", "--format", "dcp").stderr


def test_relative_paths_inside_a_run_find_what_lies_beside_its_checkpoints(gpt2_run, tmp_path, monkeypatch):
    run, _ = gpt2_run
    inside = run / "checkpoints" / "step-00000002"
    for number, (folder, path) in enumerate([(inside.parent, "."), (inside.parent, inside.name), (inside, "..")]):
        monkeypatch.chdir(folder)
        assert "a transformers folder" in _run("export", path, tmp_path / str(number)).stdout
        assert (tmp_path / str(number) / "config.json").is_file()


def test_what_cannot_be_exported_is_said(gpt2_run, tmp_path):
    run, _ = gpt2_run
    newest = run / "checkpoints" / "step-00000002"
    assert "--format is not known" in _run("export", newest, tmp_path / "x", "--format", "gguf").stderr
    assert "--dtype is not known" in _run("export", newest, tmp_path / "x", "--dtype", "int3").stderr
    assert "exists already" in _run("export", newest, run).stderr
    assert "no checkpoint in" in _run("list", tmp_path / "nowhere").stderr
    shutil.rmtree(run / "checkpoints" / "step-00000001")
    (newest / "manifest.json").write_text("{}")
    broken = _run("export", run, tmp_path / "x")
    assert broken.exit_code == 1
    assert "is damaged" in broken.stderr
    assert not (tmp_path / "x").exists()
