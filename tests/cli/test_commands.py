"""Commands that start no ranks."""

import pytest
from typer.testing import CliRunner

import meshwright
from meshwright.cli import app
from meshwright.strategy import METHOD_CONFIGS
from tests.cli.helpers import project


def _run(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_version_and_help():
    assert _run("--version").stdout.strip() == meshwright.__version__
    assert "[optimizer]" in _run("train", "--help-config").stdout
    shown = _run("methods").stdout
    assert all(name in shown for name in METHOD_CONFIGS)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((), "name a training file"),
        (("absent.toml",), "absent.toml cannot be read"),
        (("FILE", "--set", "run.stepz=3"), "did you mean 'steps'"),
        (("FILE", "--resume"), "--out RUN_DIR"),
        (("FILE", "--resume", "--out", "absent"), "no checkpoint to resume from"),
        (("FILE", "--nproc", "3"), "run.batch_size does not divide"),
    ],
)
def test_a_refusal_is_one_paragraph(tmp_path, arguments, word):
    file = project(tmp_path)
    result = _run("train", "--nproc", 2, *(file if each == "FILE" else each for each in arguments))
    assert result.exit_code == 1
    assert result.stderr.startswith("meshwright: error: ")
    assert word in result.stderr
    assert result.stderr.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == [
        "corpus.txt",
        "tiny.py",
        "tiny.toml",
    ]


def test_traceback_shows_where(tmp_path):
    result = _run("train", project(tmp_path), "--traceback", "--set", "x=1")
    assert "Traceback" in result.stderr
    assert "meshwright: error: " in result.stderr
