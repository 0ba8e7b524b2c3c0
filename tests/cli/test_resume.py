"""Runs that start or go on by themselves: ``--resume auto``."""

import contextlib
import io
import shutil
import sys
from unittest import mock

import pytest
from typer.testing import CliRunner

from meshwright.cli import app, train_loop
from meshwright.cli.train_options import Options
from tests.cli.helpers import losses, metrics, project


def _train(file, out, steps=6):
    path, said = list(sys.path), io.StringIO()
    try:
        with mock.patch.object(train_loop, "shutdown_distributed"), contextlib.redirect_stderr(said):
            train_loop.train(
                Options(file, out=out, steps=steps, changes=("run.resume=auto", 'strategy.methods="fsdp"'))
            )
    finally:
        sys.path[:] = path
        for name in ("tiny", "mine"):
            sys.modules.pop(name, None)
    return said.getvalue()


def test_a_run_starts_and_goes_on(ranks, tmp_path):
    file, out = project(tmp_path), tmp_path / "run"
    begun = ranks(2).run(_train, file, out)[0]
    assert "no whole checkpoint" in begun
    assert "from the beginning" in begun
    whole = losses(out)
    # It was killed in its last save, before it had a name.
    (out / "checkpoints" / "step-00000006").rename(out / "checkpoints" / ".step-00000006.tmp")
    gone_on = ranks(2).run(_train, file, out)[0]
    assert "resuming after step 3" in gone_on
    assert "from the beginning" not in gone_on
    assert losses(out) == whole
    # Its only checkpoint is unfinished.
    shutil.rmtree(out / "checkpoints" / "step-00000003")
    (out / "checkpoints" / "step-00000006").rename(out / "checkpoints" / ".step-00000006.tmp")
    again = ranks(2).run(_train, file, out)[0]
    assert "from the beginning" in again
    assert losses(out) == whole
    assert [record["step"] for record in metrics(out)] == [1, 2, 3, 4, 5, 6]
    assert "at step 6 of 6" not in again


@pytest.mark.parametrize("words", [["--resume", "auto"], ["--resume=auto"]])
def test_auto_is_a_value_of_resume(tmp_path, words):
    file = project(tmp_path)
    with mock.patch("meshwright.cli.commands._train", return_value=0) as run:
        result = CliRunner().invoke(app, ["train", *words, str(file), "--out", "out"])
        assert result.exit_code == 0, result.output
        (options,) = run.call_args.args
        assert options.read().run.resume == "auto"
        assert options.resume is False
        assert "run.resume=auto" in options.arguments(tmp_path)
        CliRunner().invoke(app, ["train", str(file), "--resume", "--out", "out"])
        (options,) = run.call_args.args
        assert options.resume is True
        assert options.read().run.resume is None


def test_auto_needs_a_name(tmp_path):
    result = CliRunner().invoke(app, ["train", str(project(tmp_path)), "--resume", "auto", "--nproc", "2"])
    assert result.exit_code == 1
    assert "--out RUN_DIR" in result.stderr


# --- Data that have changed since


def _lines_on_resume(ranks, file, out):
    told = ranks(1).run(_train, file, out)[0]
    return [line for line in told.splitlines() if "the data of" in line]


def test_data_that_have_changed_since_are_told(ranks, tmp_path):
    file, out, corpus = project(tmp_path), tmp_path / "run", tmp_path / "corpus.txt"
    ranks(1).run(_train, file, out, 3)
    shutil.copytree(out, tmp_path / "same")
    shutil.copytree(out, tmp_path / "longer")
    assert _lines_on_resume(ranks, file, tmp_path / "same") == []
    before = corpus.read_text()
    corpus.write_text(before.replace("milk", "wine"))
    (line,) = _lines_on_resume(ranks, file, out)
    assert "the data of corpus have changed (76 sequences, of other content)" in line
    corpus.write_text(before + "and more " * 20)
    (line,) = _lines_on_resume(ranks, file, tmp_path / "longer")
    assert "since then the data of corpus have changed (76 sequences then, 88 now)" in line
    assert "some may be seen twice, and others not" in line


SAMPLES = """
import torch

COUNT = {count}


def samples():
    return list(torch.arange(16 * COUNT).remainder(257).view(COUNT, 16))
"""


def test_a_function_that_returns_another_number_of_samples_is_told(ranks, tmp_path):
    file, out = project(tmp_path), tmp_path / "run"
    text = file.read_text().replace('source = "*.txt"', 'source = "mine:samples"').replace('cache_dir = "cache"', "")
    text = text.replace('"tiny:Tiny"', '"tiny:Tiny"\nloss = "mine:loss"\nargs = { vocab_size = 257, seq_len = 16 }')
    file.write_text(text)
    loss = "\n\ndef loss(ids, output):\n    return output.float().square().mean()\n"
    (tmp_path / "mine.py").write_text(SAMPLES.format(count=64) + loss)
    ranks(1).run(_train, file, out, 3)
    (tmp_path / "mine.py").write_text(SAMPLES.format(count=480) + loss)
    (line,) = _lines_on_resume(ranks, file, out)
    assert "the data of mine:samples have changed (64 sequences then, 480 now)" in line
